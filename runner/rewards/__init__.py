"""Reward services: a Python evaluator served over HTTP, and its client."""
