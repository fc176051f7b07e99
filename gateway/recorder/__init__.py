"""Spans of policy calls, on disk until the span store has them."""
