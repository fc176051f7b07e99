"""Shared parts of the examples: a tiny model with a warm start, the loop over the real services, the curve.

In: an `Example`. Out: a trained policy under runs/, a picture and a line of JSON. Invariant: agents import nothing of this package.
"""
