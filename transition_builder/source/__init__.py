"""What the builder reads of the span store and writes to it."""
