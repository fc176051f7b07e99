"""Reads of the builder from the span store, and its writes."""
