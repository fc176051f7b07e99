"""Whole groups of a run, updated by the rollouts that were built since the last poll.

In: the rows of `builds`. Out: the groups with as many built rollouts as their size. Invariant: history is scanned once; after that a
poll reads the rows that have arrived since the last one, and only the groups of those rollouts are counted again. The caller releases the
groups that it has trained or skipped, so that memory holds only those that wait to be trained.

A row is dated when its insert begins and is seen when that ends. So each poll reads again a few seconds before the last one, and every
30 seconds as much as the longest insert takes; rows that were seen already change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from spangrad.store.clickhouse import batches as batches_of_keys
from spangrad.store.clickhouse import constant
from spangrad.store.datasets import builds_sql, until_sql
from spangrad.types import Mode

Rows = Callable[[str], Sequence[tuple[Any, ...]]]
"""Function that runs a query of the run's and the specification's rows, with the parameters %(run)s, %(spec)s, %(modes)s and %(read)s."""
Key = tuple[str, str]
"""Mode and id of a group."""

VISIBLE_SECONDS = 10
"""Time in which nearly every insert becomes visible after its rows were dated, in seconds."""
_OVERLAP = VISIBLE_SECONDS * 1_000_000
"""Overlap of two polls, in microseconds."""
SWEEP_OVERLAP = 120_000_000
"""Overlap of two sweeps, in microseconds: longer than any insert takes."""
_SECONDS_BETWEEN_SWEEPS = 30.0

THIS_RUN = "RunId = %(run)s AND BuildSpec = %(spec)s"
_NOW = "SELECT toUnixTimestamp64Micro(now64(6))"
_WHOLE = """
SELECT Mode, GroupId, toUnixTimestamp64Micro(max(FirstBuiltAt))
FROM {builds} AS v
WHERE Mode IN %(modes)s AND GroupSize > 0 {compared}
GROUP BY Mode, GroupId
HAVING uniqExact(RolloutId) >= max(GroupSize)
"""
_COMPARED = "AND GroupId IN (SELECT GroupId FROM {builds} AS greedy WHERE Mode = '" + Mode.GREEDY.value + "')"
_ARRIVED = f"""
SELECT toUnixTimestamp64Micro(now64(6)),
    groupUniqArray((b.RolloutId, b.Revision, toUnixTimestamp64Micro(b.IngestedAt), b.Mode, b.GroupId, b.GroupSize))
FROM spangrad_internal.builds AS b
WHERE {THIS_RUN} AND Mode IN %(read)s AND b.IngestedAt >= fromUnixTimestamp64Micro({{since}}){{until}}
"""
_GROUPS = f"SELECT DISTINCT GroupId FROM spangrad_internal.builds WHERE {THIS_RUN} AND RolloutId IN {{rollouts}}"
_OF_GROUPS = f"{THIS_RUN} AND RolloutId IN (SELECT RolloutId FROM spangrad_internal.builds WHERE {THIS_RUN} AND GroupId IN {{groups}})"


class BuiltRow(NamedTuple):
    """Revision of a rollout."""

    rollout: str
    revision: int
    dated: int
    """Start of its insert, in microseconds of the store's clock."""
    mode: str
    group: str
    size: int
    """Number of rollouts of the whole group; 0: unknown."""


