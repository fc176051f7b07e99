"""Commits of trained versions: each is leased before its weights change, and written and committed beside the next step.

In: what a step trained. Out: committed versions. Invariant: a version is leased once the one before it is committed, so that a branch has
one lease, and no weights change while those of the version before are pending. A version that cannot be written or committed is undone, and
ends the run; so is one whose write does not end in time once the process is asked to stop.

Weights and moments change in an update alone, and all that a step does before its first one (credit, checks, forward and backward passes)
leaves them as the last step made them. Hence a step may begin while the last version is pending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spangrad.errors import LedgerError
from trainer.data.source import BatchRollout
from trainer.ledger.ledger import BatchLease
from trainer.ledger.tables import LedgerVersion
from trainer.monitor.watching import Clock, CommittedStep, StepStage, stage_seconds, timed
from trainer.overlap import FollowUps
from trainer.publish.checkpoint import Save
from trainer.shutdown import Stopped
from trainer.step import StepTransaction, beating

if TYPE_CHECKING:
    import polars as pl

_STOP_SECONDS = 10.0
"""Longest wait for a pending version once the process is asked to stop, in seconds."""


class HeadMovedError(LedgerError):
    """Another trainer makes a step of the branch, or the branch has another head by now: this step is not leased."""


@dataclass(frozen=True, slots=True)
class UncommittedVersion:
    """Version whose weights are in memory, leased and not committed."""

    lease: BatchLease
    version: LedgerVersion
    """The version, without the path and the checksum of its checkpoint, which is not written yet (`WorkingBranch.leased`)."""
    rollouts: Sequence[BatchRollout]
    calls: pl.DataFrame
    """Calls that the step trained, with their advantages."""
    write: Save
    """Writes weights and state into a directory."""
    stages: list[StepStage]
    beats: ExitStack
    """Renews the lease until it is closed."""


@dataclass(slots=True)
class StepLease:
    """Lease of one step; nothing is leased at first."""

    commits: Commits
    rollouts: Sequence[BatchRollout]
    parent: LedgerVersion
    _lease: BatchLease | None = None
    _beats: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def begun(self) -> Generator[None]:
        """Take the lease, unless the version before is pending: then `take` does. It is renewed until the block ends, or it is handed on.

        Raises:
            HeadMovedError: another trainer was faster.
            AlreadyTrainedError: a rollout is in another batch.
        """
        with self._beats:
            if self.commits.transaction.branch.pending is None:
                self._take()
            yield

    def take(self) -> None:
        """Wait until the version before is committed, and take the lease if that was not done, else make sure that it still holds.

        Raises:
            SpangradError: the version before could not be written or committed.
            HeadMovedError: another trainer was faster.
            AlreadyTrainedError: a rollout is in another batch.
        """
        with self.commits.clock.stage("settle"):
            self.commits.settle()
        if self._lease is None:
            self._take()
        elif not self.commits.transaction.branch.ledger.renew(self._lease):
            raise HeadMovedError(f"the lease of version {self._lease.version} was undone: branch {self.parent.branch} was rolled back.")

    def hand_on(self) -> tuple[BatchLease, ExitStack]:
        """Return the lease, which is taken, and what renews it until it is closed."""
        assert self._lease
        return self._lease, self._beats.pop_all()

    def _take(self) -> None:
        transaction = self.commits.transaction
        with self.commits.clock.stage("lease"):
            self._lease = transaction.begin(self.rollouts, self.parent)
        if self._lease is None:
            raise HeadMovedError(f"branch {self.parent.branch} has a head other than version {self.parent.version}, or is about to.")
        self._beats.enter_context(beating(transaction.branch.ledger, self._lease))


class Commits:
    """Commits of one trainer, one at a time."""

    def __init__(self, transaction: StepTransaction, follow_ups: FollowUps, clock: Clock, *, beside: bool) -> None:
        """Commit nothing yet; with `beside` the follow-ups commit each version beside the next step, else its own step does."""
        self.transaction = transaction
        self.clock = clock
        self._follow_ups = follow_ups
        self._beside = beside
        self._failed: BaseException | None = None

    def submit(self, trained: UncommittedVersion) -> Callable[[], CommittedStep]:
        """Write and commit a version.

        Returns:
            Function that returns the committed step, for what is submitted to the follow-ups next.

        Raises:
            SpangradError: it could not be written or committed; where that is done beside the next step, `settle` raises it.
        """
        steps: list[CommittedStep] = []
        if self._beside:
            with self.transaction.shutdown.shielded():
                self.transaction.branch.pending = trained.version
                self._follow_ups.submit(lambda: steps.append(self._commit_pending(trained)), always=True)
        else:
            steps.append(self._commit(trained))
        return lambda: steps[0]

    def settle(self, *, seconds: float = math.inf) -> None:
        """Wait until no version is pending.

        Raises:
            SpangradError: it could not be written or committed; it is undone.
        """
        branch = self.transaction.branch
        self._follow_ups.settle(lambda: branch.pending is None or self._failed is not None, seconds=seconds)
        if self._failed:
            raise self._failed

    @contextmanager
    def settled(self) -> Generator[None]:
        """Let no version be pending when the block ends, whichever way: after an error it is committed, or undone where that fails too.

        When the process is asked to stop, it has `_STOP_SECONDS` to be written; then it is undone.
        """
        try:
            yield
        except BaseException as error:
            self.transaction.shutdown.end()
            self._end(_STOP_SECONDS if isinstance(error, Stopped) else math.inf)
            raise
        self.settle()

    def _end(self, seconds: float) -> None:
        try:
            self.settle(seconds=seconds)
        except BaseException:  # the first error is raised, and the thread has undone its lease
            return
        if self.transaction.branch.pending:
            self.transaction.undo(pending=True)
            self.transaction.branch.pending = None

    def _commit_pending(self, trained: UncommittedVersion) -> CommittedStep:
        try:
            committed = self._commit(trained)
        except BaseException as error:
            self.transaction.undo(pending=True)
            self._failed = error  # the version stays pending: this process holds its weights, and must lease nothing from them
            raise
        self.transaction.branch.pending = None
        return committed

    def _commit(self, trained: UncommittedVersion) -> CommittedStep:
        lease, ledger = trained.lease, self.transaction.branch.ledger
        parent = ledger.version(lease.parent)
        with trained.beats, timed(trained.stages, "checkpoint", beside=self._beside):
            written = self.transaction.write(lease, parent, trained.write, calls=trained.calls)
        metrics = {**trained.version.metrics, **stage_seconds(trained.stages)}
        committed = self.transaction.commit(lease, written, metrics)
        return CommittedStep(len(ledger.committed_versions()) - 1, committed, trained.rollouts, trained.stages)
