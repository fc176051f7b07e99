"""Policy losses over verl's, token by token and over whole responses."""
