"""Order of calls and tool calls in their attempt, from parent links and sequence numbers alone.

Invariant: clocks of two processes are never compared. The rules are those of docs/concepts/calls.md ("Order"). A span without our sequence
number is placed by the clock of its own process: the service instance that it names (ProcessId `~instance`), else its service.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder.calls.forest import Indices, Mask, SpanForest, follow
from transition_builder.schemas import SPAN

FOREIGN = "~"
"""Prefix of the names of processes that do not number their spans."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Sequence numbers and times of spans by their own processes; one entry a node, and one of -1 for the virtual root."""

    process: Indices
    """Rank of the process by name."""
    seq: Indices
    start: Indices
    """Start by the process's clock, in nanoseconds."""
    end: Indices
    """The same of the end; the start where the end is not known."""

    @classmethod
    def of(cls, nodes: pl.DataFrame) -> Clocks:
        """Read the clocks of described spans."""
        named = pl.col("ProcessId") != ""
        start = pl.col("Timestamp").cast(pl.Int64)
        facts = nodes.select(
            name=pl.when(named).then("ProcessId").otherwise(pl.lit(FOREIGN) + pl.col("ServiceName")),
            seq=pl.when(named & ~pl.col("ProcessId").str.starts_with(FOREIGN))
            .then(pl.col("Seq").cast(pl.Int64, strict=False).fill_null(0))
            .otherwise(start),
            start=start,
            end=start + pl.col("Duration").cast(pl.Int64, strict=False).fill_null(0),
        )
        process = facts["name"].cast(pl.Enum(facts["name"].unique().sort())).to_physical().cast(pl.Int64)
        return cls(*(np.append(column.to_numpy(), -1) for column in (process, facts["seq"], facts["start"], facts["end"])))


def paths(forest: SpanForest, clocks: Clocks, spans: Indices) -> Indices:
    """Return the path of each span, a row each: nodes from the outermost on, and `forest.size` beyond the end."""
    inside = clocks.process[forest.parent] == clocks.process
    above = forest.parent[follow(np.where(inside, forest.parent, np.arange(forest.size + 1)))]
    levels = [spans]
    while (levels[-1] != forest.size).any():
        levels.append(above[levels[-1]])
    from_innermost = np.stack(levels, axis=1)
    # Every level but the innermost ones begins with `forest.size`, which goes to the end of its row.
    return np.take_along_axis(from_innermost, last_steps(clocks, from_innermost)[:, None] - np.arange(len(levels)), axis=1)


def last_steps(clocks: Clocks, path: Indices) -> Indices:
    """Return the place in each path of its own span."""
    return (clocks.process[path] >= 0).sum(axis=1) - 1


def order(clocks: Clocks, path: Indices, events: pl.DataFrame) -> Indices:
    """Return the rows of events sorted by attempt and, inside it, by path.

    Args:
        clocks: of all spans.
        path: the events' paths.
        events: Number of the attempt, IsCall (calls alone define the order of processes, and place tool calls), ByGateway, and TraceId and
            SpanId, which break ties: no two events have the same.
    """
    attempt, is_call, by_gateway = (events[name].to_numpy() for name in ("Number", "IsCall", "ByGateway"))
    tie_break = events.select(pl.struct(SPAN).rank("dense").cast(pl.Int64)).to_series().to_numpy()
    count, last = len(events), last_steps(clocks, path)
    leaf = path[np.arange(count), last]
    taken = np.empty(count, dtype=np.int64)
    taken[np.lexsort((tie_break, clocks.seq[leaf], clocks.process[leaf], attempt))] = np.arange(count)
    taken[~is_call] = count
    uneven = len(np.unique(last[is_call])) > 1

    keys, common_prefix = list[Indices](), attempt
    for level in range(path.shape[1]):
        process, seq = clocks.process[path[:, level]], clocks.seq[path[:, level]]
        # The process whose call was taken first goes first; processes without calls come last, by name; a path that ended before all.
        first = _least(_numbered(attempt, process), taken)
        key = np.where(first < count, first, count + process)
        if uneven:
            recorded_directly = _recorded_directly(common_prefix, last, level, by_gateway, clocks.process[leaf], is_call)
            key = np.where(recorded_directly, np.where(is_call, taken, count + process), key)
            common_prefix = _numbered(common_prefix, process, seq)
        keys += [np.where(process < 0, -1, key), seq]
    return np.lexsort((tie_break, *reversed(keys), attempt))


def _numbered(*keys: Indices) -> Indices:
    """Return a number for each distinct combination."""
    at = np.lexsort(keys)
    differs = np.zeros(len(at), dtype=np.bool_)
    for key in keys:
        differs[1:] |= key[at][1:] != key[at][:-1]
    numbers = np.empty(len(at), dtype=np.int64)
    numbers[at] = np.cumsum(differs)
    return numbers


def _least(group: Indices, values: Indices) -> Indices:
    """Return the least value of each one's group."""
    least = np.full(len(group), np.iinfo(np.int64).max)
    np.minimum.at(least, group, values)
    return least[group]


def _recorded_directly(group: Indices, last: Indices, level: int, by_gateway: Mask, recorder: Indices, is_call: Mask) -> Mask:
    """Return where calls whose paths agree down to a level leave it partly for the gateway itself and partly for a process.

    Only where one gateway recorded all of them: the counts of two are as little comparable as their clocks.
    """

    def any_call(which: Mask) -> Mask:
        return (np.bincount(group[which & is_call], minlength=len(group)) > 0)[group]

    another = recorder != _least(group, np.where(is_call, recorder, np.iinfo(np.int64).max))
    return any_call(last == level) & any_call(last > level) & ~any_call(~by_gateway | another)
