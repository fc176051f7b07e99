"""Order of calls and tool calls in their attempt, from parent links and sequence numbers alone.

Invariant: clocks of two processes are never compared. The rules are those of docs/concepts/calls.md ("Order"). A span without our sequence
number is placed by the clock of its own process: the service instance that it names (ProcessId `~instance`), else its service.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder.calls.forest import Indices, Mask, SpanForest, chains, follow
from transition_builder.schemas import SPAN

_FOREIGN = "~"
"""Prefix of the names of processes that do not number their spans."""
_MILLISECOND = 1_000_000
"""Nanoseconds."""


def times(nodes: pl.DataFrame) -> pl.DataFrame:
    """Return Process, Seq (its start where its process does not number spans), Start and End (its start where not known) of each span."""
    named, start = pl.col("ProcessId") != "", pl.col("Timestamp").cast(pl.Int64)
    numbered = named & ~pl.col("ProcessId").str.starts_with(_FOREIGN)
    return nodes.select(
        Process=pl.when(named).then("ProcessId").otherwise(pl.lit(_FOREIGN) + pl.col("ServiceName")),
        Seq=pl.when(numbered).then(pl.col("Seq").cast(pl.Int128)).otherwise(start),
        Start=start,
        End=start + pl.col("Duration").cast(pl.Int64).fill_null(0),
    )


@dataclass(frozen=True, slots=True)
class Clocks:
    """Processes of spans and their times there; one entry a node, and one for the virtual root, which is of process -1."""

    process: Indices
    """Rank of the process by name."""
    caller: Indices
    """Nearest ancestor in another process."""
    seq: Indices
    start: Indices
    """Start by the process's clock, in nanoseconds."""
    end: Indices

    def latest_start(self, spans: Indices) -> Indices:
        """Return the last nanosecond at which each span can have started.

        OpenTelemetry for JavaScript cuts starts to whole milliseconds and ends to nanoseconds, so that the next span seems to overlap.
        """
        start = self.start[spans]
        return np.where(start % _MILLISECOND == 0, start + _MILLISECOND - 1, start)

    @classmethod
    def of(cls, nodes: pl.DataFrame, forest: SpanForest) -> Clocks:
        """Read the clocks of described spans."""
        facts = times(nodes)
        rank = facts["Process"].cast(pl.Enum(facts["Process"].unique().sort())).to_physical().cast(pl.Int64)
        seq = facts["Seq"].cast(pl.Int64, strict=False).fill_null(0)
        process, seq, start, end = (np.append(column.to_numpy(), -1) for column in (rank, seq, facts["Start"], facts["End"]))
        inside = process[forest.parent] == process
        outermost = follow(np.where(inside, forest.parent, np.arange(forest.size + 1)))
        return cls(process, forest.parent[outermost], seq, start, end)

    def paths(self, spans: Indices) -> Indices:
        """Return the path of each span, a row each: nodes from the outermost on, and the virtual root beyond the end."""
        from_innermost = chains(spans, self.caller)
        # Every level but the innermost ones begins with the virtual root, which goes to the end of its row.
        return np.take_along_axis(from_innermost, self.last_steps(from_innermost)[:, None] - np.arange(from_innermost.shape[1]), axis=1)

    def last_steps(self, path: Indices) -> Indices:
        """Return the place in each path of its own span."""
        return (self.process[path] >= 0).sum(axis=1) - 1


def order(clocks: Clocks, events: pl.DataFrame, path: Indices) -> Indices:
    """Return the rows of events sorted by attempt (Number) and, inside it, by path.

    Calls alone (IsCall) define the order of processes, and place tool calls. SPAN breaks ties: no two events have the same.
    """
    attempt, is_call, by_gateway = (events[name].to_numpy() for name in ("Number", "IsCall", "ByGateway"))
    tie_break = events.select(pl.struct(SPAN).rank("dense").cast(pl.Int64)).to_series().to_numpy()
    count, last = len(events), clocks.last_steps(path)
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
            common_prefix = _numbered(_numbered(common_prefix, process), seq)
        keys += [np.where(process < 0, -1, key), seq]
    return np.lexsort((tie_break, *reversed(keys), attempt))


def _numbered(group: Indices, values: Indices) -> Indices:
    """Return a number for each distinct pair."""
    return np.unique(group * len(group) + np.unique(values, return_inverse=True)[1], return_inverse=True)[1]


def _least(group: Indices, values: Indices) -> Indices:
    """Return the least value of each one's group."""
    least = np.full(len(group), np.iinfo(np.int64).max)
    np.minimum.at(least, group, values)
    return least[group]


def _recorded_directly(group: Indices, last: Indices, level: int, by_gateway: Mask, recorder: Indices, is_call: Mask) -> Mask:
    """Return where calls whose paths agree down to a level leave it partly for the gateway itself and partly for a process.

    Only where one gateway recorded all of them: the counts of two are as little comparable as their clocks.
    """
    another = recorder != _least(group, np.where(is_call, recorder, np.iinfo(np.int64).max))
    kinds = (last == level, last > level, ~by_gateway | another)
    direct, indirect, incomparable = (np.isin(group, group[is_call & kind]) for kind in kinds)
    return direct & indirect & ~incomparable
