"""Training from a script: the client, and what it asks the queue for."""
