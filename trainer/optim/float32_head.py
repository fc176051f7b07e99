"""Logits in float32, in whichever dtype the rest of a model is computed.

Invariant: the head's weights are those of the forward pass, rounded as every other weight is, so that an engine with the same weights and
a float32 head (`engine.head_dtype`) gives the same logits; in float32 nothing changes.

A logit of 20 has steps of 0.125 in bfloat16, so that logprobs of two bfloat16 heads that sum in another order differ by as much.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def compute_head_in_float32(module: Any) -> None:
    """Replace the products of a model's head, and of adapters on it, by float32 ones.

    Args:
        module: a Hugging Face causal model, or PEFT's around one; sharded or not, its head tied to the embedding or not.
    """
    for layer in module.get_output_embeddings().modules():
        if isinstance(layer, torch.nn.Linear):
            setattr(layer, "forward", functools.partial(_multiply, layer))  # noqa: B010 - its parameter has another name


def _multiply(layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits, shape (..., out_features), in float32, of states of any dtype.

    The layer's parameters are read at each call, as FSDP2 puts the gathered ones in their place.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if layer.bias is None else layer.bias.float()  # pyright: ignore[reportUnnecessaryComparison]
        return torch.nn.functional.linear(hidden.float(), layer.weight.float(), bias)
