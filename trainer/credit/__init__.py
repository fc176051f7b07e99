"""Credit assignment: rewards to advantages."""
