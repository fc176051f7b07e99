"""The span store as every part reads it: connection, build specifications, rollouts and lineage."""
