"""Issues of real repositories, repaired with a shell in a sandbox."""
