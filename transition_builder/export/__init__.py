"""Exports of built transitions: every policy call of the requested rollouts is written, or counted as left out with the reason."""
