"""What builders made, in the formats that other tools read.

In: a dataset of the span store. Out: Parquet, Hugging Face datasets, verl's layouts, supervised rows, preference pairs. Invariant: every
policy call of the rollouts that were asked for is written or counted among what was left out, with the reason.
"""
