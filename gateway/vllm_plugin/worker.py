"""Sums of the parameters in one vLLM worker's memory, by tensor and shard of the checkpoint that they were loaded from.

In: a worker's model, its parameters fused, split and on any device. Out: a report (`spangrad.weights.shards.WorkerReport`) as JSON.
Invariant: a word of a parameter counts once, as the word of the checkpoint's tensor that vLLM's loader copied there; words that no loader
filled (padding) must be zero. What is listed is what is computed with: on a CPU, vLLM would repack linear layers and experts into opaque
forms, so there they are kept plain. Adapters count as vLLM computes with them: B multiplied by its scale.

Runs inside vLLM's workers: `vllm serve --worker-extension-cls gateway.vllm_plugin.worker.SpangradWorker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layers
from vllm.platforms import current_platform

from gateway.vllm_plugin import layout, mixing
from gateway.vllm_plugin.layout import TensorLayout
from gateway.vllm_plugin.placing import placed_in, target_end, words_of
from spangrad.weights.adapters import PREFIX, A, B
from spangrad.weights.placements import Dimension, Placement
from spangrad.weights.shards import MASK, ChecksumScope, Shard, TensorSums, WorkerReport, region_of, sample_step

HTTP_BACKEND = "spangrad_http"
CHUNK_WORDS = {"cpu": 2**16}
"""Words mixed at once, by the kind of device: what fits a core's cache."""
_CHUNK_WORDS = 2**24
"""Words mixed at once on other devices: 128 MiB of int64, several times over."""
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""Dtypes whose words are those of a checkpoint, and the integers of their size."""


_dispatch = layers.dispatch_cpu_unquantized_gemm


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Multiply by a linear layer's own parameter on a CPU, in place of a packed copy of it."""
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        _dispatch(layer, remove_weight)


# vLLM imports this module in each worker before it loads the model. On a GPU the function is not called.
layers.dispatch_cpu_unquantized_gemm = _keep_plain
layout.install()
if current_platform.is_cpu():
    from gateway.vllm_plugin import plain_experts

    plain_experts.install()
WeightTransferEngineFactory.register_engine(HTTP_BACKEND, "gateway.vllm_plugin.transfer", "HttpTransferEngine")


class SpangradWorker:
    """Worker extension: methods that collective_rpc may call beside vLLM's own."""

    def spangrad_checksum(self, scope: str, part: str) -> str:
        """Return this worker's report, as JSON.

        Args:
            scope: a `ChecksumScope`: all words, or a sample of them.
            part: `all`, or `adapter` (the active adapters alone).
        """
        model, scope = self.get_model(), ChecksumScope(scope)
        reports = [] if part == "adapter" else [_base_report(model, scope)]
        reports += _adapter_reports(model, scope)
        unread = {name: reason for report in reports for name, reason in report.unread.items()}
        return msgspec.json.encode(WorkerReport([shard for report in reports for shard in report.shards], unread)).decode()


def _base_report(model: torch.nn.Module, scope: ChecksumScope) -> WorkerReport:
    loaded = layout.layout_of(model)
    if loaded is None:
        raise ValueError("vLLM's default loader did not load this model, so that its parameters cannot be compared: take --load-format out")
    return report({name: parameter.data for name, parameter in model.named_parameters()}, loaded, scope)


def _adapter_reports(model: torch.nn.Module, scope: ChecksumScope) -> Iterator[WorkerReport]:
    """Yield a report of each active adapter; where its tensors lie, vLLM's own methods say, which change nothing meanwhile."""
    manager = getattr(model, "lora_manager", None)
    for slot, adapter in enumerate(manager.lora_index_to_id if manager else ()):
        if adapter is None:
            continue
        for name, module in manager.modules.items():
            if hasattr(module, "w13_lora_a_stacked"):
                raise ValueError("the model has adapters of experts: vLLM keeps them in another form, which checksums do not know")
            weights = manager._get_lora_layer_weights(manager.get_adapter(adapter), name)
            placed = _placed_by(module, slot, weights, manager.packed_modules.get(name, [name])) if weights else TensorLayout()
            stacked = [*_listed(module.lora_a_stacked), *_listed(module.lora_b_stacked)]
            yield report(
                {f"{name}, matrix {index} of its adapters": matrices[slot] for index, matrices in enumerate(stacked)}, placed, scope
            )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _placed_by(module: Any, slot: int, weights: Any, names: list[str]) -> TensorLayout:
    """Return the layout of an adapter's matrices in the stacked ones of a layer, whose parts have these names."""
    return layout.recorded(_named_matrices(names, weights), lambda: module.set_lora(slot, weights.lora_a, weights.lora_b))


