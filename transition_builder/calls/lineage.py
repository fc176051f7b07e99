"""Order of calls and the agents that made them, from parent links and sequence numbers alone.

In: the spans of many rollouts as nodes of a forest. Out: for each call the name of its agent, the components around it, and its place
among the rollout's calls. Invariant: clocks of two processes are never compared; missing parents and cycles cut a branch off, and affect
nothing else.

A span's *path* is the list of (process, sequence number) pairs at which its chain of ancestors leaves each process,
outermost first: [(runner, 0), (agent, 7), (gateway, 3)] for a gateway span under the agent's HTTP span. Two spans are
in order when their paths first differ inside one process. Where they first differ in the process itself (two workers
of one agent), the process whose call the gateway took first goes first. Where some of the calls come straight from the
gateway there (raw HTTP beside an instrumented client) and others through a process, no process counted them all but the
gateway: its own count orders everything that branches off at that place. A span without our sequence number is placed by
the clock of its own process: the service instance that it names (ProcessId `~instance`), else its service.

The parent of a call, and its branch, are defined in `branches`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from spangrad import semconv
from transition_builder.dialects.conventions.gateway import IS_GATEWAY

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
FOREIGN = "~"
"""Prefix of the names of processes that do not number their spans."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Spans as numbered nodes; node `size` stands above every root, and is its own parent."""

    size: int
    parent: Indices
    depth: Indices

    @classmethod
    def of(cls, parent: Indices) -> Forest:
        """Cut cycles and compute depths. `parent` has an entry a node, len(parent) where there is none."""
        size = len(parent)
        parent = np.append(parent, size)
        steps = max(1, int(size).bit_length())
        jump = parent
        for _ in range(steps):
            jump = jump[jump]
        parent = np.where(jump == size, parent, size)
        jump, depth = parent, np.append(np.ones(size, dtype=np.int64), 0)
        for _ in range(steps):
            depth = depth + depth[jump]
            jump = jump[jump]
        return cls(size, parent, depth)

    def with_parents(self, children: Indices, parents: Indices) -> Forest:
        """Return the same forest with some parents replaced."""
        parent = self.parent[: self.size].copy()
        parent[children] = parents
        return Forest.of(parent)

    def nearest(self, marked: Mask) -> Indices:
        """Return, for every node, the nearest marked one among itself and its ancestors; `size` where there is none."""
        marked = np.append(marked, True)
        jump = np.where(marked, np.arange(self.size + 1), self.parent)
        return _follow(jump)

    def topmost(self, marked: Mask) -> Indices:
        """Return, for every node, the outermost marked one among itself and its ancestors; `size` where there is none."""
        nearest = self.nearest(marked)
        above = nearest[self.parent]
        return _follow(np.where(above == self.size, np.arange(self.size + 1), above))[nearest]

    def above(self, marked: Mask) -> Mask:
        """Return a mask of the nodes that have a marked one below them."""
        marks = np.zeros(self.size + 1, dtype=np.bool_)
        marks[self.parent[: self.size][marked]] = True
        jump = self.parent
        while (jump != self.size).any():
            marks[jump[marks]] = True
            jump = jump[jump]
        return marks[: self.size]

    def above_process(self, process: NDArray[np.int64]) -> Indices:
        """Return, for every node, its nearest ancestor in another process; `size` where there is none."""
        process = np.append(process, -1)
        inside = process[self.parent] == process
        first = _follow(np.where(inside, self.parent, np.arange(self.size + 1)))
        return self.parent[first]

    def common_depth(self, left: Indices, right: Indices) -> Indices:
        """Return the depth of the nearest common ancestor of each pair; 0 where there is none."""
        left, right = left.copy(), right.copy()
        while (apart := left != right).any():
            deeper_left = apart & (self.depth[left] >= self.depth[right])
            deeper_right = apart & (self.depth[right] >= self.depth[left])
            left, right = np.where(deeper_left, self.parent[left], left), np.where(deeper_right, self.parent[right], right)
        return self.depth[left]


