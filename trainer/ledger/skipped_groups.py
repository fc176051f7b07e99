"""Skipped groups of a branch, as the ledger records them.

Invariant: the first reason of a group stays.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from spangrad.database import insert_new, repeated
from spangrad.settings import TrainerSettings
from spangrad.types import VersionStatus
from trainer.data.source import Group
from trainer.ledger.skips import DEPENDENCES, FAILURES, Skip, SkipReason, bases
from trainer.ledger.tables import BATCH_ROLLOUTS, FILE_BATCHES, SKIPPED, VERSIONS, LedgerDatabase, equal_to

_ORDER = ("version", "skipped_at", "run_id", "mode", "build_spec", "group_id")
"""Columns of a skipped group's place."""
_PAIRS_A_STATEMENT = 500
"""Largest number of pairs of a head and a committed version in one statement: databases limit its parameters."""


@dataclass(frozen=True, slots=True)
class SkippedGroup:
    """Group that a branch skipped."""

    group: Group
    reason: SkipReason
    detail: str
    basis: str
    """The settings that the reason depends on, as JSON."""
    head: int | None
    """Version whose descendants the reason holds for. None: it depends on no version."""
    version: int
    """Newest version number of the policy at that time."""
    committed: int
    """Newest version that the branch had committed at that time."""
    skipped_at: datetime

    @property
    def place(self) -> tuple[int, int, str, str, str, str]:
        """Return its place in the order of versions, then of time (microseconds since 1970)."""
        microseconds = (self.skipped_at - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
        return (self.version, microseconds, self.group.run_id, self.group.mode, self.group.build_spec, self.group.group_id)

    def is_outdated(self, lineage: Collection[int], bases: Mapping[SkipReason, str]) -> bool:
        """Return whether what the reason depends on has changed, given the present lineage and bases (`trainer.ledger.skips.bases`)."""
        return self.basis != bases[self.reason] or (self.head is not None and not _continues(lineage, self.head, self.committed))


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures among the newest groups of a run that were trained or have failed."""

    reasons: Mapping[SkipReason, int] = field(default_factory=Counter[SkipReason])
    """Number of failed groups, by reason."""
    newest: SkippedGroup | None = None
    """Newest group of the most frequent reason. None: no group failed."""

    @property
    def count(self) -> int:
        """Return the number of failed groups."""
        return sum(self.reasons.values())


class SkippedGroups:
    """Skipped groups of one branch of one policy."""

    def __init__(self, database: LedgerDatabase, branch: Mapping[str, str], settings: TrainerSettings) -> None:
        """Read and write them in `database`; `settings` give the basis of each reason."""
        self.database = database
        self._branch = branch
        self.bases = bases(settings)

    def reasons(self) -> dict[Group, SkipReason]:
        """Return every skipped group with its reason."""
        return {row.group: row.reason for row in self.read()}

    @repeated
    def enter(self, skips: Mapping[Group, Skip], head: int) -> None:
        """Skip groups that may not be trained in the step from version `head`; one that is skipped already stays as it is."""
        newest = sa.select(sa.func.coalesce(sa.func.max(VERSIONS.c.version), 0))
        numbers = {
            "version": newest.where(VERSIONS.c.policy == self._branch["policy"]),
            "committed": newest.where(*equal_to(VERSIONS, self._branch), VERSIONS.c.status == VersionStatus.COMMITTED),
        }
        with self.database.transaction() as transaction:
            written = {name: transaction.execute(query).scalar_one() for name, query in numbers.items()}
            written["skipped_at"] = time.time_ns() // 1000
            rows = [
                {
                    **self._branch,
                    **_key(group),
                    **written,
                    "reason": skip.reason.value,
                    "detail": skip.detail,
                    "basis": self.bases[skip.reason],
                    "head": head if DEPENDENCES[skip.reason].versions else None,
                }
                for group, skip in skips.items()
            ]
            insert_new(transaction, SKIPPED, rows)

    @repeated
    def read(self, reason: SkipReason | None = None) -> list[SkippedGroup]:
        """Return the skipped groups, oldest first; with a reason those alone."""
        with self.database.reading() as connection:
            return self._read(connection, reason)

    @repeated
    def newest(self, *, limit: int, after: Sequence[object] = (), since: int | None = None, until: int | None = None) -> list[SkippedGroup]:
        """Return skipped groups, the newest first: by version, then by time.

        Args:
            limit: largest number of groups.
            after: place of a group (`SkippedGroup.place`), after which they follow; empty: from the newest on.
            since: smallest `version`. None: any.
            until: `version` before which they were skipped. None: any.
        """
        columns = [SKIPPED.c[name] for name in _ORDER]
        query = sa.select(SKIPPED).where(*self._between(since, until)).order_by(*[column.desc() for column in columns]).limit(limit)
        if after:
            query = query.where(sa.tuple_(*columns) < sa.tuple_(*[sa.literal(value) for value in after]))
        with self.database.reading() as connection:
            return [_skipped(row) for row in connection.execute(query).mappings()]

    @repeated
    def counts(self, since: int | None = None, until: int | None = None) -> dict[SkipReason, int]:
        """Return the number of skipped groups by reason, the most frequent first; `since` and `until` as those of `newest`."""
        number = sa.func.count()
        query = sa.select(SKIPPED.c.reason, number).where(*self._between(since, until)).group_by(SKIPPED.c.reason)
        with self.database.reading() as connection:
            return {SkipReason(reason): count for reason, count in connection.execute(query.order_by(number.desc(), SKIPPED.c.reason))}

    def _between(self, since: int | None, until: int | None) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on the branch's skips whose `version` is at least `since` and less than `until`."""
        bounds = [*([] if since is None else [SKIPPED.c.version >= since]), *([] if until is None else [SKIPPED.c.version < until])]
        return [*equal_to(SKIPPED, self._branch), *bounds]

    def restore(self, names: Collection[str] = (), reason: SkipReason | None = None) -> list[SkippedGroup]:
        """Remove the skips of groups, and return them: those of these names (none: all), of this reason where one is given."""
        with self.database.transaction() as transaction:
            restored = [row for row in self._read(transaction, reason) if not names or row.group.group_id in names]
            for row in restored:
                transaction.execute(SKIPPED.delete().where(*equal_to(SKIPPED, {**self._branch, **_key(row.group)})))
        return restored

    def remove_outdated(self, run_id: str, build_spec: str, lineage: Iterable[int]) -> dict[SkipReason, int]:
        """Remove skips that no longer hold with the present lineage, so that groups are checked again; return their number by reason."""
        of_run = equal_to(SKIPPED, {**self._branch, "run_id": run_id, "build_spec": build_spec})
        known = frozenset(lineage)
        changed = [sa.and_(SKIPPED.c.reason == reason.value, SKIPPED.c.basis != text) for reason, text in self.bases.items()]
        with self.database.transaction() as transaction:
            columns = (SKIPPED.c.head, SKIPPED.c.committed)
            pairs = transaction.execute(sa.select(*columns).where(*of_run, SKIPPED.c.head.is_not(None)).distinct())
            discontinued = [(head, committed) for head, committed in pairs if not _continues(known, head, committed)]
            starts = range(0, len(discontinued), _PAIRS_A_STATEMENT)
            of_pairs = [sa.tuple_(*columns).in_(discontinued[start : start + _PAIRS_A_STATEMENT]) for start in starts]
            removed = Counter[SkipReason]()
            for outdated in (sa.or_(*changed), *of_pairs):
                counts = sa.select(SKIPPED.c.reason, sa.func.count()).where(*of_run, outdated).group_by(SKIPPED.c.reason)
                of_statement = {SkipReason(reason): count for reason, count in transaction.execute(counts)}
                if of_statement:  # else the ledger would count as changed
                    transaction.execute(SKIPPED.delete().where(*of_run, outdated))
                removed.update(of_statement)
        return removed

    @repeated
    def failures(self, run_id: str, window: int) -> Failures:
        """Return the failures among the newest `window` groups of a run that were trained or have failed.

        Their order is that of the version numbers that they were to make: a refused step's number comes before that of the step that
        replaced it.
        """
        failed = (
            sa.select(SKIPPED)
            .where(*equal_to(SKIPPED, self._branch), SKIPPED.c.run_id == run_id)
            .order_by(SKIPPED.c.version.desc(), SKIPPED.c.skipped_at.desc(), SKIPPED.c.group_id)
            .limit(window)
        )
        with self.database.reading() as connection:
            # One by one: asked for all of them at once, SQLite goes through every skip until it has found enough.
            by_reason = [failed.where(SKIPPED.c.reason == reason.value) for reason in FAILURES]
            failures = [_skipped(row) for query in by_reason for row in connection.execute(query).mappings()]
            of_names = sorted(failures, key=lambda row: row.group.group_id)
            rows = sorted(of_names, key=lambda row: (row.version, row.skipped_at), reverse=True)[:window]
            trained = self._trained(connection, run_id, window) if rows else []
        # At one number, what was trained comes first: groups are skipped after it, on their way into the next batch.
        events = [*((version, False, None) for version in trained), *((row.version, True, row) for row in rows)]
        newest = [row for *_, row in sorted(events, key=lambda event: event[:2], reverse=True)[:window] if row]
        reasons = Counter(row.reason for row in newest)
        dominant = max(reasons, key=lambda reason: reasons[reason], default=None)
        return Failures(reasons, next((row for row in newest if row.reason is dominant), None))

    def _trained(self, connection: sa.Connection, run_id: str, window: int) -> list[int]:
        """Return the version of each group of the run that its newest `window` batches have trained."""
        committed = (
            sa.select(VERSIONS.c.version, VERSIONS.c.batch_id)
            .where(*equal_to(VERSIONS, {**self._branch, "run_id": run_id}), VERSIONS.c.status == VersionStatus.COMMITTED)
            .where(VERSIONS.c.batch_id.not_in(sa.select(FILE_BATCHES.c.batch_id)))
            .order_by(VERSIONS.c.version.desc())
            .limit(window)
            .subquery()
        )
        groups = (
            sa.select(committed.c.version, BATCH_ROLLOUTS.c.mode, BATCH_ROLLOUTS.c.group_id)
            .join(BATCH_ROLLOUTS, BATCH_ROLLOUTS.c.batch_id == committed.c.batch_id)
            .distinct()
        )
        return [version for version, *_ in connection.execute(groups)]

    def _read(self, connection: sa.Connection, reason: SkipReason | None) -> list[SkippedGroup]:
        where = [*equal_to(SKIPPED, self._branch), *([SKIPPED.c.reason == reason.value] if reason else [])]
        order = (SKIPPED.c.skipped_at, SKIPPED.c.run_id, SKIPPED.c.mode, SKIPPED.c.group_id)
        return [_skipped(row) for row in connection.execute(sa.select(SKIPPED).where(*where).order_by(*order)).mappings()]


def _key(group: Group) -> dict[str, object]:
    return {"run_id": group.run_id, "mode": group.mode, "build_spec": group.build_spec, "group_id": group.group_id}


def _continues(lineage: Collection[int], head: int, committed: int) -> bool:
    """Return whether a lineage continues from a head only with versions newer than `committed`."""
    return head in lineage and not any(version in lineage for version in range(head + 1, committed + 1))


def _skipped(row: sa.RowMapping) -> SkippedGroup:
    return SkippedGroup(
        Group(row["run_id"], row["mode"], row["build_spec"], row["group_id"]),
        SkipReason(row["reason"]),
        row["detail"],
        row["basis"],
        row["head"],
        row["version"],
        row["committed"],
        datetime.fromtimestamp(row["skipped_at"] / 1_000_000, UTC),
    )
