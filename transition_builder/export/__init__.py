"""Exports of built transitions, in the formats that other tools read.

In: a dataset of the span store. Out: Parquet, Hugging Face datasets, verl's layouts, supervised rows, preference pairs. Invariant: every
policy call of the requested rollouts is written, or counted as left out with the reason.
"""
