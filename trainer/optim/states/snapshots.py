"""Copies of a model's weights in main memory: those of earlier versions, and those that a refused step restores.

In: verl's engine of one rank. Out: the same engine with earlier weights, for a forward pass or for good. Invariant: a rank copies its own
shards of trained parameters and nothing else, exactly; FSDP2's gathered copies are dropped whenever shards change under them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Shards = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Shards of a rank of the trained weights and, where a step may have to be undone, of the optimizer's state."""

    weights: Shards
    moments: list[dict[str, Any]] | None
    """Optimizer state of each parameter. None: only the weights were copied."""
    schedule: dict[str, Any] | None


def take(engine: Any, *, moments: bool) -> Snapshot:
    """Copy the tensors that a step changes."""
    weights = [_local(parameter).detach().to("cpu", copy=True) for parameter in _trained(engine)]
    if not moments:
        return Snapshot(weights, None, None)
    state = [{name: _copy(value) for name, value in engine.optimizer.state.get(parameter, {}).items()} for parameter in _trained(engine)]
    return Snapshot(weights, state, engine.lr_scheduler.state_dict())


def restore(engine: Any, snapshot: Snapshot) -> None:
    """Restore exactly what `take` copied."""
    _load(engine, snapshot.weights)
    if snapshot.moments is None:
        return
    optimizer = engine.optimizer
    for parameter, state in zip(_trained(engine), snapshot.moments, strict=True):
        if not state:
            optimizer.state.pop(parameter, None)
        for name, value in state.items():
            held = optimizer.state[parameter][name]
            _local(held).copy_(value) if isinstance(held, torch.Tensor) else optimizer.state[parameter].update({name: value})
    engine.lr_scheduler.load_state_dict(snapshot.schedule)
    for group, rate in zip(optimizer.param_groups, engine.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def loaded(engine: Any, weights: Shards) -> Generator[None]:
    """Make an engine compute with the weights of an earlier version, then with its own again; gradients that wait in it stay."""
    current = take(engine, moments=False).weights
    try:
        _load(engine, weights)
        yield
    finally:
        _load(engine, current)


def _trained(engine: Any) -> list[Any]:
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(value: Any) -> Any:
    return _local(value).detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _load(engine: Any, weights: Shards) -> None:
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass leaves the root's parameters gathered, and the next would take those
    with torch.no_grad():
        for parameter, shard in zip(_trained(engine), weights, strict=True):
            _local(parameter).copy_(shard)
