"""Sandboxes of agents' programs, without root: engines, what a program may see and use, and the way to the services outside."""
