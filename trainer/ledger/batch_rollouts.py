"""Rollouts of batches in the ledger: the rollouts of each batch, and those that belong to one already.

Invariant: each function runs inside a transaction of the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from spangrad.errors import LedgerError
from trainer.data.built_groups import Key
from trainer.data.source import AttemptKey, BatchRollout, Group
from trainer.ledger.tables import BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS, LEASES, SKIPPED, VERSIONS, equal_to

_KEYS_A_STATEMENT = 500


class AlreadyTrainedError(LedgerError):
    """Rollouts of a batch belong to another one: no rollout is trained twice."""

    def __init__(self, groups: Mapping[Group, str], branch: str) -> None:
        """Name the groups that hold such rollouts, with a sentence about each."""
        detail = next(iter(groups.values()))
        remedy = "No rollout is trained twice: give rollouts ids of their own in each run."
        super().__init__(f"a rollout of this batch is already in another batch of {branch}: {detail} {remedy}")
        self.groups = dict(groups)


def claim(transaction: sa.Connection, branch: Mapping[str, str], batch_id: str, rollouts: Sequence[BatchRollout]) -> None:
    """Record a batch's rollouts.

    Raises:
        AlreadyTrainedError: some are in another batch of the branch, or in this one twice.
    """
    conflicts = dict(claimed(transaction, branch, rollouts))
    keys = dict[AttemptKey, Group]()
    for rollout in rollouts:
        if keys.setdefault(rollout.key, rollout.group) != rollout.group:
            conflicts[rollout.group] = f"rollout {rollout.rollout_id!r} is in group {keys[rollout.key].group_id!r} of the same batch, too."
    if conflicts:
        raise AlreadyTrainedError(conflicts, f"{branch['policy']}/{branch['branch']}")
    enter(transaction, BATCH_ROLLOUTS, branch, batch_id, rollouts)


def enter(transaction: sa.Connection, table: sa.Table, branch: Mapping[str, str], batch_id: str, rollouts: Sequence[BatchRollout]) -> None:
    """Insert a row a rollout into BATCH_ROLLOUTS or FILE_BATCH_ROLLOUTS."""
    rows = [
        {
            **branch,
            "batch_id": batch_id,
            **asdict(rollout.group),
            "rollout_id": rollout.rollout_id,
            "attempt": rollout.attempt,
            "revision": rollout.revision,
        }
        for rollout in rollouts
    ]
    if rows:
        transaction.execute(table.insert(), rows)


def claimed(
    transaction: sa.Connection, branch: Mapping[str, str], rollouts: Sequence[BatchRollout], pending: str | None = None
) -> Iterator[tuple[Group, str]]:
    """Yield the groups of which a rollout is in a batch of the branch, with a sentence; a group may come more than once.

    A leased batch counts as a committed one where its id is `pending`, and no other.
    """
    table = BATCH_ROLLOUTS.c
    in_branch = equal_to(BATCH_ROLLOUTS, branch)
    leased = sa.select(LEASES.c.batch_id).where(*equal_to(LEASES, branch), LEASES.c.batch_id != (pending or ""))
    for start in range(0, len(rollouts), _KEYS_A_STATEMENT):
        by_key = {rollout.key: rollout for rollout in rollouts[start : start + _KEYS_A_STATEMENT]}
        query = (
            sa.select(table.run_id, table.rollout_id, table.attempt, table.group_id, VERSIONS.c.version)
            .join(VERSIONS, VERSIONS.c.batch_id == table.batch_id)
            .where(*in_branch, *_among(by_key), table.batch_id.not_in(leased))
        )
        for run, name, attempt, group, version in transaction.execute(query):
            if rollout := by_key.get((run, name, attempt)):
                yield rollout.group, f"version {version} was trained on its rollout {name!r}, as one of group {group!r}."


def _among(keys: Collection[AttemptKey]) -> list[sa.ColumnElement[bool]]:
    """Return conditions that the keys' rows meet, and few others: SQLite finds no row of tuples by the primary key."""
    return [BATCH_ROLLOUTS.c.run_id.in_({run for run, _, _ in keys}), BATCH_ROLLOUTS.c.rollout_id.in_({name for _, name, _ in keys})]


