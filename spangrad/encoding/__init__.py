"""Encoders of wire formats that several stages write."""
