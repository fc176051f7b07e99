"""Demand of the trainer: the total number of groups of rollouts that it needs of its run, reported to the queue.

Invariant: the level is a pure function of what is consumed and what is ready, and the queue keeps the largest, so that a crash anywhere
leaves it right. A queue that does not answer delays nothing.

Each group that is trained, or skipped (stale, or with nothing to learn from: DAPO's filter), is replaced by a new one. The demand in
flight is the number of groups that the steps within the staleness bound can use; those of them that are not ready yet are multiplied by
what the filter leaves of them, so that as many as are needed will pass it. The number of whole groups is reported too: rollouts beyond the
demand could not be used in time. A group that was cancelled is counted by neither.
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
from trainer.ledger.tables import BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS, SKIPPED, VERSIONS, equal_to
from trainer.ledger.working_branch import WorkingBranch
from trainer.retries import Outage

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 30.0
"""Interval at which an unchanged demand is sent again, in seconds, for a queue that has lost it."""
_MOST_AHEAD = 3
"""Largest number of groups that are demanded for each one that is missing, since the filter leaves a part of them."""
REQUEST_SECONDS = 5.0
"""Back-off after a failed request to the queue, in seconds."""


@dataclass(frozen=True, slots=True)
class ConsumedGroups:
    """Groups of mode train of the run that the branch has trained or skipped."""

    steps: int
    """Number of versions that the branch has committed, of any run."""
    trained: int
    """Number of groups of the run in their batches, or of which a run over files trained a rollout."""
    skipped: Mapping[SkipReason, int]
    """Number of other groups that are skipped, by reason; cancelled ones included."""

    @property
    def filtered(self) -> int:
        """Return the number of skipped groups without those that came too late or were cancelled."""
        return sum(count for reason, count in self.skipped.items() if reason not in {SkipReason.CANCELLED, SkipReason.STALE})

    @property
    def filtered_share(self) -> float:
        """Return the share of filtered groups among those that were trained or filtered."""
        return self.filtered / max(self.trained + self.filtered, 1)

    @property
    def groups(self) -> int:
        """Return the number of groups without the cancelled ones, which the queue does not count as enqueued."""
        return self.trained + sum(count for reason, count in self.skipped.items() if reason is not SkipReason.CANCELLED)


def usable(settings: TrainerSettings, steps: int) -> int:
    """Return the groups that steps can use beyond those that are consumed: a batch for each version within the staleness bound.

    Args:
        settings: groups_per_batch, max_staleness, max_steps.
        steps: number of steps that the branch has made.
    """
    batches = settings.sampling.max_staleness + 1
    if settings.max_steps:
        batches = min(batches, max(settings.max_steps - steps, 0))
    return batches * settings.sampling.groups_per_batch


def in_flight(settings: TrainerSettings, consumed: ConsumedGroups, ready: int = 0) -> int:
    """Return the groups needed beyond those that are consumed: ready ones, and others, of which the filter will leave what is missing.

    The share that it leaves is (t + F) / (t + s + F) after t trained and s filtered groups, F being the usable ones, and 1/3 at least.

    Args:
        settings: groups_per_batch, max_staleness, max_steps.
        consumed: groups that the branch has trained or skipped.
        ready: groups that are whole, sound, and not consumed yet.
    """
    needed = usable(settings, consumed.steps)
    missing = max(needed - ready, 0)
    passed = consumed.trained + needed
    return needed - missing + min(-(-missing * (passed + consumed.filtered) // max(passed, 1)), _MOST_AHEAD * missing)


def groups_wanted(consumed: ConsumedGroups, settings: TrainerSettings, ready: int = 0) -> int:
    """Return the groups of mode train that the branch needs of the run since its beginning: consumed ones and those in flight."""
    return consumed.groups + in_flight(settings, consumed, ready)


def demand(consumed: ConsumedGroups, settings: TrainerSettings, lineage: Sequence[int], ready: int = 0) -> Demand:
    """Return the demand that is reported to the queue.

    Args:
        consumed: groups that the branch has trained or skipped.
        settings: of the trainer.
        lineage: the versions that led to the one about to be trained, which is last.
        ready: groups that are whole, sound, and not consumed yet, those of the step under way included.
    """
    oldest = lineage[-1 - settings.sampling.max_staleness :][0]
    level = groups_wanted(consumed, settings, ready)
    return Demand(settings.policy, settings.branch, level, oldest, min(consumed.groups + ready, level))


def consumed_groups(ledger: Ledger, settings: TrainerSettings, build_spec: str, pending: str | None = None) -> ConsumedGroups:
    """Read the consumed groups from the ledger; groups that another specification skipped may still be trained by this one.

    Args:
        ledger: of the branch.
        settings: of the trainer.
        build_spec: of the groups.
        pending: id of a leased batch that counts as a committed one. None: no leased batch counts.
    """
    branch, run = {"policy": settings.policy, "branch": settings.branch}, {"run_id": settings.run_id, "mode": Mode.TRAIN.value}

    committed = sa.select(VERSIONS.c.batch_id).where(
        *equal_to(VERSIONS, branch),
        sa.or_(VERSIONS.c.status == VersionStatus.COMMITTED, VERSIONS.c.batch_id == (pending or "")),
        VERSIONS.c.batch_id.is_not(None),
    )
    tables = (BATCH_ROLLOUTS,) if settings.sampling.retrain_finetuned else (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS)
    groups = sa.union(
        *(sa.select(table.c.group_id).where(*equal_to(table, {**branch, **run}), table.c.batch_id.in_(committed)) for table in tables)
    )
    skipped = (
        sa.select(SKIPPED.c.reason, sa.func.count())
        .where(*equal_to(SKIPPED, {**branch, **run, "build_spec": build_spec}), SKIPPED.c.group_id.not_in(groups))
        .group_by(SKIPPED.c.reason)
    )

    def read(connection: sa.Connection) -> ConsumedGroups:
        return ConsumedGroups(
            connection.execute(sa.select(sa.func.count()).select_from(committed.subquery())).scalar_one(),
            connection.execute(sa.select(sa.func.count()).select_from(groups.subquery())).scalar_one(),
            Counter({SkipReason(reason): count for reason, count in connection.execute(skipped)}),
        )

    key = ("consumed", settings.policy, settings.branch, settings.run_id, build_spec, settings.sampling.retrain_finetuned)
    return ledger.database.remembered(key, read, pending)


class DemandReporter:
    """Reports the trainer's demand to the queue, when it changes and every `REPEAT_SECONDS`."""

    def __init__(self, settings: Settings, branch: WorkingBranch, build_spec: str) -> None:
        """Prepare for the trainer's branch; nothing is reported yet."""
        self._settings = settings
        self._branch = branch
        self._build_spec = build_spec
        self._reported: Demand | None = None
        self._quiet_until = 0.0
        self._outage = Outage("the queue")

    def call(self, ready: int = 0) -> None:
        """Report the demand if the queue does not know it; an outage of the queue is logged once, and the report repeated later.

        Args:
            ready: groups that are whole, sound, and not consumed yet, those of the step under way included.
        """
        trainer = self._settings.trainer
        if self._settings.queue.url is None or Mode.TRAIN not in trainer.modes:
            return
        early = time.monotonic() < self._quiet_until
        if early and self._outage.is_under_way:
            return
        now = demand(self._consumed(), trainer, self._branch.lineage(), ready)
        if early and now == self._reported:
            return
        try:
            there = state(self._settings.queue, trainer.run_id, now)
        except QueueError as error:
            self._outage.failed(error)
            self._quiet_until = time.monotonic() + REQUEST_SECONDS
            return
        self._outage.over()
        if now.groups > (self._reported.groups if self._reported else 0):
            logger.info("%d groups of run %s are wanted in all, %d are enqueued", now.groups, trainer.run_id, there.enqueued)
        self._reported, self._quiet_until = now, time.monotonic() + REPEAT_SECONDS

    def figures(self, ready: int) -> dict[str, float]:
        """Return metrics: number of groups needed in all, number of skipped groups of the run, and share of those that were filtered.

        Args:
            ready: as for `demand`.
        """
        consumed = self._consumed()
        return {
            "groups_wanted": float(groups_wanted(consumed, self._settings.trainer, ready)),
            "groups_skipped": float(sum(consumed.skipped.values())),
            "filtered_share": consumed.filtered_share,
        }

    def _consumed(self) -> ConsumedGroups:
        return consumed_groups(self._branch.ledger, self._settings.trainer, self._build_spec, self._branch.pending_batch)
