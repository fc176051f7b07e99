"""Code that runs in an agent's process."""
