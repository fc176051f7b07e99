"""Models with random weights and batches for them, for the GPU checks: no check downloads anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from examples.two_tools.model import WORDS, word_tokenizer
from tests.support.policies import NO_ALARM, trainer_settings, transition_row
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer

SMALL = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""Shapes of 5M parameters."""
HALF_BILLION = {
    **SMALL,
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "tie_word_embeddings": True,
}
"""Shapes of Qwen2.5-0.5B."""


def make_model(directory: Path, shapes: dict[str, Any]) -> Path:
    """Write a model of these shapes, whose head is as peaked as a trained one's, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shapes), dtype=torch.float32)
    model.save_pretrained(directory)
    known = word_tokenizer([*WORDS, *(f"w{number}" for number in range(min(shapes["vocab_size"], 4096) - len(WORDS)))])
    known.save_pretrained(directory)
    return directory


def random_batch(vocabulary: int, lengths: list[tuple[int, int]], rank_count: int = 1) -> Batch:
    """Rows of these numbers of prompt and response tokens, with advantages from -1 to 1 and logprobs that are made up."""
    random = np.random.default_rng(0)
    rows = [
        transition_row(
            f"rollout-{at}",
            PromptIds=random.integers(3, vocabulary, prompt).tolist(),
            ResponseIds=random.integers(3, vocabulary, response).tolist(),
            Logprobs=[-float(np.log(vocabulary))] * response,
        )
        for at, (prompt, response) in enumerate(lengths)
    ]
    return layout(separate(pl.DataFrame(rows), pl.Series(np.linspace(-1, 1, len(rows)))), lineage=[0], divisor=rank_count)


def optimizer_of(model: Path, **settings: Any) -> VerlOptimizer:
    """An optimizer of the trainer, on a GPU where there is one; it tolerates logprobs that are made up unless told otherwise."""
    return VerlOptimizer(model, trainer_settings(**{"model": model, "alarms__logprob": NO_ALARM, **settings}))


def stepped(model: Path, lengths: list[tuple[int, int]], shapes: dict[str, Any], **settings: Any) -> dict[str, float]:
    """Metrics of one step of an optimizer of its own on a random batch."""
    optimizer = optimizer_of(model, **settings)
    try:
        return optimizer.step(random_batch(shapes["vocab_size"], lengths, optimizer.data_parallel_size))
    finally:
        optimizer.close()


def without_advantages(batch: Batch) -> Batch:
    """The batch with advantages of 0, so that its step compares logprobs and moves no weights."""
    return replace(batch, advantages=np.zeros_like(batch.advantages))
