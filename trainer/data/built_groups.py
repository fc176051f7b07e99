"""Whole groups of a run, updated by the rollouts that were built since the last poll.

In: the rows of `builds`. Out: the groups with as many built rollouts as their size. Invariant: history is scanned once; after that a
poll reads the rows that have arrived since the last one. The members of a group are read when its first rollout arrives, and again when a
rollout of it is built anew or arrives after they were forgotten; else they follow from the rows that arrive. The caller releases the groups
that it has trained or skipped, so that memory holds only those that wait to be trained, and those of which a rollout was first built within
the last hour.

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
_STALLED = 3_600_000_000
"""Time without a new rollout after which the members of a group that is not whole are forgotten, in microseconds: it may never be whole,
as one that was cancelled."""

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
_ROW = (
    "(b.RolloutId, b.Revision, toUnixTimestamp64Micro(b.{dated}), b.Mode, b.GroupId, b.GroupSize, b.Attempt, b.Content, b.Transitions, "
    "b.Rewards, b.Failure, b.Drops)"
)
"""BuiltRow in SQL."""
_ARRIVED = f"""
SELECT toUnixTimestamp64Micro(now64(6)), groupUniqArray({_ROW.format(dated="IngestedAt")})
FROM spangrad_internal.builds AS b
WHERE {THIS_RUN} AND Mode IN %(read)s AND b.IngestedAt >= fromUnixTimestamp64Micro({{since}}){{until}}
"""
_MEMBERS = f"SELECT {_ROW.format(dated='FirstBuiltAt')} FROM {{builds}} AS b WHERE Mode IN %(read)s"
_GROUPS = f"SELECT DISTINCT GroupId FROM spangrad_internal.builds WHERE {THIS_RUN} AND RolloutId IN {{rollouts}}"
_SIZED = f"SELECT GroupId FROM spangrad_internal.builds WHERE {THIS_RUN} AND GroupId IN {{groups}} AND GroupSize > 0"
_OF_GROUPS = f"{THIS_RUN} AND RolloutId IN (SELECT RolloutId FROM spangrad_internal.builds WHERE {THIS_RUN} AND GroupId IN ({_SIZED}))"


class BuiltRow(NamedTuple):
    """Revision of a rollout."""

    rollout: str
    revision: int
    dated: int
    """Start of its insert, in microseconds of the store's clock; of a group's members, that of the rollout's first revision."""
    mode: str
    group: str
    size: int
    """Number of rollouts of the whole group; 0: unknown."""
    attempt: int
    content: int
    transitions: int
    rewards: int
    failure: str
    drops: int

    @property
    def key(self) -> Key:
        """Return the mode and the id of its group."""
        return self.mode, self.group


