"""Parts of a model's weights that this rank has, without a tensor of which it would hold the whole: its own, and all that it holds.

In: verl's module of one rank. Out: parts of tensors by Hugging Face's names. Invariant: each word of each tensor is among the own parts of
exactly one rank; every rank yields the same names in the same order. Only A of an adapter that is merged is gathered.

FSDP2 shards along dimension 0, so a part is a range of rows, and one range of bytes in a file. What several ranks hold alike is divided
among them, also by rows.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from spangrad.errors import SettingsError
from spangrad.settings import TrainerSettings
from trainer.publish.experts import are_experts, expert_names, split_experts
from trainer.publish.lora import adapter_name, merged_name, pair_of
from trainer.publish.shared_file import FilePart


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a tensor that one rank has."""

    name: str
    """Name of the tensor in a file: Hugging Face's, or PEFT's for adapters alone."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first: int
    """Number of the part's first word in the whole tensor, row by row."""
    words: torch.Tensor
    """Rows, contiguous, on the device of the shard; own ones in float32, and they may share its memory. Empty: the rank has none."""

    def on_host(self, *, copy: bool) -> FilePart:
        """Return an own part in main memory; `copy`: True to copy what is there already."""
        return FilePart(self.name, self.shape, self.first, self.words.detach().to("cpu", copy=copy).contiguous().numpy())


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor that one rank has."""

    shape: tuple[int, ...]
    first: int
    """Number of the first row."""
    values: torch.Tensor


def own_parts(module: Any, settings: TrainerSettings) -> Iterator[WeightPart]:
    """Yield this rank's part of each of the policy's parameters, tied ones once, adapters merged or alone; collective for merged ones.

    Raises:
        SettingsError: a tensor is sharded along another dimension.
    """
    state: Mapping[str, Any] = module.state_dict()
    if settings.weight_sync.method == "adapter":
        tensors = ((in_file, _own_rows(name, value)) for name, value in state.items() if (in_file := adapter_name(name)))
    elif settings.lora.rank:  # verl would merge them too, in bfloat16
        tensors = _merged(state, settings.lora.alpha / settings.lora.rank)
    else:
        tensors = ((name, _own_rows(name, value)) for name, value in state.items())
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    kind = kind_of(module)
    for name, rows in tensors:
        if name not in tied:
            yield from _parts(name, rows, kind)


def kind_of(module: Any) -> str | None:
    """Return the model_type of a model's configuration. None: it has none."""
    return getattr(getattr(module, "config", None), "model_type", None)


def held_parts(module: Any, names: Container[str]) -> Iterator[WeightPart]:
    """Yield what this rank holds of tensors, in its own memory and dtype, by the names of the base model's files; tied ones once.

    Unlike `own_parts`, a part of which there are copies on several ranks is yielded on each of them, so that it can be filled. `names` are
    the module's own.

    Raises:
        SettingsError: a tensor is sharded along another dimension.
    """
    tied, kind = getattr(module, "all_tied_weights_keys", None) or {}, kind_of(module)
    for name, value in module.state_dict().items():
        if name in names and (in_file := merged_name(name)) not in tied:
            yield from _parts(in_file, _held_rows(in_file, value)[0], kind)


def row_range(rows: int, ranks: int, number: int) -> tuple[int, int]:
    """Return the first row and the number of rows of one rank, as `torch.chunk` divides them: the last ranks may have fewer, or none."""
    size = -(-rows // ranks)
    first = min(number * size, rows)
    return first, min(size, rows - first)


def _own_rows(name: str, value: Any) -> _Rows:
    """Return the rows that this rank answers for, in float32."""
    rows, replicas = _held_rows(name, value)
    first, held = rows.first, rows.values
    for size, number in replicas:
        offset, count = row_range(len(held), size, number)
        first, held = first + offset, held[offset : offset + count]
    return _Rows(rows.shape, first, held.float().contiguous())


def _held_rows(name: str, value: Any) -> tuple[_Rows, list[tuple[int, int]]]:
    """Return the rows that this rank holds, in its own memory; and of the ranks that hold the same ones, their number and this one's."""
    shape = tuple(value.shape)
    first, count = 0, shape[0] if shape else 1
    replicas = [(torch.distributed.get_world_size(), torch.distributed.get_rank())] if torch.distributed.is_initialized() else []
    held = value.detach()
    if isinstance(value, DTensor):
        held, coordinate, replicas = value.to_local().detach(), value.device_mesh.get_coordinate(), list[tuple[int, int]]()
        assert coordinate is not None
        for size, number, placement in zip(value.device_mesh.shape, coordinate, value.placements, strict=True):
            if type(placement) is Replicate:
                replicas.append((size, number))
            elif type(placement) is Shard and placement.dim == 0:
                offset, count = row_range(count, size, number)
                first += offset
            else:
                raise SettingsError(
                    f"{name} is placed as {placement}, and weights are read where they are sharded along dimension 0. Remove what changes "
                    "that from trainer.verl."
                )
    return _Rows(shape, first, held.view(held.shape or (1,))), replicas


def _merged(state: Mapping[str, Any], scaling: float) -> Iterator[tuple[str, _Rows]]:
    """Yield the rows of each weight, with those of its adapter added; collective.

    In float32 for any dtype of training, so that what is served has the logprobs of what is trained.

    Source: LoRA (https://arxiv.org/abs/2106.09685), section 4.1: W + alpha / r B A.
    """
    for name, value in state.items():
        if ".lora_" in name:
            continue
        rows = _own_rows(name, value)
        if pair := pair_of(name, state):
            a = _whole(state[pair[0]]).to(rows.values.device)
            b = _same_rows(pair[1], state[pair[1]], value, rows).to(rows.values.device)
            rows = _Rows(rows.shape, rows.first, rows.values + scaling * (b @ a))
        yield merged_name(name), rows


def _same_rows(name: str, value: Any, other: Any, rows: _Rows) -> torch.Tensor:
    """Return the rows of a tensor that this rank has of another one; collective where the two are sharded differently."""
    if _placement(value) == _placement(other):
        return _own_rows(name, value).values
    return _whole(value)[rows.first : rows.first + len(rows.values)]


def _placement(value: Any) -> Any:
    return (value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def _whole(value: Any) -> torch.Tensor:
    """Return a small tensor, gathered, in float32; collective."""
    if not isinstance(value, DTensor):
        return value.detach().float()
    own: Any = value.detach().to(value.device_mesh.device_type)  # a shard that is offloaded is in main memory
    return own.full_tensor().float()


def _parts(name: str, rows: _Rows, kind: str | None) -> Iterator[WeightPart]:
    """Yield a part, or those of each expert where the model holds experts in one tensor and its files do not."""
    names = expert_names(kind)
    if are_experts(name, rows.shape, kind) and names:
        for expert, shape, held in split_experts(name, rows.shape, rows.first, rows.values, names):
            yield WeightPart(expert, shape, 0, held)
    else:
        yield WeightPart(names.in_file(name) if names else name, rows.shape, rows.first * math.prod(rows.shape[1:]), rows.values)
