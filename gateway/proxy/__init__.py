"""A policy call on its way from the agent to the engine and back."""