class BuiltGroups:
    """Whole groups of one run and build specification that were not released."""

    def __init__(self, rows: Rows, as_of: Any = None, *, greedy: bool = False) -> None:
        """Read nothing yet.

        Args:
            rows: runs queries.
            as_of: a datetime, after which rows are left out. None: take all.
            greedy: groups are whole only with their greedy rollout.
        """
        self._rows = rows
        self._as_of = as_of
        self._greedy = greedy
        self._whole: dict[Key, int] | None = None
        """Time at which each group became whole, in microseconds since 1970. None: nothing was read yet."""
        self._sorted: list[Key] | None = None
        self._reads_until = 0
        """Start of the last poll, in microseconds of the store's clock."""
        self._swept = 0
        self._next_sweep = 0.0
        """Time of the next sweep, in seconds of the monotonic clock."""
        self._seen: set[BuiltRow] = set()

    def poll(self, *, arrived: bool = True) -> list[Key]:
        """Return the groups that are whole now, in the order in which they became so; the same list as long as they are the same.

        Args:
            arrived: False if nothing has arrived for longer than rows take to become visible: then the store is asked in sweeps alone.
        """
        if self._whole is None:
            self._scan()
        elif arrived or time.monotonic() >= self._next_sweep:
            self._read_arrived(self._whole)
        if self._sorted is None:
            whole = self._whole or {}
            self._sorted = sorted(whole, key=lambda key: (whole[key], key))
        return self._sorted

    def release(self, keys: Iterable[Key]) -> None:
        """Forget groups: they are trained, or skipped."""
        for key in keys:
            if self._whole is not None and self._whole.pop(key, None) is not None:
                self._sorted = None

    def rescan(self) -> None:
        """Read all of history again with the next poll: groups that were released may count again."""
        self._whole = self._sorted = None

    def _scan(self) -> None:
        ((now,),) = self._rows(_NOW)
        # Before they are counted: what becomes visible in between is read again.
        _, seen = self._arrived(int(now) - SWEEP_OVERLAP)
        self._whole, self._sorted = self._count(THIS_RUN), None
        self._reads_until = self._swept = int(now)
        self._next_sweep, self._seen = time.monotonic() + _SECONDS_BETWEEN_SWEEPS, seen

    def _arrived(self, since: int) -> tuple[int, set[BuiltRow]]:
        """Return the store's time, and the rows dated since `since` (microseconds since 1970)."""
        until = f" AND {until_sql(self._as_of)}" if self._as_of else ""
        ((now, rows),) = self._rows(_ARRIVED.format(since=since, until=until))
        return int(now), {
            BuiltRow(str(rollout), int(revision), int(dated), str(mode), str(group), int(size))
            for rollout, revision, dated, mode, group, size in rows
        }

    def _read_arrived(self, whole: dict[Key, int]) -> None:
        sweeps = time.monotonic() >= self._next_sweep
        now, arrived = self._arrived(self._swept - SWEEP_OVERLAP if sweeps else self._reads_until - _OVERLAP)
        new = arrived - self._seen
        complete = {} if self._greedy else whole_by_rows(new, self._seen | arrived)
        if complete:
            whole.update(complete)
            self._sorted = None
        groups = {row.group for row in new if (row.mode, row.group) not in complete}
        # An earlier revision may have been in another group, which has lost the rollout.
        for rollouts in batches_of_keys(row.rollout for row in new if row.revision):
            groups |= {group for (group,) in self._rows(_GROUPS.format(rollouts=constant(rollouts)))}
        for ids in batches_of_keys(groups):
            self._count_again(whole, {key.decode() for key in ids}, _OF_GROUPS.format(groups=constant(ids)))
        self._seen = {row for row in self._seen | arrived if row.dated >= self._reads_until - SWEEP_OVERLAP}
        self._reads_until = now
        if sweeps:
            self._swept, self._next_sweep = self._reads_until, time.monotonic() + _SECONDS_BETWEEN_SWEEPS

    def _count_again(self, whole: dict[Key, int], groups: set[str], where: str) -> None:
        counted = {key: at for key, at in self._count(where).items() if key[1] in groups}
        before = {key: whole[key] for key in whole if key[1] in groups} if groups else {}
        if counted != before:
            for key in before:
                del whole[key]
            whole.update(counted)
            self._sorted = None

    def _count(self, where: str) -> dict[Key, int]:
        builds = builds_sql(self._as_of, where)
        rows = self._rows(_WHOLE.format(builds=builds, compared=_COMPARED.format(builds=builds) if self._greedy else ""))
        return {(str(mode), str(group)): int(at) for mode, group, at in rows}


def whole_by_rows(new: Collection[BuiltRow], known: Collection[BuiltRow]) -> dict[Key, int]:
    """Return the groups of `new` rows that are whole by the `known` ones, which need not be all of their rows, and since when.

    A group with a rollout that was built anew is left out: the rollout may have moved there.
    """
    groups: dict[Key, list[BuiltRow]] = {(row.mode, row.group): [] for row in new}
    for row in known:
        if (row.mode, row.group) in groups:
            groups[row.mode, row.group].append(row)
    anew = {row.rollout for row in known if row.revision}
    return {
        key: max(row.dated for row in rows)
        for key, rows in groups.items()
        if 0 < max(row.size for row in rows) <= len({row.rollout for row in rows}) and anew.isdisjoint(row.rollout for row in rows)
    }
