"""Checkpoints, and their way to running engines."""
