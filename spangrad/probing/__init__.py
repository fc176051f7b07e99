"""Probing of a machine and a model: facts in, proposals for settings out."""
