"""Versions of prompts, which the queue keeps and serves."""
