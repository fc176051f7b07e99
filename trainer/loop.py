"""The trainer: ready groups -> lease -> credit -> step -> checkpoint -> commit -> mirror -> publish, as often as there are batches.

In: the settings; through them the span store, the model and the gateway. Out: policy versions. Invariant: at every instruction the
ledger knows enough to resume. A lease without a commit is undone, at once when this process fails or is asked to stop, else at the next
start; a commit that was not yet copied to the store, or published, is at the next start. Nothing is repeated, nothing skipped.

Where rollouts may be older than the newest version, all from the checkpoint on is done beside the next step (`trainer.commits`), up to its
first update. Until then the version is pending, and counts as the head (`WorkingBranch`).

A step trains the head of its branch. When another process moved it (another trainer of the branch, a rollback), its weights and its
optimizer state are loaded first; while another trainer's step is under way, this one waits.

A batch whose every advantage is 0 takes no optimizer step, yet commits a version with its parent's weights, so that its groups are used.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import BadRowsError
from spangrad.settings import Settings
from spangrad.types import Mode
from trainer.colocation import DeviceTurns
from trainer.commits import Commits, HeadMovedError, StepLease, UncommittedVersion
from trainer.credit.assignment import Normalise
from trainer.data.assemble import assemble, batch_groups, with_token_values
from trainer.data.batch import Batch
from trainer.data.batch_queue import BatchQueue
from trainer.data.source import GroupReader, Loaded
from trainer.ledger.batch_rollouts import AlreadyTrainedError
from trainer.ledger.demand import DemandReporter
from trainer.ledger.ledger import Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.optimizer_state import StateSchedule
from trainer.ledger.recovery import newest_version, prune
from trainer.ledger.tables import LedgerVersion
from trainer.ledger.working_branch import WorkingBranch
from trainer.monitor import alarms
from trainer.monitor.batch_metrics import batch_metrics
from trainer.monitor.batch_times import BatchTimes
from trainer.monitor.evaluate import Evaluation
from trainer.monitor.evaluation_command import EvaluationCommand
from trainer.monitor.view import LogLines
from trainer.monitor.watching import Clock, CommittedStep, Watchers, timed
from trainer.overlap import FollowUps, Lookahead
from trainer.phases import Phases
from trainer.publish.checkpoint import add_state
from trainer.publish.offers import WeightSource
from trainer.publish.publisher import Publisher
from trainer.publish.publishing import HeadPublisher
from trainer.retries import Outage
from trainer.shutdown import Shutdown
from trainer.step import StepTransaction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import polars as pl

    from trainer.optim.optimizer import VerlOptimizer

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
"""Interval at which an idle trainer checks the served version, in seconds."""


@dataclass
class Trainer:
    """Training loop with its parts."""

    settings: Settings
    ledger: Ledger
    source: GroupReader
    optimizer: VerlOptimizer | None
    """Optimizer with the weights of `loaded`. None: it is loaded at first use, so that a run with nothing to train imports no PyTorch."""
    normalise: Normalise
    mirror: Mirror
    publisher: Publisher | None
    """Publisher of versions. None: versions are not published."""
    shutdown: Shutdown
    loaded: LedgerVersion
    load_optimizer: Callable[[LedgerVersion], VerlOptimizer]
    """Function that returns an optimizer with a version's weights and state."""
    arrived: Callable[[float], bool] = lambda seconds: time.sleep(seconds) is None
    """Function that waits for new builds in the store, so many seconds at most, and returns whether there may be some."""
    evaluation: Evaluation | None = None
    """Evaluation on held-out rollouts. None: they are not read."""
    watchers: Watchers = field(default_factory=lambda: Watchers([LogLines()]))
    batch_times: BatchTimes = lambda _: {}
    """Function that returns the times of a step's rollouts, for its metrics."""
    clock: Clock = field(default_factory=Clock)
    store_outage: Outage = field(default_factory=lambda: Outage("the span store"))
    _checked_at: float = 0.0
    _builds_may_have_arrived: bool = True
    """True if builds may have arrived since held-out rollouts were read."""
    _head: LedgerVersion | None = None
    """Version that the last batch is to train. None: no batch was taken."""

    def __post_init__(self) -> None:
        self._main = threading.current_thread()
        self.branch = WorkingBranch(self.ledger)
        self.transaction = StepTransaction(self.settings, self.branch, self.shutdown)
        self.demand = DemandReporter(self.settings, self.branch, self.source.build_spec)
        self.phases = Phases(self.ledger, self.settings.trainer)
        self.publishing = self.publisher and HeadPublisher(
            self.publisher, self.ledger, self.settings, self.shutdown, self.phases, lambda: self.optimizer
        )
        self.batches = BatchQueue(self.settings.trainer, self.branch, self.clock, self._publish_again, self.phases.skips)
        self.lookahead = Lookahead(self._look, lambda: self.arrived(self.settings.trainer.poll_seconds))
        self.follow_ups = FollowUps()
        self.evaluation_command = EvaluationCommand(self.settings.trainer.evaluation)
        self.turns = DeviceTurns(self.publishing, self.settings, self.shutdown, lambda: self.optimizer, self.clock)
        self.commits = Commits(self.transaction, self.follow_ups, self.clock, beside=self._overlaps)
        self.state_schedule = StateSchedule(self.settings.trainer, self.ledger, self.loaded)

    def start(self) -> None:
        """Bring the store's copy and the gateway up to the ledger's newest commit."""
        self.mirror.catch_up()
        if self.publishing:
            self.publishing.start(self._weights)

    def _publish_again(self) -> None:
        """Publish the newest version to restarted engines, unless a step is under way: its publication follows."""
        if self.publishing and threading.current_thread() is self._main and self.follow_ups.are_done:
            self.publishing.collect_or_retry(self._weights)

    def _idle(self, seconds: float) -> None:
        """Wait so many seconds for builds; at intervals undo leases of the dead, evaluate, and check the served version."""
        if time.monotonic() - self._checked_at > _CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self.branch.undo_leases(self.settings)
            if self.follow_ups.are_done:
                if self._builds_may_have_arrived:
                    self.evaluate()
                self._publish_again()
                self._builds_may_have_arrived = False
        self._builds_may_have_arrived |= self.arrived(seconds)

    def _record_late_publications(self) -> None:
        """Record the metrics of versions that were published late, after an outage of the gateway.

        Raises:
            GatewayRefusedError: the gateway refused the head for good.
        """
        for late in self.publishing.collect() if self.publishing else ():
            self.ledger.add_metrics(late.version, dict(late.metrics))
            self._copy(late.version)

    def _conclude(self) -> None:
        """Wait until what follows the last step is done, the gateway serves the newest version, and it is evaluated: the run is over."""
        self.follow_ups.wait()
        if self.publishing:
            self.publishing.wait()
            self._record_late_publications()
            self.follow_ups.wait()
        if self.evaluation_command.wait():
            self.shutdown.sleep(_CHECK_SECONDS)  # the last of its rollouts are built
        self.evaluate()

    def run(self, *, follow: bool) -> None:
        """Train batch after batch: with `follow` until trainer.max_steps batches are committed, else until no whole batch is ready.

        However it ends, no version is pending then; where it ends without an error, the optimizer's state is written as well.
        """
        with self.commits.settled():
            self._run(follow)
        if self.optimizer and self.state_schedule.steps:
            with self.turns.of_trainer():
                self.optimizer.collect()
            add_state(Path(self.ledger.version(self.loaded.version).policy_version.path), self.optimizer.write)

    def _run(self, follow: bool) -> None:
        limit = self.settings.trainer.max_steps if follow else 0
        while True:
            self.shutdown.check()
            self.follow_ups.check()
            self._record_late_publications()
            is_open = self.phases.advance(self._publish_again if self.publishing else None)
            if 0 < limit <= self.branch.steps() and self.phases.has_entered():
                logger.info("trainer.max_steps = %d steps are done", limit)
                self._report_demand()
                self._conclude()
                return
            batch: Loaded | None = None
            busy = self.branch.is_busy()
            if not busy:
                batch = self.take() if is_open else None
                if batch and self.step(batch):
                    continue
                if not batch and not follow:
                    self._conclude()
                    return
            # The end of another trainer's step is no arrival: those of one branch take turns.
            self._idle(self.settings.trainer.poll_seconds if busy or batch or not is_open else _CHECK_SECONDS)

    def evaluate(self) -> None:
        """Measure versions on the held-out rollouts that were built since the last poll, and record the evaluations that ended."""
        changed = self.evaluation.update(self.ledger, self.watchers) if self.evaluation else []
        for version in (*changed, *self.evaluation_command.record(self.ledger)):
            self.mirror.write(version)

    def take(self) -> Loaded | None:
        """Return the oldest groups that make a whole batch, once those that may not be trained are skipped. None: too few are ready."""
        self._head = self.branch.head()
        if not (loaded := self.batches.take(self.source, self._head)):
            self._report_demand()  # else the look beside the step does, and the step begins at once
        return loaded

    def _look(self) -> None:
        """Prepare the next batch while a step is under way, and report the demand that follows from it."""
        self.batches.look(self.source, self.branch.head())
        self._report_demand()

    def _report_demand(self) -> None:
        self.demand.call(self._ready)

    @property
    def _ready(self) -> int:
        """Return the number of groups of mode train that are in hand, those of the step under way included."""
        return sum(group.mode == Mode.TRAIN for group in self.batches.sound_groups)

    def _load(self, version: LedgerVersion) -> VerlOptimizer:
        """Return the optimizer with the weights of a version, loaded unless it holds them."""
        moved, before = version.version != self.loaded.version, self.loaded.version
        if self.optimizer is None or moved:
            self._close_optimizer()  # the old weights are freed before the new ones are loaded
            self.optimizer = self.load_optimizer(version)
        if moved:
            self.loaded = version
            self.state_schedule = StateSchedule(self.settings.trainer, self.ledger, version)
            self._follow_up(lambda: self.mirror.catch_up(before))
            logger.info("version %d is loaded: branch %s was moved there by another process", version.version, version.branch)
        return self.optimizer

    @property
    def _weights(self) -> WeightSource | None:
        """Return the parameters in memory. None: they are off the devices while engines serve, and are sent from files."""
        if self.turns.are_taken:
            return None
        return WeightSource(
            arrays=lambda: self._load(self.loaded).weights(),
            ranks=lambda: self._load(self.loaded).rank_senders,
            version=self.loaded.version,
        )

    def _close_optimizer(self) -> None:
        if self.optimizer:
            self.optimizer.close()
        self.optimizer = None

    def step(self, loaded: Loaded) -> bool:
        """Make one version of one batch; when anything goes wrong before the commit, undo the lease.

        Where steps overlap, the version may be pending when this returns. A step that is refused for some of its rows leaves their groups
        skipped and the others ready.

        Returns:
            False: another trainer's step is under way, or the branch has another head by now.

        Raises:
            TrainerError: too many groups of the run have failed (trainer.alarms.max_failed_share).
        """
        with self.turns.of_trainer():
            return self._step(loaded)

    def _step(self, loaded: Loaded) -> bool:
        parent, batch, calls = self._head or self.branch.head(), None, None
        rows = (self.optimizer or self._load(parent)).data_parallel_size  # loaded before the lease: it takes long, and may fail
        step = StepLease(self.commits, loaded.rollouts, parent)
        try:
            with self.transaction.undone_on_error(but=(BadRowsError, AlreadyTrainedError, HeadMovedError)):
                with step.begun():
                    batch, facts, calls = self._assemble(loaded, parent, rows)
                    trained = self._train(step, batch, facts, calls)
                committed = self.commits.submit(trained)
        except (BadRowsError, AlreadyTrainedError) as error:
            self._refuse(error, batch, calls, parent)
            return True
        except HeadMovedError:
            self.clock.end()
            return False
        self.loaded = trained.version
        self.batches.forget(loaded)
        self._follow_up(lambda: self._finish(committed()))
        self.lookahead.check()
        self.clock.end()
        return True

    def _assemble(self, loaded: Loaded, parent: LedgerVersion, rows: int) -> tuple[Batch, dict[str, float], pl.DataFrame]:
        """Return the batch of a step from `parent`, of a multiple of so many rows, the metrics known before it, and its calls."""
        settings = self.settings.trainer
        with self.clock.stage("credit"):
            lineage, own = self.branch.lineage(), parent.tokenizer_hash
            batch, facts, calls = assemble(loaded, settings, self.normalise, lineage=lineage, divisor=rows, tokenizer_hash=own)
            facts |= batch_metrics(loaded, settings) | self.demand.figures(self._ready)
            facts |= self._retries() | self.batches.figures() | self.phases.figures()
            history = [version.metrics for version in self.branch.newest(settings.alarms.gaming_versions - 1)]
            return batch, facts | alarms.gaming([*history, facts], settings.alarms), calls

    @property
    def _overlaps(self) -> bool:
        """Return whether the next step may begin before the last one's version is committed and served: its rollouts may be older."""
        return self.settings.trainer.sampling.max_staleness > 0 and not self.turns.are_taken

    def _follow_up(self, work: Callable[[], object]) -> None:
        """Do what follows a commit: beside the next step where steps overlap, else now."""
        if self._overlaps:
            self.follow_ups.submit(work)
        else:
            work()

    def _copy(self, version: int) -> None:
        """Copy a version to the store, after what follows the last commit."""
        self._follow_up(lambda: self.mirror.write(self.ledger.version(version)))

    def _finish(self, step: CommittedStep) -> None:
        """Publish the version of a step, copy it to the store, report it, and evaluate it where that is due."""
        number = step.version.version
        parent = self.ledger.version(step.version.policy_version.parent or 0)
        for text in alarms.new_alarms(step.version, parent, self.settings.trainer.alarms):
            logger.warning("%s", text)
        self.ledger.add_metrics(number, {**self._publish(step), **self.batch_times(step.rollouts)})
        version = self.ledger.version(number)
        # After the publication: nothing waits for the copy, and `start` makes up for one that a crash prevented.
        self.mirror.write(version)
        self.watchers.stepped(replace(step, version=version))
        self.evaluate()
        prune(self.ledger, self.settings)
        if self.evaluation_command.is_due(step.number):
            if self.publishing:
                self.publishing.wait()  # the held-out tasks are for this version
            self.evaluation_command.start(number)

    def _refuse(
        self, error: BadRowsError | AlreadyTrainedError, batch: Batch | None, calls: pl.DataFrame | None, parent: LedgerVersion
    ) -> None:
        """Skip the groups whose rows failed, and undo the lease; a crash between the two repeats the step without them."""
        try:
            with self.shutdown.shielded():
                if isinstance(error, AlreadyTrainedError):
                    self.batches.skip_claimed(error.groups, parent)
                else:
                    assert batch  # rows are refused in the step itself
                    assert calls is not None
                    self.batches.refuse(error, batch_groups(calls), batch.group.tolist(), parent)
        finally:
            for version in self.branch.undo_leases(self.settings):
                self._copy(version)
        self.clock.end()

    def _publish(self, step: CommittedStep) -> Mapping[str, float]:
        """Publish the version of a step, unless another trainer of the branch has trained on from it already; return metrics."""
        committed = step.version
        if not self.publishing or newest_version(self.ledger).version != committed.version:
            return {}
        with timed(step.stages, "publish", beside=self._overlaps):
            self.turns.hand_back()
            served = self.publishing.publish(None if self._overlaps else self._weights)
        return served.metrics if served and served.version == committed.version else {}

    def close(self) -> None:
        """Stop the evaluation command, the publication thread and the optimizer."""
        self.evaluation_command.close()
        if self.publishing:
            self.publishing.close()
        self.phases.close()
        self._close_optimizer()

    def _retries(self) -> dict[str, float]:
        """Return metrics: number of retries against the gateway and the store since the last step."""
        publishing = self.publishing.outage.take_retries() if self.publishing else 0
        return {"publish_retries": float(publishing), "store_retries": float(self.store_outage.take_retries())}

    def _train(self, step: StepLease, batch: Batch, facts: dict[str, float], calls: pl.DataFrame) -> UncommittedVersion:
        """Train the version of a step that has begun.

        Raises:
            HeadMovedError: another trainer's step is under way, or the branch has another head by now; the optimizer is as before.
        """
        with self.lookahead.beside():
            optimizer = self._load(step.parent)
            with self.clock.stage("train"):
                metrics = optimizer.step(batch, step.take)
            with self.clock.stage("collect"):
                optimizer.collect(state=self.state_schedule.step())
            calls = with_token_values(calls, batch.response_mask, optimizer.token_values)
            metrics |= {**self.clock.seconds(), **optimizer.pass_seconds, **facts}
            metrics["tokens_per_second"] = metrics["tokens"] / max(metrics["seconds_train"], 1e-9)
            lease, beats = step.hand_on()
            version = self.branch.leased(lease, step.parent, metrics)
            return UncommittedVersion(lease, version, step.rollouts, calls, optimizer.write, self.clock.stages, beats)
