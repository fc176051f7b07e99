"""The trainer: finished groups of rollouts in, policy versions out."""
