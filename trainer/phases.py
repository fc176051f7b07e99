"""Phases of policies that are trained together: each rolls out by one version, and all are updated before the next rollouts.

In: the ledger that the policies share. Out: whether the head may be served, and whether rollouts of its phase may be trained. Invariant: a
version is served once every policy has made as many steps of the run, and a group is trained whose calls the versions of one phase
answered, of each policy one.

A phase's number is the number of steps that a policy's branch has made of the run: the commit of a version is the record of the update, and
a row of `phases` the record that it is served. Whatever is killed between two of these reads both at its next start.

Source: OpenTinker (https://arxiv.org/abs/2601.07376), the coordinator's barriers between rollout and update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import polars as pl
import sqlalchemy as sa

from spangrad.database import insert_new
from spangrad.errors import SettingsError
from spangrad.settings import TrainerSettings
from trainer.data.source import GROUP_COLUMNS, Group, Loaded
from trainer.data.token_versions import versions_of_calls
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import Skip, SkipReason
from trainer.ledger.tables import PHASES, VERSIONS, equal_to, ledger_location

logger = logging.getLogger(__name__)


class Phases:
    """Phases of one trainer's policy and of those that it is trained with."""

    def __init__(self, ledger: Ledger, settings: TrainerSettings) -> None:
        """Open the ledgers of the other policies (trainer.phase_policies), in the same database."""
        location = ledger_location(settings)
        self._run, self._branch, self._policy = settings.run_id, settings.branch, settings.policy
        self._others = {policy: Ledger(location, policy, settings.branch) for policy in settings.phase_policies}
        for other in self._others.values():
            other.database.retries = ledger.database.retries
        self._ledgers = {settings.policy: ledger, **self._others}
        self._awaited = ""
        """Log line of what this trainer waits for. Empty: it waits for nothing."""

    def close(self) -> None:
        """Close the other policies' ledgers."""
        for ledger in self._others.values():
            ledger.close()

    @property
    def number(self) -> int:
        """Number of the phase whose rollouts this policy trains next, from 0."""
        return max(len(self._played(self._policy)) - 1, 0)

    def versions(self) -> dict[str, int]:
        """Return the version of each other policy that plays this policy's phase; those that are not updated yet are left out."""
        number = self.number
        return {policy: played[number] for policy in self._others if len(played := self._played(policy)) > number}

    def is_updated(self) -> bool:
        """Return whether every other policy has made as many steps as this one, so that this policy's head may be served."""
        return not self._others or len(self.versions()) == len(self._others)

    def has_entered(self) -> bool:
        """Return whether this policy's head is recorded as served, or it is trained without phases."""
        return not self._others or self._entered(self._policy, self._played(self._policy)[-1])

    def advance(self, publish: Callable[[], None] | None) -> bool:
        """Have the head served once every policy is updated, unless that was done; log each wait for another policy once.

        Args:
            publish: publishes the head, and calls `enter` once it is served. None: versions are not published.

        Returns:
            True: the phase is open: the versions of all policies that play it are recorded as served.
        """
        if not self.has_entered() and self.is_updated():
            (publish or self.enter)()
        missing = self.awaited()
        is_open = not missing and self.has_entered()
        text = f"phase {self.number} begins once {', '.join(missing)} is updated and served" if missing else ""
        if text not in {"", self._awaited}:
            logger.info("%s", text)
        self._awaited = text
        return is_open

    def awaited(self) -> list[str]:
        """Return the other policies whose version that plays this policy's phase is not recorded as served."""
        versions = self.versions() if self._others else {}
        return [policy for policy in self._others if policy not in versions or not self._entered(policy, versions[policy])]

    def figures(self) -> dict[str, float]:
        """Return metrics: number of the phase; nothing without phases."""
        return {"phase": float(self.number)} if self._others else {}

    def enter(self, version: int | None = None) -> None:
        """Record that a version of this policy, by default the head, is served; idempotent."""
        if not self._others:
            return
        played = self._played(self._policy)
        served = played[-1] if version is None else version
        if served not in played:
            return  # it was rolled back meanwhile
        row = {**self._key(self._policy), "version": served, "phase": played.index(served)}
        with self._ledgers[self._policy].database.transaction() as transaction:
            insert_new(transaction, PHASES, [row])

    def skips(self, groups: Sequence[Group], loaded: Loaded) -> dict[Group, Skip]:
        """Return the groups with a call of another policy whose version does not play this policy's phase."""
        if not self._others:
            return {}
        return of_other_phases(groups, loaded, self.versions(), self.number)

    def _key(self, policy: str) -> dict[str, object]:
        return {"policy": policy, "branch": self._branch, "run_id": self._run}

    def _played(self, policy: str) -> list[int]:
        """Return the versions of a policy that have played, or play next: the run's first, and one for each step of the run.

        Empty: the policy has no version yet.
        """
        ledger, key = self._ledgers[policy], self._key(policy)

        def read(connection: sa.Connection) -> frozenset[int]:
            steps = sa.select(VERSIONS.c.version).where(*equal_to(VERSIONS, key), VERSIONS.c.batch_id.is_not(None))
            return frozenset(connection.execute(steps).scalars())

        lineage = ledger.lineage()  # read first: no version of it is missing among the steps
        steps = ledger.database.remembered(("phase steps", policy, self._run), read)
        first = next((place for place, version in enumerate(lineage) if version in steps), len(lineage))
        return lineage[max(first - 1, 0) :]

    def _entered(self, policy: str, version: int) -> bool:
        ledger, key = self._ledgers[policy], {**self._key(policy), "version": version}

        def read(connection: sa.Connection) -> bool:
            return connection.execute(sa.select(PHASES.c.phase).where(*equal_to(PHASES, key))).first() is not None

        return ledger.database.remembered(("phase entered", policy, self._run), read, version)


