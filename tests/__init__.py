"""The tests of every part, and what they share in `tests.support`."""
