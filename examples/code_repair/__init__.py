"""Small repositories with one bug, repaired by an agent with a shell and an editor in a sandbox."""
