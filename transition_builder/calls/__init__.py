"""Spans to policy calls: which spans describe the same call, and which call came before it."""
