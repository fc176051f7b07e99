"""A random model of a given size, with a tokenizer of as many words, for benchmarks that compute with a model and train none.

In: sizes. Out: a Hugging Face directory. Invariant: the same sizes and seed give the same weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.two_tools.model import WORDS, word_tokenizer


def write_model(directory: Path, *, hidden: int, layers: int, words: int, seed: int, head_spread: float | None = None) -> None:
    """Write the model, in float32.

    Args:
        directory: where to.
        hidden: its width; heads have 64 of it, and two share keys and values.
        layers: number of its layers.
        words: number of its tokens.
        seed: of its weights.
        head_spread: standard deviation of the head's weights. None: that of all weights.
    """
    tokenizer = word_tokenizer([*WORDS, *(f"w{number}" for number in range(words - len(WORDS)))])
    heads = max(1, hidden // 64)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=32768,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
            dtype="float32",
        )
    )
    if head_spread is not None:
        torch.nn.init.normal_(model.lm_head.weight, std=head_spread)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
