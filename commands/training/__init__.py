"""Commands that make rollouts, build transitions and train."""
