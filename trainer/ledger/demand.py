"""How many groups of rollouts the trainer wants of its run, in all, and the word of it to the queue.

In: what the ledger has committed and skipped, the trainer's settings. Out: a `Demand`, which the queue is told whenever it changes.
Invariant: the level is a pure function of facts that only grow, so that under the same settings it never falls, and a crash anywhere
leaves it right. A queue that is away holds up nothing.

What is spent is asked for again: a group that was trained makes room for the next, and one that was skipped (stale, without anything to
learn from: DAPO's filter) is replaced. In flight are wanted as many as the steps within the staleness bound can use. When so many are
whole, the queue hears that, too: what else runs could not be used in time. A group that was cancelled is counted by neither.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from spangrad.client.demand import Demand, state
from spangrad.errors import QueueError
from spangrad.settings import Settings, TrainerSettings
from spangrad.types import Mode, VersionStatus
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import SkipReason
from trainer.ledger.tables import BATCH_ROLLOUTS, SKIPPED, TUNED_ROLLOUTS, VERSIONS
from trainer.outages import Outage

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 30.0
"""After which an unchanged demand is stated once more: a queue that lost it waits no longer."""
PATIENCE_SECONDS = 5.0
"""After which a queue that failed is asked again."""


@dataclass(frozen=True, slots=True)
class Spent:
    """The run's groups of mode train that the branch has no more use for."""

    steps: int
    """Versions that the branch has committed, of whichever run."""
    trained: int
    """Groups in their batches, or of which a run over files trained a rollout."""
    skipped: Mapping[SkipReason, int]
    """Other groups, by the reason; those that were cancelled too."""

    @property
    def groups(self) -> int:
        """All of them but those that were cancelled: the queue does not count them as enqueued."""
        return self.trained + sum(count for reason, count in self.skipped.items() if reason is not SkipReason.CANCELLED)


def in_flight(settings: TrainerSettings, steps: int) -> int:
    """How many groups are wanted beyond those that are spent: a batch for each version within the staleness bound, or for each step left.

    Args:
        settings: groups_per_batch, max_staleness, max_steps.
        steps: how many the branch has made.
    """
    batches = settings.max_staleness + 1
    if settings.max_steps:
        batches = min(batches, max(settings.max_steps - steps, 0))
    return batches * settings.groups_per_batch


def wanted(spent: Spent, settings: TrainerSettings) -> int:
    """How many groups of mode train the branch wants of the run, since its beginning: those that are spent, and those in flight."""
    return spent.groups + in_flight(settings, spent.steps)


def demand(spent: Spent, settings: TrainerSettings, lineage: Sequence[int], ready: int = 0) -> Demand:
    """What the queue is told.

    Args:
        spent: by the ledger.
        settings: of the trainer.
        lineage: the committed versions that led to the one about to be trained, which is last.
        ready: groups that are whole, and not spent yet, once a batch of them was taken.
    """
    oldest = lineage[-1 - settings.max_staleness :][0]
    level = wanted(spent, settings)
    return Demand(settings.policy, settings.branch, level, oldest, min(spent.groups + ready, level))


def spent(ledger: Ledger, settings: TrainerSettings, build_spec: str) -> Spent:
    """Read from the ledger what is spent; what another specification skipped may yet be trained by this one."""
    mine, run = {"policy": settings.policy, "branch": settings.branch}, {"run_id": settings.run_id, "mode": Mode.TRAIN.value}

    def of(table: sa.Table, facts: Mapping[str, str]) -> list[sa.ColumnElement[bool]]:
        return [table.c[name] == value for name, value in facts.items()]

    made = sa.select(VERSIONS.c.batch_id).where(
        *of(VERSIONS, mine), VERSIONS.c.status == VersionStatus.COMMITTED, VERSIONS.c.batch_id.is_not(None)
    )
    tables = (BATCH_ROLLOUTS,) if settings.retrain_tuned else (BATCH_ROLLOUTS, TUNED_ROLLOUTS)
    groups = sa.union(*(sa.select(one.c.group_id).where(*of(one, {**mine, **run}), one.c.batch_id.in_(made)) for one in tables))
    skipped = (
        sa.select(SKIPPED.c.reason, sa.func.count())
        .where(*of(SKIPPED, {**mine, **run, "build_spec": build_spec}), SKIPPED.c.group_id.not_in(groups))
        .group_by(SKIPPED.c.reason)
    )

    def read(connection: sa.Connection) -> Spent:
        return Spent(
            connection.execute(sa.select(sa.func.count()).select_from(made.subquery())).scalar_one(),
            connection.execute(sa.select(sa.func.count()).select_from(groups.subquery())).scalar_one(),
            Counter({SkipReason(reason): count for reason, count in connection.execute(skipped)}),
        )

    return ledger.database.remembered(
        ("spent", settings.policy, settings.branch, settings.run_id, build_spec, settings.retrain_tuned), read
    )


class Caller:
    """Tells the queue what the trainer wants, when that changes and now and then."""

    def __init__(self, settings: Settings, ledger: Ledger, build_spec: str) -> None:
        """Of the trainer's branch; nothing is told yet."""
        self._settings = settings
        self._ledger = ledger
        self._build_spec = build_spec
        self._told: Demand | None = None
        self._quiet_until = 0.0
        self._outage = Outage("the queue")

    def call(self, ready: int = 0) -> None:
        """Tell what is wanted now, if the queue does not know it; one that is away is told of once, and asked again later.

        Args:
            ready: groups that are whole, and not spent yet, once a batch of them was taken.
        """
        trainer = self._settings.trainer
        if self._settings.runner.queue_url is None or Mode.TRAIN not in trainer.modes:
            return
        early = time.monotonic() < self._quiet_until
        if early and self._outage.is_under_way:
            return
        now = demand(self._spent(), trainer, self._ledger.lineage(), ready)
        if early and now == self._told:
            return
        try:
            there = state(self._settings.runner, trainer.run_id, now)
        except QueueError as error:
            self._outage.failed(error)
            self._quiet_until = time.monotonic() + PATIENCE_SECONDS
            return
        self._outage.over()
        if now.groups > (self._told.groups if self._told else 0):
            logger.info("%d groups of run %s are wanted in all, %d are enqueued", now.groups, trainer.run_id, there.enqueued)
        self._told, self._quiet_until = now, time.monotonic() + AGAIN_SECONDS

    def figures(self) -> dict[str, float]:
        """Metrics: how many groups are wanted in all, and how many of the run are skipped."""
        gone = self._spent()
        return {"groups_wanted": float(wanted(gone, self._settings.trainer)), "groups_skipped": float(sum(gone.skipped.values()))}

    def _spent(self) -> Spent:
        return spent(self._ledger, self._settings.trainer, self._build_spec)
