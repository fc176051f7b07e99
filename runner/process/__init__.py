"""Rollouts as a service: one request asks for rollouts, and is answered with their trajectories."""
