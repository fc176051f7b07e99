"""Spans to policy calls: which spans tell of one call, and which call came before it."""
