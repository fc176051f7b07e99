"""A search for a better prompt, of an agent that is a program of its own, with models that are scripted."""
