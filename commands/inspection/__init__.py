"""Commands that show rollouts, spans, lineage and settings."""
