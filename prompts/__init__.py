"""Prompt optimisation: a beam search whose steps are a model's critiques of rollouts, and whose trials are never trained."""
