"""LoRA adapters with random weights, large enough to be told apart, and what PEFT computes with them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from spangrad.weights.adapters import PREFIX, WEIGHTS, A, AdapterFacts, B, adapter_facts, write_config


def random_adapter(base: Path, directory: Path, *, seed: int, rank: int = 4, alpha: float = 6, scale: float = 0.05) -> Path:
    """An adapter of all linear layers but the head, with A and B drawn from a normal distribution."""
    dice = np.random.default_rng(seed)
    tensors = dict[str, np.ndarray]()
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            layer = PREFIX + name.removesuffix(".weight")
            tensors[layer + A] = (scale * dice.standard_normal((rank, columns))).astype(np.float32)
            tensors[layer + B] = (scale * dice.standard_normal((rows, rank))).astype(np.float32)
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_config(directory, AdapterFacts(base, rank, alpha), tensors)
    return directory


def logprobs_by_peft(directory: Path, prompt: list[int], response: list[int]) -> list[float]:
    """Logprob of each token of a response under a model, or a model and its adapter."""
    import torch

    with torch.inference_mode():
        logits = _load(directory)(torch.tensor([prompt + response])).logits[0]
    at = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return at[torch.arange(len(response)), torch.tensor(response)].tolist()


@lru_cache(maxsize=16)
def _load(directory: Path) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = adapter_facts(directory)
    model = AutoModelForCausalLM.from_pretrained(adapter.base if adapter else directory, dtype=torch.float32)
    return PeftModel.from_pretrained(model, directory) if adapter else model
