"""Logits in float32, in whichever dtype the rest of a model is computed.

Invariant: the head's weights are those of the forward pass, rounded as every other weight is, so that an engine with the same weights and
a float32 head (`engine.head_dtype`) gives the same logits; in float32 nothing changes.

A logit of 20 has steps of 0.125 in bfloat16, so that logprobs of two bfloat16 heads that sum in another order differ by as much.
"""

from __future__ import annotations

from typing import Any


def compute_head_in_float32(module: Any) -> None:
    """Replace the products of a model's head, and of adapters on it, by float32 ones.

    Args:
        module: a Hugging Face causal model, or PEFT's around one; sharded or not, its head tied to the embedding or not.
    """
    import torch

    for layer in module.get_output_embeddings().modules():
        if isinstance(layer, torch.nn.Linear):
            setattr(layer, "forward", _Float32Linear(layer))  # noqa: B010 - its parameter has another name


class _Float32Linear:
    """Forward pass of a linear layer. It reads the layer's parameters at each call, as FSDP2 puts the gathered ones in their place."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, hidden: Any) -> Any:
        """Multiply in float32.

        Args:
            hidden: states, shape (..., in_features), of any dtype.

        Returns:
            Logits, shape (..., out_features), float32.
        """
        import torch

        layer = self._layer
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if layer.bias is None else layer.bias.float()
            return torch.nn.functional.linear(hidden.float(), layer.weight.float(), bias)
