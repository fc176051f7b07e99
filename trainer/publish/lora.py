"""LoRA adapters: their names in the model and in files, and what of them a version's state and file hold.

In: names of PEFT's. Out: names of files. Weights are merged in `trainer.optim.weight_shards`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from spangrad.errors import CheckpointError
from spangrad.settings import TrainerSettings
from spangrad.weights.adapters import PREFIX, A, AdapterFacts, B, adapter_facts
from spangrad.weights.adapters import WEIGHTS as ADAPTER
from trainer.publish.checkpoint import WEIGHTS

_BASE = ".base_layer."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
"""Suffixes of the adapters' tensors in the model; in files they have no `default`."""


def pair_of(name: str, names: Container[str]) -> tuple[str, str] | None:
    """Return the names of A and B that adapt a weight, in the model that has tensors of these names. None: no adapter does."""
    module, base, _ = name.partition(_BASE)
    return (module + _A, module + _B) if base and name.endswith(".weight") and module + _A in names else None


def merged_name(name: str) -> str:
    """Return the name of a weight without PEFT's additions."""
    return name.removeprefix(PREFIX).replace(_BASE, ".")


def adapter_name(name: str) -> str | None:
    """Return the name in an adapter's file of a tensor of the model. None: it is no part of an adapter."""
    for in_model, in_file in ((_A, A), (_B, B)):
        if name.endswith(in_model):
            return name.removesuffix(in_model) + in_file
    return None


def kept(parameters: Mapping[str, Any], settings: TrainerSettings) -> dict[str, Any]:
    """Return the parameters of a version's state: all, as merging loses the adapters; with weight sync `adapter` the adapters alone."""
    return {name: value for name, value in parameters.items() if ".lora_" in name or settings.weight_sync.method != "adapter"}


def require_adapters(
    file: Path, held: Mapping[str, tuple[int, ...]] | None, alpha: int | None, parameters: Mapping[str, Any], settings: TrainerSettings
) -> None:
    """Check that a version's state has the adapters that the settings make of the model's parameters.

    When the state was written, `kept` had the shapes `held` (None: there were no adapters), and trainer.lora.alpha was `alpha`.

    Raises:
        CheckpointError: it has different adapters, or none.
    """
    if (held is not None) != bool(settings.lora.rank):
        raise CheckpointError(
            f"{file} was written {'without' if held is None else 'with'} adapters, and trainer.lora.rank = "
            f"{settings.lora.rank}. Set it as it was, or begin a branch with these weights (trainer.branch, trainer.model)."
        )
    if held is None:
        return
    alone = all(".lora_" in name for name in held)
    if alone != (settings.weight_sync.method == "adapter"):
        raise CheckpointError(
            f"{file} was written with trainer.weight_sync.method = {'adapter' if alone else 'disk'}, and now it is "
            f"{settings.weight_sync.method}. Set it as it was, or begin a branch with a whole model (trainer.branch, trainer.model)."
        )
    if dict(held) != {name: tuple(value.shape) for name, value in kept(parameters, settings).items()}:
        raise CheckpointError(
            f"{file} holds adapters of another shape than trainer.lora.rank = {settings.lora.rank} and trainer.lora.modules make. "
            "Set them as they were, or begin a branch with these weights (trainer.branch, trainer.model)."
        )
    if alpha != settings.lora.alpha:
        # The same tensors, scaled otherwise, are other weights.
        raise CheckpointError(
            f"{file} was written with trainer.lora.alpha = {alpha}, and now it is {settings.lora.alpha}. Set it as it was, or begin a "
            "branch with these weights (trainer.branch, trainer.model)."
        )


def weights_file(settings: TrainerSettings) -> str:
    """Return the name of the file of a version's parameters."""
    return ADAPTER if settings.weight_sync.method == "adapter" else WEIGHTS


def model_of(version: Path) -> Path:
    """Return the directory of the model in a version's directory, or of the base model of its adapter."""
    adapter = adapter_facts(version)
    return adapter.base if adapter else version


def adapter_of(parent: Path, settings: TrainerSettings) -> AdapterFacts | None:
    """Return base model, rank and alpha of the adapter that a step makes from a parent. None: a step makes a whole model."""
    if settings.weight_sync.method != "adapter":
        return None
    return AdapterFacts(model_of(parent), settings.lora.rank, settings.lora.alpha)
