"""Metrics, evaluations, checks and progress of a training run."""
