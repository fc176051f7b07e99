"""Experts in a model's files, each with tensors of its own, where transformers holds all of a layer's experts in one tensor.

In: rows of tensors by the names in memory. Out: the same memory by the names in files, so that it can be written, and read into.
Invariant: a kind of model whose files' names are not known here is refused, since its files would be read without its experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spangrad.errors import SettingsError

_IN_MEMORY = "mlp"
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names that the files of a kind of model have for a layer's experts."""

    block: str = _IN_MEMORY
    """Module of the layer that has the experts and their router."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = _DOWN

    def in_file(self, name: str) -> str:
        """Return the file's name of a tensor that is the same on both sides."""
        return name.replace(f".{_IN_MEMORY}.", f".{self.block}.", 1) if self.block != _IN_MEMORY else name


_QWEN, _MIXTRAL = ExpertNames(), ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_KINDS = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), _QWEN),
    "mixtral": _MIXTRAL,
}
"""model_type of a configuration -> names; they are those of transformers' conversion of checkpoints."""
_ONE_TENSOR = {"gpt_oss"}
"""Kinds of model whose files, too, hold all experts of a layer in one tensor."""

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_EXPERTS = {"experts", "gate", "gate_proj", "up_proj", "down_proj", _GATE_UP, "w1", "w2", "w3"}


def adapted_modules(model: Path, modules: Sequence[str]) -> list[str] | str:
    """Return the layers that have adapters, by PEFT's rules: in a model of experts those of attention alone.

    PEFT would adapt experts, too, whose adapters no engine loads, and which are not merged here.

    Raises:
        SettingsError: the modules are those of experts.
    """
    config = json.loads((model / "config.json").read_text())
    if not any(config.get(count) for count in _COUNTS):
        return list(modules) or "all-linear"
    if adapted := sorted(_OF_EXPERTS & set(modules)):
        raise SettingsError(
            f"trainer.lora.modules names {', '.join(adapted)}, and experts of {model} cannot have adapters. Leave it empty, or name layers "
            f"of attention: {', '.join(_ATTENTION)}."
        )
    return list(modules or _ATTENTION)


def expert_names(kind: str | None) -> ExpertNames | None:
    """Return the names in the files of a kind of model, by its model_type. None: they are those in memory, or not known."""
    return _KINDS.get(kind or "")


def are_experts(name: str, shape: tuple[int, ...], kind: str | None) -> bool:
    """Return whether a tensor in memory holds all experts of a layer, and those of the files do not.

    Raises:
        SettingsError: it does, and the names in the files are not known.
    """
    stem, _, last = name.rpartition(".")
    if len(shape) != 3 or not stem.endswith(".experts") or last not in {_GATE_UP, _DOWN} or kind in _ONE_TENSOR:
        return False
    if expert_names(kind) is None:
        raise SettingsError(
            f"{name} holds the experts of a layer, and how files of model_type {kind!r} name them is not known. Train one of "
            f"{', '.join(sorted(_KINDS))}, or publish adapters alone (trainer.weight_sync.method)."
        )
    return True


def split_experts(
    name: str, shape: tuple[int, ...], first: int, rows: Any, names: ExpertNames
) -> Iterator[tuple[str, tuple[int, int], Any]]:
    """Yield the tensors of each expert, in the order of the experts: name in a file, shape, and rows, all of them or an empty array.

    Args:
        name: name of the tensor in memory.
        shape: its shape: experts, then rows and columns of each.
        first: number of the first expert in `rows`.
        rows: some of its experts, an array or tensor of three dimensions.
        names: names in the files.
    """
    stem, _, last = name.rpartition(".")
    experts, height, width = shape
    projections = (names.gate, names.up) if last == _GATE_UP else (names.down,)
    height //= len(projections)
    for expert in range(experts):
        has_it = 0 <= expert - first < len(rows)
        for number, projection in enumerate(projections):
            held = rows[expert - first, number * height : (number + 1) * height] if has_it else rows[:0].reshape(0, width)
            yield f"{names.in_file(stem)}.{expert}.{projection}.weight", (height, width), held