def finished(
    connection: sa.Connection,
    branch: Mapping[str, str],
    run_id: str,
    build_spec: str,
    *,
    finetuned: bool,
    since: int | None = None,
    keys: Sequence[Key] | None = None,
) -> tuple[set[Key], set[Key]]:
    """Return the groups of a run that are trained under any specification or skipped under this one, and those of a step under way.

    Args:
        connection: to the ledger.
        branch: policy and branch.
        run_id: the run.
        build_spec: the specification.
        finetuned: True if groups of which a run over files trained a rollout count, too.
        since: version from which on batches and skips are read. None: all.
        keys: groups to read of; a few others may be among the result. None: all.
    """
    leases = set(connection.execute(sa.select(LEASES.c.batch_id).where(*equal_to(LEASES, branch))).scalars())
    done, leased = set[Key](), set[Key]()
    for table in (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS) if finetuned else (BATCH_ROLLOUTS,):
        under_way = table.c.batch_id.in_(leases)
        query = sa.select(table.c.mode, table.c.group_id, under_way).where(table.c.run_id == run_id)
        if since is None:
            query = query.where(*equal_to(table, branch), _named(table, keys))
        else:
            query = query.select_from(by_version(table)).where(*equal_to(VERSIONS, branch), VERSIONS.c.version >= since)
        for mode, group, is_leased in connection.execute(query.distinct()):
            (leased if is_leased else done).add((str(mode), str(group)))
    recent = SKIPPED.c.version >= since if since is not None else sa.true()
    query = sa.select(SKIPPED.c.mode, SKIPPED.c.group_id).where(
        *equal_to(SKIPPED, branch), SKIPPED.c.run_id == run_id, SKIPPED.c.build_spec == build_spec, _named(SKIPPED, keys), recent
    )
    done |= {(str(mode), str(group)) for mode, group in connection.execute(query)}
    return done, leased


def _named(table: sa.Table, keys: Sequence[Key] | None) -> sa.ColumnElement[bool]:
    """Return the condition that a row is of a mode and an id of some keys. None: of any."""
    if keys is None:
        return sa.true()
    return sa.and_(table.c.mode.in_({mode for mode, _ in keys}), table.c.group_id.in_([group for _, group in keys]))


def by_version(table: sa.Table) -> sa.Join:
    """Return VERSIONS with the rows of BATCH_ROLLOUTS or FILE_BATCH_ROLLOUTS that made each, for queries of a few versions.

    Given the batches of these as a subquery, SQLite would read every rollout of a branch.
    """
    return VERSIONS.join(table, table.c.batch_id == VERSIONS.c.batch_id)


def sizes(transaction: sa.Connection, branch: Mapping[str, str], since: int) -> dict[str, int]:
    """Return the number of rollouts of each batch of a branch, or that it names, by its id, for the versions from a number on."""
    counts = Counter[str]()
    for table in (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS):
        query = sa.select(table.c.batch_id, sa.func.count()).select_from(by_version(table)).group_by(table.c.batch_id)
        for batch_id, count in transaction.execute(query.where(*equal_to(VERSIONS, branch), VERSIONS.c.version >= since)):
            counts[batch_id] += count
    return dict(counts)


def oldest_open(transaction: sa.Connection, policy: str, branch: str) -> int:
    """Return the version of the branch's step that is under way, else the policy's newest; those before it are final."""
    newest = transaction.execute(sa.select(sa.func.max(VERSIONS.c.version)).where(VERSIONS.c.policy == policy)).scalar()
    lease = transaction.execute(sa.select(LEASES.c.version).where(*equal_to(LEASES, {"policy": policy, "branch": branch}))).scalar()
    return min(version for version in (newest or 0, lease) if version is not None)


def read(transaction: sa.Connection, batch_id: str) -> list[BatchRollout]:
    """Return the rollouts of a batch, leased or committed, or those that a batch of files names, in order."""
    names = ("run_id", "mode", "build_spec", "group_id", "rollout_id", "attempt", "revision")
    query = sa.union(
        *(
            sa.select(*[table.c[name] for name in names]).where(table.c.batch_id == batch_id)
            for table in (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS)
        )
    )
    rows = map(tuple[Any, ...], transaction.execute(query.order_by("group_id", "rollout_id", "attempt")))
    return [BatchRollout(Group(*row[:4]), *row[4:]) for row in rows]
