"""Recipes: settings, data and one command each to train instruct models of 0.5B to 32B on public tasks."""
