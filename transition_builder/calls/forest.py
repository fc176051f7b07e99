"""Forest of spans: their links, and the nearest, outermost and common ancestors of many at once, as arrays over rows.

Invariant: missing parents and cycles cut a branch off, and affect nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from transition_builder.schemas import SPAN

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SpanForest:
    """Spans as numbered nodes; node `size` stands above every root, and is its own parent."""

    size: int
    parent: Indices
    depth: Indices

    @classmethod
    def of(cls, parent: Indices) -> SpanForest:
        """Cut cycles and compute depths. `parent` has an entry a node, len(parent) where there is none."""
        size = len(parent)
        jump = parent = np.append(parent, size)
        depth = np.append(np.ones(size, dtype=np.int64), 0)
        for _ in range(size.bit_length()):
            depth = depth + depth[jump]
            jump = jump[jump]
        endless = jump != size
        return cls(size, np.where(endless, size, parent), np.where(endless, 1, depth))

    @classmethod
    def of_spans(cls, spans: pl.DataFrame) -> SpanForest:
        """Link spans (TraceId, SpanId, ParentSpanId; node = row) to their parents."""
        index = spans[SPAN].with_row_index("parent")
        links = spans[["TraceId", "ParentSpanId"]]
        linked = links.join(index, left_on=["TraceId", "ParentSpanId"], right_on=SPAN, how="left", maintain_order="left")
        return cls.of(linked["parent"].cast(pl.Int64).fill_null(spans.height).to_numpy())

    def with_parents(self, children: Indices, parents: Indices) -> SpanForest:
        """Return the same forest with some parents replaced."""
        parent = self.parent[: self.size].copy()
        parent[children] = parents
        return SpanForest.of(parent)

    def mask(self, nodes: Indices) -> Mask:
        """Return a mask of some nodes."""
        return np.bincount(nodes, minlength=self.size) > 0

    def nearest(self, marked: Mask) -> Indices:
        """Return, for every node, the nearest marked one among itself and its ancestors; `size` where there is none."""
        return follow(np.where(np.append(marked, True), np.arange(self.size + 1), self.parent))

    def enclosing(self, marked: Mask) -> Indices:
        """Return, for every node, the nearest marked one among its ancestors alone; `size` where there is none."""
        return self.nearest(marked)[self.parent]

    def outermost(self, marked: Mask) -> Indices:
        """Return, for every node, the outermost marked one among itself and its ancestors; `size` where there is none."""
        nearest = self.nearest(marked)
        above = nearest[self.parent]
        return follow(np.where(above == self.size, np.arange(self.size + 1), above))[nearest]

    def above(self, marked: Mask) -> Mask:
        """Return a mask of the nodes that have a marked one below them."""
        return self.count_below(np.flatnonzero(marked)) > marked

    def count_below(self, nodes: Indices) -> Indices:
        """Return how many of the given nodes each node and those below it are: 0, 1, or a number from 2 on for more."""
        count = np.zeros(self.size + 1, dtype=np.int64)
        at = nodes
        while len(at):
            before = count[at]
            np.add.at(count, at, 1)
            at = self.parent[at[before < 2]]
            at = at[at != self.size]
        return count[: self.size]

    def least_below(self, nodes: Indices, values: Indices) -> Indices:
        """Return, for every node and the virtual root, the least value of the given nodes that are it or lie below it; else the largest."""
        least = np.full(self.size + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, nodes, values)
        deepest_first = np.argsort(-self.depth, kind="stable")
        for level in np.split(deepest_first, np.flatnonzero(np.diff(self.depth[deepest_first])) + 1):
            np.minimum.at(least, self.parent[level], least[level])
        return least

    def nearest_below(self, nodes: Indices, least: Indices, bounds: Indices) -> Indices:
        """Return the nearest among each node and its ancestors whose `least_below` is less than a bound; the virtual root for none."""
        jumps, at = [self.parent], nodes
        while (jumps[-1] != self.size).any():
            jumps.append(jumps[-1][jumps[-1]])
        for jump in reversed(jumps):
            at = np.where(least[at] >= bounds, np.where(least[jump[at]] >= bounds, jump[at], at), at)
        return np.where(least[at] >= bounds, self.parent[at], at)

    def common_depth(self, left: Indices, right: Indices) -> Indices:
        """Return the depth of the nearest common ancestor of each pair; 0 where there is none."""
        while (apart := left != right).any():
            deeper = self.depth[left] - self.depth[right]
            left, right = (
                np.where(apart & (deeper >= 0), self.parent[left], left),
                np.where(apart & (deeper <= 0), self.parent[right], right),
            )
        return self.depth[left]


def follow(jump: Indices) -> Indices:
    """Follow pointers to their fixed points, twice as far with each step; there are no cycles."""
    while not np.array_equal(further := jump[jump], jump):
        jump = further
    return jump


def chains(start: Indices, above: Indices) -> Indices:
    """Return a row for each start: itself, what stands `above` it, and so on, filled with the virtual root; the last is that for all."""
    levels = [start]
    while (levels[-1] != len(above) - 1).any():
        levels.append(above[levels[-1]])
    return np.stack(levels, axis=1)


def nodes_of(spans: pl.DataFrame, nodes: pl.DataFrame) -> Indices:
    """Return the nodes of spans, in their order; spans that are none of them are left out."""
    if spans.is_empty():
        return np.zeros(0, dtype=np.int64)
    index = nodes[SPAN].with_row_index("node")
    return spans[SPAN].join(index, on=SPAN, maintain_order="left")["node"].cast(pl.Int64).to_numpy()
