"""Spans to transitions: complete rollouts are read from the span store, and each of their policy calls is concluded once."""
