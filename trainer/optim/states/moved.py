"""Moves of a model's weights and moments between a device and main memory, whole models at a time.

In: verl's engine of one rank. Out: the same engine, whose tensors are elsewhere. Invariant: no value changes; what the settings of verl
keep in main memory (`param_offload`, `optimizer_offload`, `offload_policy`) stays there, and verl moves it for each pass. On a CPU nothing
moves.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def off_device(engine: Any, device: str) -> None:
    """Move an engine's tensors to main memory, and give the device's memory back to other processes."""
    if device == "cpu":
        return
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass leaves the root's parameters gathered
    if not engine._uses_fsdp2_cpu_offload_policy:
        engine.to("cpu", model=True, optimizer=True, grad=True)
    torch.cuda.synchronize()  # verl copies beside the computation, and main memory is read next
    gc.collect()
    torch.cuda.empty_cache()


def to_device(engine: Any, device: str) -> None:
    """Move an engine's tensors to its device again."""
    if device == "cpu" or engine._uses_fsdp2_cpu_offload_policy:
        return
    weights, moments = not engine.is_param_offload_enabled, not engine.is_optimizer_offload_enabled
    engine.to(device, model=weights, optimizer=moments, grad=weights)
    torch.cuda.synchronize()
