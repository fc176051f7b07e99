"""Rollouts that are complete, and spans that no rollout claims."""
