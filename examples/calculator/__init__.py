"""Word problems that an AutoGen agent solves with a calculator."""
