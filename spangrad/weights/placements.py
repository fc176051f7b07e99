"""Placements of a checkpoint's tensors in the memory of one engine worker, cut to what one sender has and one request carries.

In: copies that vLLM's loaders made, and ranges of words. Out: the same copies in pieces. Invariant: pieces hold each word of the placement
within the range exactly once, in ascending order of their numbers in the tensor, so that both ends of a connection count them alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a copy: its size, and the distance between neighbours in the checkpoint's tensor and in the worker's memory."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Copy of a part of a tensor to a parameter."""

    name: str
    """Name of the tensor in the checkpoint."""
    words: int
    """Number of words of the whole tensor."""
    source: int
    """Number of the part's first word in the tensor."""
    target: int
    """Number of the part's first word in the parameter's storage."""
    dimensions: tuple[Dimension, ...]
    """Dimensions, the largest distance in the tensor first."""

    @property
    def count(self) -> int:
        """Number of words that are copied."""
        return prod(dimension.size for dimension in self.dimensions)


def simplified(placement: Placement) -> Placement:
    """Return the same copy with as few dimensions as possible: without those of one word, neighbours joined that are one on both sides."""
    joined: list[Dimension] = []
    for inner in placement.dimensions:
        outer = joined[-1] if joined else None
        if inner.size == 1:
            continue
        if outer and (outer.source, outer.target) == (inner.size * inner.source, inner.size * inner.target):
            joined[-1] = Dimension(outer.size * inner.size, inner.source, inner.target)
        else:
            joined.append(inner)
    return replace(placement, dimensions=tuple(joined))


def is_ascending(placement: Placement) -> bool:
    """Return whether the copy takes each word of the tensor once at most, row by row in ascending order."""
    return all(
        dimension.size == 1 or dimension.source >= _extent(placement.dimensions[place + 1 :])
        for place, dimension in enumerate(placement.dimensions)
    )


def clip(placement: Placement, first: int, end: int) -> Iterator[Placement]:
    """Yield the parts of an ascending placement whose words have the numbers `first` to `end` - 1 in the tensor."""
    if placement.source >= end or placement.source + _extent(placement.dimensions) <= first:
        return
    if placement.source >= first and placement.source + _extent(placement.dimensions) <= end:
        yield placement
        return
    rows, inner = placement.dimensions[0], placement.dimensions[1:]
    ahead, left, extent = first - placement.source, end - placement.source, _extent(inner)
    touched = range(max(0, (ahead - extent) // rows.source + 1), min(rows.size, -(-left // rows.source)))
    whole = range(max(touched.start, -(-ahead // rows.source)), min(touched.stop, (left - extent) // rows.source + 1))
    if not whole:
        whole = range(touched.stop, touched.stop)
    for row in range(touched.start, whole.start):
        yield from clip(_rows(placement, row, None), first, end)
    if whole:
        yield _rows(placement, whole.start, len(whole))
    for row in range(whole.stop, touched.stop):
        yield from clip(_rows(placement, row, None), first, end)


def split(placement: Placement, words: int) -> Iterator[Placement]:
    """Yield parts of a placement that have at most `words` words each."""
    if placement.count <= words:
        yield placement
        return
    rows = placement.dimensions[0].size
    step = words * rows // placement.count
    for row in range(0, rows, step or 1):
        if step:
            yield _rows(placement, row, min(step, rows - row))
        else:
            yield from split(_rows(placement, row, None), words)


def _rows(placement: Placement, row: int, count: int | None) -> Placement:
    """Return some rows of the first dimension. `count` None: the one row, without that dimension."""
    rows, inner = placement.dimensions[0], placement.dimensions[1:]
    kept = inner if count is None else (replace(rows, size=count), *inner)
    return replace(placement, source=placement.source + row * rows.source, target=placement.target + row * rows.target, dimensions=kept)


def _extent(dimensions: tuple[Dimension, ...]) -> int:
    """Return the distance from the first word to behind the last one, in the tensor."""
    return 1 + sum((dimension.size - 1) * dimension.source for dimension in dimensions)
