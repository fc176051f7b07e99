"""Requests to services over HTTP, and time limits of servers for slow clients."""
