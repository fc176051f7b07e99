"""LoRA's adapters folded into the weights that they adapt.

In: the parameters of a model under PEFT, by PEFT's names. Out: the merged weights by Hugging Face's names. Invariant: computed in float32
whatever the engine trains in, so that what is served has the logprobs of what is trained; nothing of the model changes.

Source: LoRA (https://arxiv.org/abs/2106.09685), section 4.1: W + alpha / r B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PREFIX = "base_model.model."
_BASE = ".base_layer."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def merged(parameters: Mapping[str, Any], scaling: float) -> Iterator[tuple[str, Any]]:
    """Each weight with its adapter, if it has one, added to it.

    Args:
        parameters: tensors (full or FSDP2's) by PEFT's names.
        scaling: alpha over rank.
    """
    for name, value in parameters.items():
        if ".lora_" in name:
            continue
        weight = _full(value)
        module, base, _ = name.partition(_BASE)
        if base and module + _A in parameters and name.endswith(".weight"):
            weight = weight + scaling * (_full(parameters[module + _B]) @ _full(parameters[module + _A]))
        yield name.removeprefix(_PREFIX).replace(_BASE, "."), weight


def _full(value: Any) -> Any:
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().float()
