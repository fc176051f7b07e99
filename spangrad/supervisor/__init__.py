"""Supervisor of the services of one machine: start in order, health, restarts, clean end."""
