"""Commands on the content of the span store: exports, rewards, the schema."""
