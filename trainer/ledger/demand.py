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
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from msgspec.structs import replace

from spangrad.client.queue_http import state_demand
from spangrad.errors import LedgerError, QueueError
from spangrad.http.queue_messages import DemandRequest, DemandState
from spangrad.http.service import without_userinfo
from spangrad.settings import Settings, TrainerSettings
from spangrad.types import Mode, VersionStatus
from trainer.ledger.batch_rollouts import by_version, oldest_open
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
    """Return the number of groups usable beyond consumed ones after so many steps: a batch a version within the staleness bound."""
    batches = settings.sampling.max_staleness + 1
    if settings.max_steps:
        batches = min(batches, max(settings.max_steps - steps, 0))
    return batches * settings.sampling.groups_per_batch


def in_flight(settings: TrainerSettings, consumed: ConsumedGroups, ready: int = 0) -> int:
    """Return the number of groups needed beyond consumed ones: ready ones, and others, of which the filter will leave what is missing.

    The share that it leaves is (t + F) / (t + s + F) after t trained and s filtered groups, F being the usable ones, and 1/3 at least.

    Ready groups are whole, sound, and not consumed yet, those of the step under way included.
    """
    needed = usable(settings, consumed.steps)
    missing = max(needed - ready, 0)
    passed = consumed.trained + needed
    return needed - missing + min(-(-missing * (passed + consumed.filtered) // max(passed, 1)), _MOST_AHEAD * missing)


def groups_wanted(consumed: ConsumedGroups, settings: TrainerSettings, ready: int = 0) -> int:
    """Return the groups of mode train that the branch needs of the run since its beginning: consumed ones and those in flight."""
    return consumed.groups + in_flight(settings, consumed, ready)


def demand(consumed: ConsumedGroups, settings: TrainerSettings, lineage: Sequence[int], ready: int = 0) -> DemandRequest:
    """Return the demand that is reported to the queue; the version about to be trained is the last of the lineage."""
    oldest = lineage[-1 - settings.sampling.max_staleness :][0]
    level = groups_wanted(consumed, settings, ready)
    filled = min(consumed.groups + ready, level)
    return DemandRequest(policy=settings.policy, branch=settings.branch, groups=level, oldest_version=oldest, filled=filled)


class Consumption:
    """Reader of the consumed groups, which reads history once, and after that the versions that may have changed.

    Groups that another specification skipped may still be trained by this one. Invariant: `read` returns what a new reader's does. Versions
    before the oldest open one are final, and a group's skip names the newest version of its time, unless the ledger says that groups were
    freed: then history is read again.
    """

    def __init__(self, ledger: Ledger, settings: TrainerSettings, build_spec: str) -> None:
        """Read nothing yet."""
        self._ledger = ledger
        self._build_spec = build_spec
        self._branch = {"policy": settings.policy, "branch": settings.branch}
        self._run = {"run_id": settings.run_id, "mode": Mode.TRAIN.value}
        self._tables = (BATCH_ROLLOUTS,) if settings.sampling.retrain_finetuned else (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS)
        self._lock = threading.Lock()
        self._forget(None)

    def _forget(self, freed: int | None) -> None:
        self._freed = freed
        """The ledger's newest transaction that freed groups, when it was read last. None: it was not read yet."""
        self._since = 0
        """Oldest version that may have changed since."""
        self._steps = 0
        """Number of committed versions before `_since` that batches made."""
        self._trained = set[str]()
        """Groups of those."""
        self._skipped = dict[str, SkipReason]()
        """Other groups that were skipped before `_since`."""
        self._reasons = Counter[SkipReason]()

    def read(self, pending: str | None = None) -> ConsumedGroups:
        """Return the consumed groups; a leased batch counts as a committed one where its id is `pending`, and no other."""
        with self._lock:
            return self._ledger.database.remembered(self, lambda connection: self._read(connection, pending), pending)

    def _read(self, connection: sa.Connection, pending: str | None) -> ConsumedGroups:
        freed, until = self._ledger.database.changes(connection)[1], oldest_open(connection, **self._branch)
        if freed != self._freed:
            self._forget(freed)
        steps, trained = self._read_trained(connection, pending)
        skipped = self._read_skipped(connection)
        reasons = self._reasons.copy()
        for group in trained.keys() & self._skipped.keys():
            reasons[self._skipped[group]] -= 1
        for group, (reason, _) in skipped.items():
            reasons[reason] += group not in trained and group not in self._trained and group not in self._skipped
        new = sum(group not in self._trained for group in trained)
        known = ConsumedGroups(self._steps + len(steps), len(self._trained) + new, +reasons)
        self._close(until, steps, trained, skipped)
        return known

    def _close(self, until: int, steps: Sequence[int], trained: Mapping[str, int], skipped: Mapping[str, tuple[SkipReason, int]]) -> None:
        """Keep what was read of the versions before `until`, which are final, for good."""
        self._steps += sum(version < until for version in steps)
        for group, version in trained.items():
            if version < until:
                self._trained.add(group)
                if reason := self._skipped.pop(group, None):
                    self._reasons[reason] -= 1
        for group, (reason, version) in skipped.items():
            if version < until and group not in self._trained and group not in self._skipped:
                self._skipped[group] = reason
                self._reasons[reason] += 1
        self._since = until

    def _read_trained(self, connection: sa.Connection, pending: str | None) -> tuple[list[int], dict[str, int]]:
        """Return the versions from `_since` on that are committed or pending, and the groups that they trained, with the oldest of each."""
        branch, counted = (
            equal_to(VERSIONS, self._branch),
            sa.or_(VERSIONS.c.status == VersionStatus.COMMITTED, VERSIONS.c.batch_id == (pending or "")),
        )
        steps = sa.select(VERSIONS.c.version).where(*branch, VERSIONS.c.version >= self._since, counted, VERSIONS.c.batch_id.is_not(None))
        trained: dict[str, int] = {}
        for table in self._tables:
            query = sa.select(table.c.group_id, VERSIONS.c.version).select_from(by_version(table)).distinct()
            recent = query.where(*branch, VERSIONS.c.version >= self._since, counted, *equal_to(table, self._run))
            for group, version in connection.execute(recent):
                trained[group] = min(version, trained.get(group, version))
        return [*connection.execute(steps).scalars()], trained

    def _read_skipped(self, connection: sa.Connection) -> dict[str, tuple[SkipReason, int]]:
        """Return the groups that were skipped since `_since`, with the reason and the newest version of that time."""
        facts = {**self._branch, **self._run, "build_spec": self._build_spec}
        query = sa.select(SKIPPED.c.group_id, SKIPPED.c.reason, SKIPPED.c.version).where(
            *equal_to(SKIPPED, facts), SKIPPED.c.version >= self._since
        )
        return {group: (SkipReason(reason), version) for group, reason, version in connection.execute(query)}


class DemandReporter:
    """Reports the trainer's demand to the queue, when it changes and every `REPEAT_SECONDS`."""

    def __init__(self, settings: Settings, branch: WorkingBranch, build_spec: str) -> None:
        """Prepare for the trainer's branch; nothing is reported yet."""
        self._settings = settings
        self._branch = branch
        self._consumption = Consumption(branch.ledger, settings.trainer, build_spec)
        self._reported: DemandRequest | None = None
        self._quiet_until = 0.0
        self._outage = Outage("the queue")

    def call(self, ready: int = 0) -> None:
        """Report the demand if the queue does not know it; an outage of the queue is logged once, and the report repeated later.

        Ready groups are those of `in_flight`.

        Raises:
            LedgerError: the queue keeps the demand of another ledger for this branch.
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
            there = self._send(now)
        except QueueError as error:
            self._outage.failed(error)
            self._quiet_until = time.monotonic() + REQUEST_SECONDS
            return
        self._outage.over()
        if now.groups > (self._reported.groups if self._reported else 0):
            logger.info("%d groups of run %s are wanted in all, %d are enqueued", now.groups, trainer.run_id, there.enqueued)
        self._reported, self._quiet_until = now, time.monotonic() + REPEAT_SECONDS

    def _send(self, now: DemandRequest) -> DemandState:
        """Send a demand and return the queue's state; where it keeps a larger one, as after a rollback, send this one with its groups."""
        queue, run = self._settings.queue, self._settings.trainer.run_id
        there = state_demand(queue, run, now)
        recorded = next((branch for branch in there.branches if (branch.policy, branch.branch) == (now.policy, now.branch)), now)
        if recorded.groups > now.groups:
            self._require_own(recorded, now)
            if recorded.oldest_version != now.oldest_version:
                there = state_demand(queue, run, replace(now, groups=recorded.groups))
        return there

    def _require_own(self, recorded: DemandRequest, now: DemandRequest) -> None:
        """Raise if the demand that the queue keeps instead of this one is that of another ledger, whose groups this one never gets."""
        trainer, queue = self._settings.trainer, without_userinfo(str(self._settings.queue.url))
        of_queue = f"the queue at {queue} keeps a demand of branch {now.branch} of policy {now.policy} in run {trainer.run_id}"
        remedy = (
            "If another ledger trained there (it was deleted, or trainer.directory is another one), choose another trainer.run_id and "
            "runner.run_id, or another queue.db."
        )
        newest, consumed = max(self._branch.ledger.statuses(), default=0), self._consumed()
        if (recorded.oldest_version or 0) > newest:
            raise LedgerError(f"{of_queue} for version {recorded.oldest_version}, and this ledger ends at version {newest}. {remedy}")
        if not (consumed.groups or consumed.steps or self._reported):
            need = f"for {recorded.groups} groups, and this ledger needs {now.groups} and has consumed none"
            logger.warning("%s %s. %s", of_queue, need, remedy)

    def figures(self, ready: int) -> dict[str, float]:
        """Return metrics: number of groups needed in all, number of skipped groups of the run, and share of those that were filtered."""
        consumed = self._consumed()
        return {
            "groups_wanted": float(groups_wanted(consumed, self._settings.trainer, ready)),
            "groups_skipped": float(sum(consumed.skipped.values())),
            "filtered_share": consumed.filtered_share,
        }

    def _consumed(self) -> ConsumedGroups:
        return self._consumption.read(self._branch.pending_batch)
