"""Commands over what the span store holds: exports, rewards, the schema."""
