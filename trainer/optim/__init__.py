"""The optimizer: verl's workers, in this process or under Ray."""
