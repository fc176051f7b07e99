"""Experts on a CPU, multiplied by their parameters as they were loaded, where vLLM would pack them into an opaque form.

In: vLLM's experts of a layer on a CPU. Out: the same sums of experts. Invariant: what is compared with a version is what is computed with.
vLLM packs experts at the first load only, so that after a reload its kernel would read plain words as packed ones.

Runs inside vLLM's workers, for builds whose only device is a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: torch.nn.functional.silu,
    MoEActivation.GELU: torch.nn.functional.gelu,
    MoEActivation.GELU_TANH: partial(torch.nn.functional.gelu, approximate="tanh"),
}
_pack: Callable[[Any, torch.nn.Module], None] = CPUUnquantizedExperts.process_weights_after_loading
_apply_packed: Callable[..., None] = CPUUnquantizedExperts.apply


def install() -> None:
    """Keep the experts of models plain that are loaded from now on in this process."""
    CPUUnquantizedExperts.process_weights_after_loading = _keep_plain
    CPUUnquantizedExperts.apply = _apply


def expert_sum(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    numbers: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each row's experts.

    Args:
        rows: hidden states, shape (rows, hidden).
        gate_up: gate and up projections of the experts, shape (experts, 2 * width, hidden).
        down: down projections of the experts, shape (experts, hidden, width).
        weights: weight of each expert of a row, shape (rows, k).
        numbers: numbers of the experts of each row, shape (rows, k); another worker has those that are negative.
        activate: function of the gate.
    """
    total = torch.zeros(rows.shape, dtype=torch.float32)
    for number in numbers.unique().tolist():
        if number < 0:
            continue
        row, place = (numbers == number).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(rows[row], gate_up[number]).chunk(2, dim=-1)
        output = torch.nn.functional.linear(activate(gate) * up, down[number])
        total.index_add_(0, row, output.float() * weights[row, place, None].float())
    return total.to(rows.dtype)


def _is_plain(experts: Any) -> bool:
    return experts.moe_config.activation in _ACTIVATIONS and not experts.moe_config.has_bias


def _keep_plain(experts: Any, layer: torch.nn.Module) -> None:
    """Leave a layer's experts as they were loaded, unless they have what `_apply` does not know: biases, another activation."""
    if not _is_plain(experts):
        _pack(experts, layer)


def _apply(experts: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, **more: Any) -> None:
    if not _is_plain(experts):
        _apply_packed(experts, output, hidden_states, w1, w2, **more)
        return
    numbers, placed = more["topk_ids"].long(), more["expert_map"]
    if placed is not None:
        numbers = placed.long()[numbers]
    weights = more["topk_weights"]
    if more["apply_router_weight_on_input"]:  # they are in the rows already
        weights = torch.ones_like(weights)
    output.copy_(expert_sum(hidden_states, w1, w2, weights, numbers, _ACTIVATIONS[more["activation"]]))
