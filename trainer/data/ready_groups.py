"""Groups that are ready to be trained: whole, and neither trained nor skipped.

Invariant: a poll costs what is new. The ledger is queried for groups that are new, and, when it has changed, for what was written since;
groups that are done are released by the source. When the user has restored groups, both are read again from the beginning.
"""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa

from spangrad.settings import TrainerSettings
from trainer.data.built_groups import Key
from trainer.data.source import Group, GroupReader
from trainer.ledger.batch_rollouts import finished, oldest_open
from trainer.ledger.ledger import Ledger

_KEYS_A_STATEMENT = 500
_FEW = 4000
"""Largest number of groups that are looked up by their ids; for more, the whole ledger is read at once."""


class ReadyGroups:
    """Groups of one branch that a batch may take."""

    def __init__(self, ledger: Ledger, settings: TrainerSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._changes: tuple[int, int] | None = None
        """Change counters of the ledger at the last query."""
        self._newest = 0
        """Oldest version whose groups and skips may be new at the next query of the ledger."""
        self._looked_up: set[Key] = set()
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
                whole, self._changes, self._looked_up = source.ready(), None, set()
            keys = {(group.mode, group.group_id) for group in whole}
            done = self._look_up(connection, source.build_spec, keys, changes)
        if done:
            source.release(group for group in whole if (group.mode, group.group_id) in done)
        self._changes, self._whole, self._looked_up = changes, whole, keys - done
        unavailable = done | self._leased
        self._ready = [group for group in whole if (group.mode, group.group_id) not in unavailable]
        return self._ready

    def _look_up(self, connection: sa.Connection, build_spec: str, keys: set[Key], changes: tuple[int, int]) -> set[Key]:
        """Return those of the groups that are done, and note those that are leased."""
        new, settings = sorted(keys - self._looked_up), self._settings
        branch, finetuned = {"policy": settings.policy, "branch": settings.branch}, not settings.sampling.retrain_finetuned
        read = partial(finished, connection, branch, settings.run_id, build_spec, finetuned=finetuned)
        if self._changes is None or len(new) > _FEW:
            done, self._leased = read()
        else:
            done = set[Key]()
            if self._changes != changes:
                done, self._leased = read(since=self._newest)
            for start in range(0, len(new), _KEYS_A_STATEMENT):
                also_done, also_leased = read(keys=new[start : start + _KEYS_A_STATEMENT])
                done |= also_done
                self._leased |= also_leased
        self._newest = oldest_open(connection, **branch)
        return done & keys
