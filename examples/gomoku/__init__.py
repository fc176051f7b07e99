"""Gomoku on a small board, as an environment of two players."""
