"""Access to the span store for every part: connection, build specifications, rollouts and lineage."""
