"""Weights on disk: checksums, tokenizer hashes and LoRA adapters."""
