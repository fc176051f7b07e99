"""Ready groups of rollouts to the batch of a training step."""
