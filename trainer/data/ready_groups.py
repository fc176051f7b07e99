"""Groups that are ready to be trained: whole, and neither trained nor skipped.

Invariant: a poll costs what is new. The ledger is queried for groups that are new, and, when it has changed, for what was written since;
groups that are done are released by the source. When the user has restored groups, both are read again from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from spangrad.settings import TrainerSettings
from trainer.data.source import Group, GroupReader
from trainer.ledger.batch_rollouts import by_version, oldest_open
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS, LEASES, SKIPPED, VERSIONS, equal_to

Key = tuple[str, str]
"""Mode and id of a group."""
_KEYS_A_STATEMENT = 500
_FEW = 4000
"""Largest number of groups that are looked up by their ids; for more, the whole ledger is read at once."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """Groups that may not be taken."""

    done: set[Key]
    """Groups that are trained or skipped."""
    leased: set[Key]
    """Groups of a step that is under way, which may fail."""


class ReadyGroups:
    """Groups of one branch that a batch may take."""

    def __init__(self, ledger: Ledger, settings: TrainerSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._tables = (BATCH_ROLLOUTS,) if settings.sampling.retrain_finetuned else (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS)
        self._changes: tuple[int, int] | None = None
        """Change counters of the ledger at the last query."""
        self._newest = 0
        """Oldest version whose groups and skips may be new at the next query of the ledger."""
        self._asked: set[Key] = set()
        """Groups that were looked up in the ledger and are not done."""
        self._leased: set[Key] = set()
        self._whole: list[Group] = []
        self._ready: list[Group] = []

    def poll(self, source: GroupReader) -> list[Group]:
        """Return the groups that are ready, oldest first."""
        whole = source.ready()
        with self._ledger.database.reading() as connection:
            changes = self._ledger.database.changes(connection)
            if self._changes == changes and whole is self._whole:
                return self._ready
            if self._changes and self._changes[1] != changes[1]:
                source.rescan()
                whole, self._changes, self._asked = source.ready(), None, set()
            keys = {(group.mode, group.group_id) for group in whole}
            done = self._ask(connection, source.build_spec, keys, changes)
        if done:
            source.release(group for group in whole if (group.mode, group.group_id) in done)
        self._changes, self._whole, self._asked = changes, whole, keys - done
        unavailable = done | self._leased
        self._ready = [group for group in whole if (group.mode, group.group_id) not in unavailable]
        return self._ready

    def _ask(self, connection: sa.Connection, build_spec: str, keys: set[Key], changes: tuple[int, int]) -> set[Key]:
        """Return those of the groups that are done, and note those that are leased."""
        new = sorted(keys - self._asked)
        if self._changes is None or len(new) > _FEW:
            finished = self._finished(connection, build_spec, None, None)
            done, self._leased = finished.done, finished.leased
        else:
            done = set[Key]()
            if self._changes != changes:
                finished = self._finished(connection, build_spec, self._newest, None)
                done, self._leased = finished.done, finished.leased
            for start in range(0, len(new), _KEYS_A_STATEMENT):
                finished = self._finished(connection, build_spec, None, new[start : start + _KEYS_A_STATEMENT])
                done |= finished.done
                self._leased |= finished.leased
        self._newest = oldest_open(connection, self._settings.policy, self._settings.branch)
        return done & keys

    def _finished(self, connection: sa.Connection, build_spec: str, since: int | None, keys: Sequence[Key] | None) -> _Finished:
        """Read which groups may not be taken: all, those of versions from `since` on, or those of some keys, and few others."""
        run, branch = self._settings.run_id, {"policy": self._settings.policy, "branch": self._settings.branch}
        leases = set(connection.execute(sa.select(LEASES.c.batch_id).where(*equal_to(LEASES, branch))).scalars())
        done, leased = set[Key](), set[Key]()
        for table in self._tables:
            under_way = table.c.batch_id.in_(leases)
            query = sa.select(table.c.mode, table.c.group_id, under_way).where(table.c.run_id == run)
            if since is None:
                query = query.where(*equal_to(table, branch), _named(table, keys))
            else:
                query = query.select_from(by_version(table)).where(*equal_to(VERSIONS, branch), VERSIONS.c.version >= since)
            for mode, group, is_leased in connection.execute(query.distinct()):
                (leased if is_leased else done).add((str(mode), str(group)))
        recent = SKIPPED.c.version >= since if since is not None else sa.true()
        query = sa.select(SKIPPED.c.mode, SKIPPED.c.group_id).where(
            *equal_to(SKIPPED, branch), SKIPPED.c.run_id == run, SKIPPED.c.build_spec == build_spec, _named(SKIPPED, keys), recent
        )
        done |= {(str(mode), str(group)) for mode, group in connection.execute(query)}
        return _Finished(done, leased)


def _named(table: sa.Table, keys: Sequence[Key] | None) -> sa.ColumnElement[bool]:
    """Return the condition that a row is of a mode and an id of some keys. None: of any."""
    if keys is None:
        return sa.true()
    return sa.and_(table.c.mode.in_({mode for mode, _ in keys}), table.c.group_id.in_([group for _, group in keys]))