class BuiltGroups:
    """Whole groups of one run and build specification that were not released."""

    def __init__(self, rows: Rows, as_of: Any = None, *, greedy: bool = False) -> None:
        """Read nothing yet; with `greedy` a group is whole only with its greedy rollout.

        Rows after `as_of`, a datetime, are left out. None: none are.
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
        self._members: dict[Key, dict[str, BuiltRow]] = {}
        """Newest revision of each rollout, by group and rollout: groups of known size of which something has arrived since the scan."""

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
            self._members.pop(key, None)
            self._members.pop((Mode.GREEDY.value, key[1]), None)
            if self._whole is not None and self._whole.pop(key, None) is not None:
                self._sorted = None

    def rescan(self) -> None:
        """Read all of history again with the next poll: groups that were released may count again."""
        self._whole = self._sorted = None

    def rows(self, keys: Collection[Key]) -> list[BuiltRow] | None:
        """Return the newest revisions of the rollouts of some groups, ordered as the store orders them. None: not all of them are known."""
        if not self._members.keys() >= set(keys):
            return None
        return sorted((row for key in set(keys) for row in self._members[key].values()), key=lambda row: (row.key, row.rollout))

    def _scan(self) -> None:
        ((now,),) = self._rows(_NOW)
        # Before they are counted: what becomes visible in between is read again.
        _, seen = self._arrived(int(now) - SWEEP_OVERLAP)
        builds = builds_sql(self._as_of, THIS_RUN)
        whole = self._rows(_WHOLE.format(builds=builds, compared=_COMPARED.format(builds=builds) if self._greedy else ""))
        self._whole, self._sorted = {(str(mode), str(group)): int(at) for mode, group, at in whole}, None
        self._reads_until = self._swept = int(now)
        self._next_sweep, self._seen, self._members = time.monotonic() + _SECONDS_BETWEEN_SWEEPS, seen, {}

    def _arrived(self, since: int) -> tuple[int, set[BuiltRow]]:
        """Return the store's time, and the rows dated since `since` (microseconds since 1970)."""
        until = f" AND {until_sql(self._as_of)}" if self._as_of else ""
        ((now, rows),) = self._rows(_ARRIVED.format(since=since, until=until))
        return int(now), {BuiltRow(*row) for row in rows}

    def _read_arrived(self, whole: dict[Key, int]) -> None:
        """Read what has arrived since the last poll, or the last sweep."""
        sweeps = time.monotonic() >= self._next_sweep
        now, arrived = self._arrived(self._swept - SWEEP_OVERLAP if sweeps else self._reads_until - _OVERLAP)
        self._update(whole, arrived)
        self._seen = {row for row in self._seen | arrived if row.dated >= self._reads_until - SWEEP_OVERLAP}
        self._reads_until = now
        if sweeps:
            self._swept, self._next_sweep = now, time.monotonic() + _SECONDS_BETWEEN_SWEEPS
            self._forget_stalled(whole, now)

    def _forget_stalled(self, whole: dict[Key, int], now: int) -> None:
        """Forget the members of groups that have long waited for rollouts; they are read again when one arrives."""
        kept, since = {group for _, group in whole}, now - _STALLED
        for key, members in [*self._members.items()]:
            if key[1] not in kept and all(row.dated < since for row in members.values()):
                del self._members[key]

    def _update(self, whole: dict[Key, int], arrived: set[BuiltRow]) -> None:
        """Update groups and members by rows of which some may be new."""
        new = arrived - self._seen
        revised = {row.rollout for row in self._seen | arrived if row.revision}
        at_once = {} if self._greedy else self._whole_at_once(row for row in new if row.size and row.rollout not in revised)
        if at_once:
            whole.update(at_once)
            self._sorted = None
        counted = (row for row in new if row.size or row.mode == Mode.GREEDY or row.key in self._members)
        others = [row for row in counted if row.key not in at_once or row.rollout in revised]
        read = {row.group for row in others if self._greedy or row.rollout in revised or not self._add(row)}
        read |= self._earlier_groups(row.rollout for row in new if row.revision)
        for ids in batches_of_keys(read):
            self._read_members({key.decode() for key in ids}, _OF_GROUPS.format(groups=constant(ids)))
        of_read = {key for key in (*whole, *self._members) if key[1] in read} if read else set[Key]()
        self._count_again(whole, {row.key for row in others} | of_read)

    def _earlier_groups(self, rollouts: Iterable[str]) -> set[str]:
        """Return the groups of all revisions of rollouts: one may have been in another group before, which has lost it."""
        batches = (_GROUPS.format(rollouts=constant(batch)) for batch in batches_of_keys(rollouts))
        return {group for query in batches for (group,) in self._rows(query)}

    def _whole_at_once(self, rows: Iterable[BuiltRow]) -> dict[Key, int]:
        """Return the groups of which enough rollouts have arrived since the last poll, and since when they are whole.

        No further query is needed for that; their members are not known, since others may have arrived long before.
        """
        new = {(row.key, row.rollout): row for row in rows if row.key not in self._members}
        return whole_groups(new.values())

    def _add(self, row: BuiltRow) -> bool:
        """Add a rollout to the members of its group, and return whether they are known then."""
        members = self._members.get(row.key)
        return members is not None and members.setdefault(row.rollout, row) == row

    def _read_members(self, groups: Collection[str], where: str) -> None:
        """Read the members of some groups, in every mode; those without a known size have none."""
        for key in [key for key in self._members if key[1] in groups]:
            del self._members[key]
        for (fields,) in self._rows(_MEMBERS.format(builds=builds_sql(self._as_of, where))):
            row = BuiltRow(*fields)
            if row.group in groups:
                self._members.setdefault(row.key, {})[row.rollout] = row

    def _count_again(self, whole: dict[Key, int], keys: Collection[Key]) -> None:
        members = [row for key in keys for row in self._members.get(key, {}).values()]
        counted, before = whole_groups(members, greedy=self._greedy), {key: whole[key] for key in keys if key in whole}
        if counted != before:
            for key in before:
                del whole[key]
            whole.update(counted)
            self._sorted = None


def whole_groups(members: Iterable[BuiltRow], *, greedy: bool = False) -> dict[Key, int]:
    """Return the groups that are whole by their members, and the time at which each became so, in microseconds.

    Members are a row a rollout, in every mode; those of size 0 do not count. With `greedy` a group is whole only with its greedy rollout,
    which is not one of its size.
    """
    groups: dict[Key, list[BuiltRow]] = {}
    for row in members:
        groups.setdefault(row.key, []).extend([row] if row.size else [])
    return {
        key: max(row.dated for row in rows)
        for key, rows in groups.items()
        if rows
        and max(row.size for row in rows) <= len(rows)
        and not (greedy and (key[0] == Mode.GREEDY or (Mode.GREEDY.value, key[1]) not in groups))
    }
