"""Views of rollouts: the list with its filters and search, one rollout, its conversation."""
