"""HTTP requests to services, and time limits of servers for slow clients."""
