"""Training from a script: the client, and its requests to the queue."""
