"""Prompt optimisation: a beam search whose steps are a model's critiques of rollouts; its trials are never trained on."""
