"""Who called, and in what order, from parent links and sequence numbers alone.

In: the spans of many rollouts as nodes of a forest. Out: for each call the name of its agent and its place among
the rollout's calls. Invariant: clocks of two hosts are never compared; missing parents and cycles cut a branch off,
and cost nothing else.

A span's *path* is the list of (process, sequence number) pairs at which its chain of ancestors leaves each process,
outermost first: [(runner, 0), (agent, 7), (gateway, 3)] for a gateway span under the agent's HTTP span. Two spans are
in order when their paths first differ inside one process. Where they first differ in the process itself (two workers
of one agent), the process whose call the gateway took first goes first. Where some of the calls come straight from the
gateway there (raw HTTP beside an instrumented client) and others through a process, no process counted them all but the
gateway: its own count orders everything that branches off at that place. A span without our sequence number is placed by
its service's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from spangrad import semconv
from transition_builder.dialects.gateway import IS_GATEWAY

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Forest:
    """Spans as numbered nodes; node `size` stands above every root, and is its own parent."""

    size: int
    parent: Indices
    depth: Indices

    @classmethod
    def of(cls, parent: Indices) -> Forest:
        """Cut cycles and measure depths. `parent` has an entry a node, len(parent) where there is none."""
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
        """The same forest with some parents replaced."""
        parent = self.parent[: self.size].copy()
        parent[children] = parents
        return Forest.of(parent)

    def nearest(self, marked: Mask) -> Indices:
        """For every node the nearest marked one among itself and its ancestors; `size` where there is none."""
        marked = np.append(marked, True)
        jump = np.where(marked, np.arange(self.size + 1), self.parent)
        return _follow(jump)

    def topmost(self, marked: Mask) -> Indices:
        """For every node the outermost marked one among itself and its ancestors; `size` where there is none."""
        nearest = self.nearest(marked)
        above = nearest[self.parent]
        return _follow(np.where(above == self.size, np.arange(self.size + 1), above))[nearest]

    def above_process(self, process: NDArray[np.int64]) -> Indices:
        """For every node its nearest ancestor in another process; `size` where there is none."""
        process = np.append(process, -1)
        inside = process[self.parent] == process
        first = _follow(np.where(inside, self.parent, np.arange(self.size + 1)))
        return self.parent[first]

    def common_depth(self, left: Indices, right: Indices) -> Indices:
        """Depth of the nearest common ancestor of each pair; 0 where there is none."""
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

    process: NDArray[np.int64]
    """Rank of the process's name: the order of names, whatever else is in the batch."""
    seq: NDArray[np.int64]

    def take(self, rows: Indices) -> Paths:
        """Some of the paths."""
        return Paths(self.process[rows], self.seq[rows])


def forest(nodes: pl.DataFrame) -> Forest:
    """Link nodes (TraceId, SpanId, ParentSpanId; node = row) to their parents."""
    index = nodes.select("TraceId", pl.col("SpanId").alias("ParentSpanId")).with_row_index("parent")
    linked = nodes.select("TraceId", "ParentSpanId").join(index, on=["TraceId", "ParentSpanId"], how="left", maintain_order="left")
    return Forest.of(linked["parent"].cast(pl.Int64).fill_null(nodes.height).to_numpy())


def paths(nodes: pl.DataFrame, tree: Forest, spans: Indices) -> Paths:
    """Paths of the given nodes; `nodes` has ProcessId, Seq, ServiceName and Timestamp."""
    ours = pl.col("ProcessId") != ""
    facts = nodes.select(
        process=pl.when(ours).then("ProcessId").otherwise(pl.format("~{}", "ServiceName")).rank("dense").cast(pl.Int64),
        seq=pl.when(ours).then(pl.col("Seq").cast(pl.Int64, strict=False).fill_null(0)).otherwise(pl.col("Timestamp").cast(pl.Int64)),
    )
    process, seq = np.append(facts["process"].to_numpy(), -1), np.append(facts["seq"].to_numpy(), -1)
    above = tree.above_process(process[:-1])
    levels = [spans]
    while (levels[-1] != tree.size).any():
        levels.append(above[levels[-1]])
    inwards = np.stack(levels, axis=1)
    length = (inwards != tree.size).sum(axis=1, keepdims=True)
    outwards = np.take_along_axis(inwards, np.maximum(length - 1 - np.arange(inwards.shape[1]), -1), axis=1)
    outwards = np.where(np.arange(inwards.shape[1]) < length, outwards, tree.size)
    return Paths(process[outwards], seq[outwards])


