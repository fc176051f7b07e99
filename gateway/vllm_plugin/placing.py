"""Words that come from the trainer, in the parameters of one worker: where they belong, and their copy to there.

In: a worker's parameters, the placements that its first load recorded, and fetched buckets. Out: parameters with new words. Invariant: a
bucket changes no other words than its own, all of them at once, after its last byte has come.

Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gateway.vllm_plugin.fetching import Bucket, Fetched, RankParts, buckets_of
from spangrad.weights.deltas import decode_delta
from spangrad.weights.placements import Dimension, Placement, is_ascending, simplified

_BITS = {4: torch.int32, 2: torch.int16}
"""Integers of a word's size in bytes."""
_WORDS: dict[int, np.dtype[np.unsignedinteger]] = {4: np.dtype(np.uint32), 2: np.dtype(np.uint16)}


@dataclass(frozen=True)
class Target:
    """Placement of a part of a tensor in a parameter."""

    tensor: torch.Tensor
    placement: Placement


def words_of(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return the memory of a placement in a tensor, row by row."""
    sizes, strides = [each.size for each in placement.dimensions], [each.target for each in placement.dimensions]
    return tensor.as_strided(sizes, strides, placement.target)


def extent(tensor: torch.Tensor) -> int:
    """Return the number of words from a tensor's first to its last one, in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def placed_in(tensor: torch.Tensor, placements: Mapping[int, Mapping[tuple[Any, ...], Placement]]) -> list[Placement]:
    """Return the placements that lie in a tensor's memory.

    Args:
        tensor: a parameter.
        placements: by the address of the parameter's storage.
    """
    begin, end = tensor.storage_offset(), tensor.storage_offset() + extent(tensor)
    candidates = placements.get(tensor.untyped_storage().data_ptr(), {}).values()
    return [placement for placement in candidates if begin <= placement.target and target_end(placement) <= end]


def target_end(placement: Placement) -> int:
    """Return the number behind a placement's last word in the parameter's storage."""
    return placement.target + 1 + sum((each.size - 1) * each.target for each in placement.dimensions)


def targets_in(
    parameters: Iterable[torch.Tensor], placements: Mapping[int, Mapping[tuple[Any, ...], Placement]], names: Iterable[str]
) -> tuple[list[Target], str]:
    """Return where all words of a checkpoint's tensors belong, or in words why that is not known.

    Args:
        parameters: of the worker's model; one that is listed twice counts once.
        placements: of the checkpoint's tensors, by the address of the parameter's storage.
        names: tensors of the checkpoint that the worker loaded.
    """
    different = {(each.data_ptr(), each.shape): each for each in parameters}.values()
    targets = [Target(tensor, simplified(placement)) for tensor in different for placement in placed_in(tensor, placements)]
    for target in targets:
        if not target.tensor.is_floating_point() or target.tensor.element_size() not in _BITS:
            return [], f"vLLM holds {target.placement.name} as {str(target.tensor.dtype).removeprefix('torch.')}"
        if not is_ascending(target.placement):
            return [], f"vLLM copies words of {target.placement.name} more than once"
    lacking = set(names) - {target.placement.name for target in targets}
    return targets, f"vLLM holds {min(lacking)} in another form" if lacking else ""


@torch.inference_mode()
def place(fetched: Fetched, targets: Sequence[Target], dtype: torch.dtype) -> None:
    """Copy a bucket's words to the parameters, or add its differences to them.

    Raises:
        CheckpointError: a delta is damaged.
    """
    if fetched.is_delta:
        _add(fetched, targets, dtype)
        return
    words = torch.frombuffer(fetched.data, dtype=dtype)
    begin = 0
    for piece in fetched.bucket.pieces:
        memory = words_of(targets[piece.target].tensor, piece.placement)
        memory.copy_(words[begin : begin + piece.placement.count].view(memory.shape))
        begin += piece.placement.count


def _add(fetched: Fetched, targets: Sequence[Target], dtype: torch.dtype) -> None:
    positions, differences = decode_delta(bytes(fetched.data), _WORDS[dtype.itemsize])
    bits = _BITS[dtype.itemsize]
    counts = [piece.placement.count for piece in fetched.bucket.pieces]
    ends = np.cumsum(counts)
    borders = np.searchsorted(positions, [0, *ends])
    for piece, begin, low, high in zip(fetched.bucket.pieces, ends - counts, borders[:-1], borders[1:], strict=True):
        if low == high:
            continue
        target = targets[piece.target]
        places = torch.from_numpy(_in_memory(positions[low:high] - begin, piece.placement)).to(target.tensor.device)
        added = torch.from_numpy(differences[low:high].view(f"i{dtype.itemsize}")).to(target.tensor.device)
        memory = target.tensor.as_strided((target_end(piece.placement),), (1,), 0).view(bits)
        memory[places] += added


def _in_memory(positions: NDArray[np.int64], placement: Placement) -> NDArray[np.int64]:
    """Return the numbers in the parameter's storage of words of a placement, which are counted row by row."""
    places = np.full_like(positions, placement.target)
    for dimension in reversed(placement.dimensions):
        rows = positions // dimension.size  # NumPy divides by one number faster than `divmod` does
        places += (positions - rows * dimension.size) * dimension.target
        positions = rows
    return places


Load = Callable[[str, torch.Tensor], None]
"""Function that has vLLM load one whole tensor."""


class WholeTensors:
    """Tensors that are put together from the parts of all ranks, and loaded as soon as they are whole."""

    def __init__(self, tensors: Sequence[tuple[str, Sequence[int]]], dtype: torch.dtype, load: Load) -> None:
        """Put together tensors of these names and shapes, whose numbers are those of the pieces' targets."""
        self._tensors, self._dtype, self._load = tensors, dtype, load
        self._buffers: dict[int, torch.Tensor] = {}
        self._missing = [prod(shape) for _, shape in tensors]

    def place(self, fetched: Fetched) -> None:
        """Copy a bucket's words to the tensors, and load those that are whole."""
        words = torch.frombuffer(fetched.data, dtype=self._dtype)
        begin = 0
        for piece in fetched.bucket.pieces:
            name, shape = self._tensors[piece.target]
            count, first = piece.placement.count, piece.placement.source
            if piece.target not in self._buffers:
                self._buffers[piece.target] = torch.empty(prod(shape), dtype=self._dtype)
            self._buffers[piece.target][first : first + count] = words[begin : begin + count]
            begin += count
            self._missing[piece.target] -= count
            if not self._missing[piece.target]:
                self._load(name, self._buffers.pop(piece.target).view(*shape))


def whole_buckets(shapes: Sequence[tuple[str, Sequence[int]]], ranks: Sequence[RankParts], word_bytes: int) -> Iterator[Bucket]:
    """Yield the requests for whole tensors, of one after the other.

    Raises:
        OSError: the ranks do not have every word.
    """
    for number, (name, shape) in enumerate(shapes):
        placement = Placement(name, prod(shape), 0, 0, (Dimension(prod(shape), 1, 1),))
        for bucket in buckets_of([(placement, False)], ranks, word_bytes):
            yield replace(bucket, pieces=[replace(piece, target=number) for piece in bucket.pieces])