def of_other_phases(groups: Sequence[Group], loaded: Loaded, versions: Mapping[str, int], number: int) -> dict[Group, Skip]:
    """Return the groups with a call that another version answered than its policy's in `versions`, which plays phase `number`.

    Groups are loaded; a skip names the policy and the versions of the first such call.
    """
    calls = loaded.transitions.select(*GROUP_COLUMNS, "Policy", Version=versions_of_calls()).filter(pl.col("Policy").is_in(list(versions)))
    rows = calls.explode("Version").unique(maintain_order=True).iter_rows(named=True)
    skips: dict[Group, Skip] = {}
    for row in rows:
        policy, version = row["Policy"], row["Version"]
        if version != versions[policy]:
            detail = f"version {version} of {policy} answered in it, and version {versions[policy]} plays phase {number}."
            skips.setdefault(Group(*(row[name] for name in GROUP_COLUMNS)), Skip(SkipReason.OTHER_PHASE, detail))
    return {group: skips[group] for group in groups if group in skips}


def check(settings: TrainerSettings) -> None:
    """Refuse settings with which phases have no meaning.

    Raises:
        SettingsError: naming the setting, and what to set instead.
    """
    if not settings.phase_policies:
        return
    if settings.policy in settings.phase_policies:
        raise SettingsError(
            f"trainer.phase_policies has {settings.policy!r}, the policy that is trained (trainer.policy). Name the other policies alone."
        )
    if settings.sampling.max_staleness:
        raise SettingsError(
            f"trainer.sampling.max_staleness = {settings.sampling.max_staleness}, and in phases every call is of one version "
            "(trainer.phase_policies). Set it to 0."
        )
    if settings.evaluation.every and settings.evaluation.command:
        raise SettingsError(
            "trainer.evaluation.command measures a version from its step on, and in phases it is served once the other policies are "
            "updated (trainer.phase_policies). Set trainer.evaluation.every to 0, and run the held-out tasks beside."
        )
    if settings.checkpoint.after_crash == "orphan" and (settings.checkpoint.every > 1 or settings.checkpoint.minutes is not None):
        raise SettingsError(
            "trainer.checkpoint.after_crash = 'orphan' takes a policy back alone, and the others of its phases go on "
            "(trainer.phase_policies). Set it to 'replay'."
        )