def precedes(left: Paths, right: Paths) -> Mask:
    """Whether each left span certainly began before the right one: by one process's own count."""
    differ = (left.process != right.process) | (left.seq != right.seq)
    at = np.expand_dims(np.argmax(differ, axis=1), 1)
    same_process = np.take_along_axis(left.process, at, 1) == np.take_along_axis(right.process, at, 1)
    earlier = np.take_along_axis(left.seq, at, 1) < np.take_along_axis(right.seq, at, 1)
    return differ.any(axis=1) & (same_process & earlier)[:, 0]


def agent_names(nodes: pl.DataFrame, tree: Forest, spans: Indices) -> pl.Series:
    """Names of the agents that the given nodes belong to.

    The nearest ancestor that names an agent; else the outermost CHAIN (LangGraph's plain graphs); else the
    service of the nearest span that is neither the gateway's nor the runner's root; else of the nearest at all.
    """
    chain = nodes.select(pl.col("IsChain")).to_series().to_numpy()
    own = nodes["AgentName"].is_not_null().to_numpy()
    theirs = nodes.select(~IS_GATEWAY & (pl.col("SpanName") != semconv.ROOT_SPAN_NAME)).to_series().to_numpy()
    anybody = nodes.select(~IS_GATEWAY).to_series().to_numpy()
    candidates = [
        (tree.nearest(own), "AgentName"),
        (tree.topmost(chain), "SpanName"),
        (tree.nearest(theirs), "ServiceName"),
        (tree.nearest(anybody), "ServiceName"),
    ]
    found = [
        nodes[column].gather(pl.Series(at[spans]).replace(tree.size, None).cast(pl.UInt32)).alias(str(place))
        for place, (at, column) in enumerate(candidates)
    ]
    return pl.DataFrame(found).select(pl.coalesce(pl.all(), pl.lit("")).alias("AgentName")).to_series()


def order(calls: pl.DataFrame, where: Paths) -> pl.Series:
    """Rank of each call's span among those of its attempt (RunId, RolloutId, Attempt), from 0; choices of a call share it."""
    width = where.process.shape[1]
    length = (where.process != -1).sum(axis=1)
    leaf = np.maximum(length - 1, 0)[:, None]
    frame = calls.select("RunId", "RolloutId", "Attempt", "TraceId", "SpanId", "ByGateway").with_columns(
        pl.Series("length", length),
        pl.Series("leaf_process", np.take_along_axis(where.process, leaf, 1)[:, 0]),
        pl.Series("leaf_seq", np.take_along_axis(where.seq, leaf, 1)[:, 0]),
        *(pl.Series(f"process_{level}", where.process[:, level]) for level in range(width)),
        *(pl.Series(f"seq_{level}", where.seq[:, level]) for level in range(width)),
    )
    attempt = ["RunId", "RolloutId", "Attempt"]
    taken = pl.struct("leaf_process", "leaf_seq", "TraceId", "SpanId").rank("dense")
    levels = [name for level in range(width) for name in (f"process_{level}", f"seq_{level}")]
    ranked = frame.with_columns(taken=taken).with_columns(
        # -1 (the path ended) stays before all. The process whose call was taken first goes first.
        pl.when(pl.col(f"process_{level}") == -1)
        .then(pl.lit(-1))
        .when(_taken_straight(level).over(*attempt, *levels[: 2 * level]))
        .then(pl.col("taken").cast(pl.Int64))
        .otherwise(pl.col("taken").min().over(*attempt, f"process_{level}").cast(pl.Int64))
        .alias(f"process_{level}")
        for level in range(width)
    )
    return ranked.select(pl.struct(*levels, "TraceId", "SpanId").rank("dense").over(attempt).cast(pl.Int64) - 1).to_series()


def _taken_straight(level: int) -> pl.Expr:
    """Whether, of calls whose paths agree down to a level, some leave there for the gateway itself, others for a process.

    Only where one gateway took all of them: the counts of two are as little to be compared as their clocks.
    """
    raw, through = pl.col("length") == level + 1, pl.col("length") > level + 1
    return raw.any() & through.any() & pl.col("ByGateway").all() & (pl.col("leaf_process").n_unique() == 1)