def _follow(jump: Indices) -> Indices:
    """Follow pointers to their fixed points, twice as far with each step; there are no cycles."""
    while not np.array_equal(further := jump[jump], jump):
        jump = further
    return jump


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths of some spans, a row each, outermost first, -1 beyond their end."""

    process: Indices
    """Rank of the process by name, independent of the rest of the batch."""
    seq: Indices
    start: Indices
    """Start of the span at which the path leaves the process, by that process's clock, in nanoseconds."""
    end: Indices
    """End of that span, in nanoseconds; its start where the end is not known."""

    def take(self, rows: Indices) -> Paths:
        """Return the given paths."""
        return Paths(self.process[rows], self.seq[rows], self.start[rows], self.end[rows])

    @property
    def length(self) -> Indices:
        """Number of processes that each path goes through."""
        return (self.process != -1).sum(axis=1)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Sequence numbers and times of spans by their own processes; one entry a node, and one of -1 for the virtual root."""

    process: Indices
    seq: Indices
    start: Indices
    end: Indices


def forest(nodes: pl.DataFrame) -> Forest:
    """Link nodes (TraceId, SpanId, ParentSpanId; node = row) to their parents."""
    index = nodes.select("TraceId", pl.col("SpanId").alias("ParentSpanId")).with_row_index("parent")
    linked = nodes.select("TraceId", "ParentSpanId").join(index, on=["TraceId", "ParentSpanId"], how="left", maintain_order="left")
    return Forest.of(linked["parent"].cast(pl.Int64).fill_null(nodes.height).to_numpy())


def clocks(nodes: pl.DataFrame) -> Clocks:
    """Compute clocks from nodes with ProcessId, Seq, ServiceName, Timestamp and Duration."""
    named = pl.col("ProcessId") != ""
    ours = named & ~pl.col("ProcessId").str.starts_with(FOREIGN)
    start = pl.col("Timestamp").cast(pl.Int64)
    facts = nodes.select(
        name=pl.when(named).then("ProcessId").otherwise(pl.lit(FOREIGN) + pl.col("ServiceName")),
        seq=pl.when(ours).then(pl.col("Seq").cast(pl.Int64, strict=False).fill_null(0)).otherwise(start),
        start=start,
        end=start + pl.col("Duration").cast(pl.Int64, strict=False).fill_null(0),
    )
    names = facts["name"].unique().sort()
    process = facts["name"].cast(pl.Enum(names)).to_physical().cast(pl.Int64).to_numpy()
    seq, begin, end = (facts[name].to_numpy() for name in ("seq", "start", "end"))
    return Clocks(*(np.append(column, -1) for column in (process, seq, begin, end)))


def paths(nodes: pl.DataFrame, tree: Forest, spans: Indices, span_clocks: Clocks | None = None) -> Paths:
    """Return the paths of the given nodes; `span_clocks` are the `clocks` of all nodes, if already computed."""
    span_clocks = span_clocks or clocks(nodes)
    above = tree.above_process(span_clocks.process[:-1])
    levels = [spans]
    while (levels[-1] != tree.size).any():
        levels.append(above[levels[-1]])
    inwards = np.stack(levels, axis=1)
    length = (inwards != tree.size).sum(axis=1, keepdims=True)
    outwards = np.take_along_axis(inwards, np.maximum(length - 1 - np.arange(inwards.shape[1]), -1), axis=1)
    outwards = np.where(np.arange(inwards.shape[1]) < length, outwards, tree.size)
    return Paths(span_clocks.process[outwards], span_clocks.seq[outwards], span_clocks.start[outwards], span_clocks.end[outwards])


def agent_names(nodes: pl.DataFrame, tree: Forest, spans: Indices) -> pl.Series:
    """Return the names of the agents that the given nodes belong to.

    The nearest ancestor that names an agent; else the outermost CHAIN (LangGraph's plain graphs); else the
    service of the nearest span that is neither the gateway's nor the runner's root; else of the nearest at all.
    """

    def marked(expression: pl.Expr) -> Mask:
        return nodes.select(expression).to_series().to_numpy()

    def named(at: Indices, column: str) -> pl.Series:
        return nodes[column].gather(pl.Series(at).replace(tree.size, None).cast(pl.UInt32))

    names = named(tree.nearest(marked(pl.col("AgentName").is_not_null()))[spans], "AgentName")
    others: list[tuple[Callable[[Mask], Indices], pl.Expr, str]] = [
        (tree.topmost, pl.col("IsChain"), "SpanName"),
        (tree.nearest, ~IS_GATEWAY & (pl.col("SpanName") != semconv.ROOT_SPAN_NAME), "ServiceName"),
        (tree.nearest, ~IS_GATEWAY, "ServiceName"),
    ]
    for search, which, column in others:
        if not names.has_nulls():
            break
        names = pl.select(pl.coalesce(names, named(search(marked(which))[spans], column))).to_series()
    return names.fill_null("").alias("AgentName")


def order(attempt: Indices, where: Paths, by_gateway: Mask, spans: pl.DataFrame, counted: Mask | None = None) -> Indices:
    """Return the rank of each span among those of its attempt, from 0.

    Args:
        attempt: the number of each span's attempt.
        where: the spans' paths.
        by_gateway: mask of those that a gateway recorded.
        spans: TraceId and SpanId of each, which break ties; no two are the same.
        counted: mask of the calls, which define the order of processes. The others are placed by them.
    """
    counted = np.ones(len(attempt), dtype=np.bool_) if counted is None else counted
    length, rows = where.length, np.arange(len(attempt))
    leaf = np.maximum(length - 1, 0)
    leaf_process, leaf_seq = where.process[rows, leaf], where.seq[rows, leaf]
    tie = np.zeros(len(attempt), dtype=np.int64)
    at = np.lexsort((leaf_seq, leaf_process, attempt))
    if (
        (attempt[at][1:] == attempt[at][:-1]) & (leaf_process[at][1:] == leaf_process[at][:-1]) & (leaf_seq[at][1:] == leaf_seq[at][:-1])
    ).any():
        tie = spans.select(pl.struct("TraceId", "SpanId").rank("dense").cast(pl.Int64)).to_series().to_numpy()
        at = np.lexsort((tie, leaf_seq, leaf_process, attempt))
    taken = np.empty(len(attempt), dtype=np.int64)
    taken[at] = rows
    taken[~counted] = len(attempt)

    keys = list[Indices]()
    mixed = _uneven(attempt[counted], length[counted])
    group = attempt
    for level in range(where.process.shape[1]):
        process, seq, ended = where.process[:, level], where.seq[:, level], length <= level
        _, through = np.unique(attempt * (process.max(initial=0) + 2) + process + 1, return_inverse=True)
        places = np.full(through.max(initial=-1) + 1, len(attempt))
        np.minimum.at(places, through, taken)
        # Processes without calls come last, by name.
        key = np.where(places[through] < len(attempt), places[through], len(attempt) + process)
        if mixed:
            straight = _taken_straight(group, length, level, by_gateway, leaf_process, counted)
            key = np.where(straight, np.where(counted, taken, len(attempt) + process), key)
            group = _numbered(group, process, seq)
        # -1 (the path ended) stays before all. The process whose call was taken first goes first.
        keys += [np.where(ended, -1, key), seq]
    at = np.lexsort((tie, *reversed(keys), attempt))
    ranks = np.empty(len(attempt), dtype=np.int64)
    _, first, many = np.unique(attempt[at], return_index=True, return_counts=True)
    ranks[at] = rows - np.repeat(first, many)
    return ranks


def _uneven(attempt: Indices, length: Indices) -> bool:
    """Return whether paths of one attempt differ in length."""
    if not len(attempt):
        return False
    least, most = np.full(attempt.max() + 1, np.iinfo(np.int64).max), np.zeros(attempt.max() + 1, dtype=np.int64)
    np.minimum.at(least, attempt, length)
    np.maximum.at(most, attempt, length)
    return bool((least < most).any())


def _numbered(*keys: Indices) -> Indices:
    """Return a number for each distinct combination."""
    at = np.lexsort(keys)
    differs = np.zeros(len(at), dtype=np.bool_)
    for key in keys:
        differs[1:] |= key[at][1:] != key[at][:-1]
    numbers = np.empty(len(at), dtype=np.int64)
    numbers[at] = np.cumsum(differs)
    return numbers


def _taken_straight(group: Indices, length: Indices, level: int, by_gateway: Mask, leaf_process: Indices, counted: Mask) -> Mask:
    """Return where calls whose paths agree down to a level leave it partly for the gateway itself and partly for a process.

    Only where one gateway recorded all of them: the counts of two are as little comparable as their clocks.
    """
    size = group.max(initial=-1) + 1

    def any_of(which: Mask) -> Mask:
        return np.bincount(group[which & counted], minlength=size) > 0

    least, most = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
    np.minimum.at(least, group[counted], leaf_process[counted])
    np.maximum.at(most, group[counted], leaf_process[counted])
    straight = any_of(length == level + 1) & any_of(length > level + 1) & ~any_of(~by_gateway) & (least == most)
    return straight[group]