def _named_matrices(modules: list[str], weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A and B of an adapter's modules under PEFT's names."""
    for suffix, matrices in ((A, weights.lora_a), (B, weights.lora_b)):
        for module, matrix in zip(modules, _listed(matrices), strict=True):
            if matrix is not None:
                yield f"{PREFIX}{module}{suffix}", matrix


@torch.inference_mode()
def report(tensors: dict[str, torch.Tensor], placed: TensorLayout, scope: ChecksumScope) -> WorkerReport:
    """Return the sums of the shards that lie in these tensors.

    Args:
        tensors: tensors of a worker, by name; one that is listed twice counts once.
        placed: layout of the checkpoint's tensors in them.
        scope: all words, or a sample.

    Raises:
        ValueError: words that no loader filled are not zero.
    """
    shards = dict[str, list[Shard]]()
    others = set[str]()
    placements = placed.placements
    for name, tensor in {(each.data_ptr(), each.shape): (name, each) for name, each in tensors.items()}.values():
        within = placed_in(tensor, placements)
        if tensor.dtype not in _BITS:
            others.add(_dtype(tensor))
            continue
        if scope is ChecksumScope.FULL:
            _check_padding(name, tensor, within)
        for placement in within:
            shards.setdefault(placement.name, []).append(_shard(tensor, placement, scope))
    # Copied while vLLM loaded, and not where a parameter is now: quantised, or packed for a kernel.
    form = f"as {', '.join(sorted(others))}" if others else "in another form"
    unread = {name: f"vLLM holds it {form}" for name in placed.names if name not in shards}
    return WorkerReport([shard for parts in shards.values() for shard in parts], unread)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_padding(name: str, tensor: torch.Tensor, within: list[Placement]) -> None:
    """Raise ValueError unless the words that no placement covers are zero."""
    if not within or sum(placement.count for placement in within) >= tensor.numel():
        return
    rest = tensor.clone()
    assert rest.stride() == tensor.stride(), "a clone has the strides of its original"
    for placement in within:
        words_of(rest, replace(placement, target=placement.target - tensor.storage_offset())).zero_()
    if rest.view(_BITS[tensor.dtype]).any():
        raise ValueError(f"{name} has words beside the checkpoint's that are not zero")


def _shard(tensor: torch.Tensor, placement: Placement, scope: ChecksumScope) -> Shard:
    region = region_of(placement.source, [(each.size, each.source) for each in placement.dimensions])
    sums = _sampled_sums(tensor, placement) if scope is ChecksumScope.SAMPLED else _sums(tensor, placement)
    return Shard(placement.name, region, TensorSums(_dtype(tensor), *sums))


def _sums(tensor: torch.Tensor, placement: Placement) -> tuple[int, int, int]:
    """Return the number of words, and their plain and weighted sums."""
    dimensions = placement.dimensions or (Dimension(1, 1, 1),)
    words = words_of(tensor, replace(placement, dimensions=dimensions)).view(_BITS[tensor.dtype])
    row = max(1, placement.count // dimensions[0].size)
    rows = min(dimensions[0].size, max(1, CHUNK_WORDS.get(tensor.device.type, _CHUNK_WORDS) // row))
    numbers = [torch.arange(each.size, device=tensor.device) for each in (Dimension(rows, 1, 1), *dimensions[1:])]
    plain = weighted = 0
    for start in range(0, dimensions[0].size, rows):
        mixed = mixing.mixed(words[start : start + rows])
        total = 0
        # The number of a word is a sum over dimensions, so that sums along each dimension are enough.
        for axis, each in enumerate(dimensions):
            along = mixed.sum([other for other in range(mixed.ndim) if other != axis]) if mixed.ndim > 1 else mixed
            total = int(along.sum())
            weighted += each.source * int((along * numbers[axis][: along.numel()]).sum())
        plain += total
        weighted += total * (placement.source + start * dimensions[0].source)
    return placement.count, plain & MASK, weighted & MASK


def _sampled_sums(tensor: torch.Tensor, placement: Placement) -> tuple[int, int, int]:
    """Return the number of sampled words of the tensor that lie in this shard, and their plain and weighted sums."""
    step = sample_step(placement.words)
    numbers = torch.arange(0, placement.words, step, device=tensor.device)
    rest = numbers - placement.source
    inside, target = rest >= 0, torch.full_like(rest, placement.target)
    for each in placement.dimensions:
        if each.size == 1:
            continue
        at = rest // each.source
        inside &= at < each.size
        rest = rest - at * each.source
        target += at * each.target
    inside &= rest == 0
    numbers, target = numbers[inside], target[inside]
    memory = tensor.as_strided((target_end(placement),), (1,), 0)
    mixed = mixing.mixed(memory[target].view(_BITS[tensor.dtype]))
    return numbers.numel(), int(mixed.sum()) & MASK, int((mixed * numbers).sum()) & MASK
