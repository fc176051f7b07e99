"""Wire formats that several stages write or read."""
