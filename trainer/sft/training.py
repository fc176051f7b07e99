"""Run of `spangrad finetune`: files -> examples -> optimizer steps -> checkpoints -> commits -> publication.

Invariant: at every instruction the ledger knows enough to resume. Committed steps are never trained again by the same command, and steps
without a commit are trained as if nothing had happened: the files' checksums, the settings and the examples identify the run, the ledger
records the step of the run at the branch's head, and the head's directory holds the state from which the next step is made.

A step goes to the branch's head only. When another process moves the head meanwhile, the run ends with an error and can be resumed once
the head is back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from spangrad.errors import SettingsError, StoreError, TrainerError
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from trainer.data.source import AttemptKey, BatchRollout
from trainer.ledger.file_batches import BatchFile, FileBatch, last_of, trained_attempts
from trainer.ledger.ledger import BatchLease, Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import newest_version, open_ledger, prepare, prune, require_beginning
from trainer.ledger.tables import LedgerVersion
from trainer.ledger.working_branch import WorkingBranch
from trainer.monitor.evaluate import best_of_files, versions_with_weights
from trainer.monitor.watchers import reporters_of
from trainer.monitor.watching import Clock, CommittedStep, Watchers
from trainer.publish.lora import model_of
from trainer.publish.publisher import Publisher
from trainer.sft.examples import Example, Examples, LengthLimits, batches, digest_of, read_examples
from trainer.sft.files import ExampleFile, find_sources
from trainer.sft.objective import Method
from trainer.sft.rendering import Renderer
from trainer.shutdown import Shutdown, Stopped
from trainer.step import StepTransaction, beating

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from trainer.sft.optimizer import FileOptimizer

logger = logging.getLogger(__name__)

_OF_OPTIMIZER = ("optim.betas", "optim.weight_decay", "optim.clip_grad")
_LEARNING = ("lora.rank", "lora.alpha", "lora.modules", *_OF_OPTIMIZER, "dtype", "max_tokens_per_device")
"""Names of the trainer's settings that decide what a run learns."""
_REMEDY = (
    "The version stays committed and is published when the same `spangrad finetune` is started again; "
    "trainer.weight_sync.publish = false trains without."
)


@dataclass(frozen=True)
class FileTrainPlan:
    """Plan of a run over files."""

    method: Method
    run: str
    """Name of the run (`run_name`)."""
    base: LedgerVersion
    """Version that the run starts from."""
    done: FileBatch | None
    """Batch that made `base`, where it is one of this run. None: the run has not begun."""
    sources: Sequence[ExampleFile]
    examples: Examples
    digest: str
    steps: list[list[int]]
    """Indices of the examples of each optimizer step; empty when the run is whole, as its files are not read."""
    ends: list[int]
    """Numbers of the steps after which a version is committed."""

    @property
    def at(self) -> int:
        """Return the number of committed steps."""
        return self.done.step if self.done else 0


@dataclass(frozen=True)
class FileRun:
    """Result of a run over files."""

    plan: FileTrainPlan
    versions: list[LedgerVersion]
    """Versions that it committed, oldest first; empty: the run had been whole before."""
    best: LedgerVersion | None
    """Version of the whole run whose held-out loss is lowest; its files are kept. None: no rows are held out."""


class Observer(Protocol):
    """Observer of a run's progress."""

    def planned(self, plan: FileTrainPlan) -> None:
        """Handle the plan: the files are read, and training is about to begin."""
        ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Handle an optimizer step with its metrics."""
        ...

    def committed(self, version: LedgerVersion) -> None:
        """Handle a committed version."""
        ...


def finetune(
    settings: Settings, method: Method, paths: Sequence[Path], *, again: bool = False, observer: Observer | None = None
) -> FileRun | None:
    """Train a branch's head on files, or directories of them.

    With `again` rows whose rollouts the branch has trained are trained, too, and a whole run is repeated.

    Returns:
        None: stopped by a signal.

    Raises:
        SpangradError: a setting, a file, the gateway or a checkpoint is not as it must be; the ledger is left so that the same call goes
            on.
    """
    require_beginning(settings)
    if settings.trainer.weight_sync.method == "adapter":
        raise SettingsError(
            "trainer.weight_sync.method = adapter hands out adapters alone, and `spangrad finetune` makes whole models, adapters merged. "
            "Set trainer.weight_sync.method = disk, on a branch that has no adapters for versions."
        )
    sources = find_sources(paths)
    shutdown = Shutdown()
    try:
        with shutdown.listening(), closing(open_ledger(settings)) as ledger, _store(settings) as client:
            return _Run(settings, method, sources, again, observer, shutdown, ledger, client).go()
    except Stopped:
        logger.info("stopped by %s: the same command continues from the last version", shutdown.requested)
        return None


def run_name(settings: Settings, method: Method, sources: Sequence[ExampleFile], *, again: bool) -> str:
    """Return a run's name: 16 hexadecimal digits of a hash of the method, the files and every setting that decides what is learnt."""
    trainer = settings.trainer.values_of(_LEARNING)
    facts = [method, [source.checksum for source in sources], settings.finetune.model_dump(mode="json"), trainer, again]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class _Run:
    settings: Settings
    method: Method
    sources: Sequence[ExampleFile]
    again: bool
    observer: Observer | None
    shutdown: Shutdown
    ledger: Ledger
    client: Client | None
    """Client of the span store. None: it does not answer."""
    clock: Clock = field(default_factory=Clock)

    def go(self) -> FileRun:
        trainer = self.settings.trainer
        publisher = Publisher(self.settings.gateway, _REMEDY) if trainer.weight_sync.publish else None
        head = prepare(self.ledger, self.settings)
        if publisher:
            publisher.served(trainer.policy)  # so that a missing gateway is an error before the work, not after
        plan = self._plan(head)
        versions = self._train(plan) if plan.steps else []
        self._copy()
        newest = newest_version(self.ledger)
        if publisher:
            logger.info("version %d is served (%.2f s)", newest.version, publisher.publish(newest.policy_version))
        return FileRun(plan, versions, best_of_files(self.ledger, versions_with_weights(self.ledger, trainer), trainer))

    def _plan(self, head: LedgerVersion) -> FileTrainPlan:
        trainer, finetune, ledger = self.settings.trainer, self.settings.finetune, self.ledger
        run = run_name(self.settings, self.method, self.sources, again=self.again)
        last = last_of(ledger.database, trainer.policy, trainer.branch, run, ledger.lineage())
        done = last[1] if last else None
        if last and done and self.again and (done.is_whole or last[0] != head.version):
            last = done = None
        if done and done.is_whole:
            return FileTrainPlan(self.method, run, head, done, self.sources, Examples(), done.examples, [], [])
        if last and done and last[0] != head.version:
            raise TrainerError(
                f"this run stopped at step {done.step} of {done.steps} (version {last[0]}), and branch {trainer.branch} is at "
                f"version {head.version} by now. Go back with `spangrad policy rollback {trainer.policy}@{last[0]}` to end it, or begin "
                "a run of its own with --again."
            )
        model = Path(head.policy_version.path)
        if model_of(model) != model:
            raise TrainerError(
                f"version {head.version}, the head of branch {trainer.branch}, is an adapter, and `spangrad finetune` goes on from whole "
                "models. Begin a branch with a whole model (trainer.branch, trainer.model)."
            )
        limits = LengthLimits.of(model, head.tokenizer_hash, finetune, trainer.max_tokens_per_device)
        known = set() if self.again else trained_attempts(ledger.database, trainer.policy, trainer.branch, done)
        examples = read_examples(self.sources, self.method, Renderer(model), limits, finetune, known)
        digest = digest_of([*examples.trained, *examples.held_out])
        if done and digest != done.examples:
            raise TrainerError(
                f"this run has trained other rows up to step {done.step} than these files give now: the branch, or its tokenizer, has "
                "changed since. Begin a run of its own with --again."
            )
        steps = batches(examples.trained, finetune)
        stride = finetune.steps_per_version or len(steps) // finetune.epochs
        ends = [*range(stride, len(steps), stride), len(steps)]
        return FileTrainPlan(self.method, run, head, done, self.sources, examples, digest, steps, ends)

    def _train(self, plan: FileTrainPlan) -> list[LedgerVersion]:
        if self.observer:
            self.observer.planned(plan)
        reporters = Watchers(reporters_of(self.settings, self.client))
        with closing(reporters), closing(self._optimizer(plan)) as optimizer:
            head, versions = plan.base, list[LedgerVersion]()
            before = {} if plan.at else {f"{name}_before": value for name, value in self._held_out(optimizer, plan).items()}
            for begin, end in pairwise([plan.at, *(step for step in plan.ends if step > plan.at)]):
                self.clock.begin()
                head = self._version(optimizer, plan, head, range(begin, end), before)
                before = {}
                versions.append(head)
                if self.observer:
                    self.observer.committed(head)
                self._copy()
                batch = self.ledger.batch(head.policy_version.batch_id or "")
                reporters.stepped(CommittedStep(len(self.ledger.committed_versions()) - 1, head, batch, self.clock.stages))
                prune(self.ledger, self.settings)
                self.clock.end()
            return versions

    def _optimizer(self, plan: FileTrainPlan) -> FileOptimizer:
        from trainer.sft.optimizer import FileOptimizer

        model = Path(plan.base.policy_version.path)
        optimizer = FileOptimizer(model, self.settings, self.method, len(plan.steps))
        if plan.done:
            optimizer.load_state(model)
        elif self.method == "dpo":
            optimizer.reference = optimizer.logprobs([*plan.examples.trained, *plan.examples.held_out])
        logger.info("version %d is loaded on %s", plan.base.version, optimizer.device)
        return optimizer

    def _held_out(self, optimizer: FileOptimizer, plan: FileTrainPlan) -> dict[str, float]:
        after = 2 * len(plan.examples.trained)
        metrics = optimizer.measure(plan.examples.held_out, None if optimizer.reference is None else optimizer.reference[after:])
        return {f"held_out_{name}": value for name, value in metrics.items()}

    def _version(
        self, optimizer: FileOptimizer, plan: FileTrainPlan, parent: LedgerVersion, steps: range, facts: dict[str, float]
    ) -> LedgerVersion:
        """Make one version of some steps; on any error before the commit, undo the lease."""
        end = steps.stop
        trained = [plan.examples.trained[at] for at in sorted({at for step in steps for at in plan.steps[step]})]
        file_batch = FileBatch(plan.method, plan.run, end, len(plan.steps), plan.digest, _files(plan.sources, trained))
        transaction = StepTransaction(self.settings, WorkingBranch(self.ledger), self.shutdown)
        with transaction.undone_on_error():
            lease = self._lease(transaction, _rollouts(trained), parent, file_batch)
            with beating(self.ledger, lease):
                with self.clock.stage("train"):
                    metrics = _means([self._step(optimizer, plan, at) for at in steps]) | facts
                    metrics |= self._held_out(optimizer, plan)
                with self.clock.stage("checkpoint"):
                    optimizer.collect(state=end < len(plan.steps))  # a whole run is not resumed
                    written = transaction.write(lease, parent, optimizer.write)
            whole = len(plan.steps) // self.settings.finetune.epochs
            metrics |= {"epoch": end / whole, "finetune_step": float(end), "rows": float(len(trained)), **self.clock.seconds()}
            return transaction.commit(lease, written, metrics)

    def _step(self, optimizer: FileOptimizer, plan: FileTrainPlan, at: int) -> dict[str, float]:
        self.shutdown.check()
        places = plan.steps[at]
        reference = None if optimizer.reference is None else optimizer.reference.reshape(-1, 2)[places].reshape(-1)
        metrics = optimizer.step([plan.examples.trained[index] for index in places], reference)
        if self.observer:
            self.observer.stepped(at + 1, metrics)
        return metrics

    def _lease(
        self, transaction: StepTransaction, rollouts: list[BatchRollout], parent: LedgerVersion, file_batch: FileBatch
    ) -> BatchLease:
        while True:
            if lease := transaction.begin(rollouts, parent, file_batch):
                return lease
            head, branch = transaction.branch.head().version, self.settings.trainer.branch
            if head != parent.version:
                raise TrainerError(
                    f"branch {branch} was moved from version {parent.version} to {head} meanwhile: step {file_batch.step} of this run has "
                    "no place there. Stop the other training of that branch, go back with `spangrad policy rollback "
                    f"{self.settings.trainer.policy}@{parent.version}`, and start again."
                )
            transaction.branch.is_busy()  # logs for whom it waits
            time.sleep(self.settings.trainer.poll_seconds)

    def _copy(self) -> None:
        """Copy new rows of the ledger to the store; rows that cannot be copied now are copied by the next run on the branch."""
        if self.client:
            try:
                Mirror(self.client, self.settings.store, self.ledger).catch_up()
            except StoreError as error:
                logger.warning("the ledger is not copied to the store now: %s", error)


def _rollouts(examples: Sequence[Example]) -> list[BatchRollout]:
    """Return the rollouts that examples came from, each once."""
    rollouts: dict[AttemptKey, BatchRollout] = {}
    for example in examples:
        for origin in example.origins:
            rollouts.setdefault(origin.key, origin)
    return list(rollouts.values())


def _files(sources: Sequence[ExampleFile], examples: Sequence[Example]) -> tuple[BatchFile, ...]:
    counts = {source.checksum: 0 for source in sources}
    for example in examples:
        counts[example.source.checksum] += 1
    return tuple(BatchFile(file.name, file.checksum, file.size, counts[file.checksum]) for file in sources if counts[file.checksum])


def _means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    sums = {"tokens"}
    return {name: sum(step[name] for step in steps) if name in sums else fmean(step[name] for step in steps) for name in steps[0]}


@contextmanager
def _store(settings: Settings) -> Generator[Client | None]:
    """Connect to the span store. None: it does not answer."""
    client = None
    try:
        client = connect(settings.store, consistent=True)
    except StoreError as error:
        logger.warning("the ledger is not copied to the store now: %s", error)
    try:  # outside of `except`: an error of the run does not follow from the store's
        yield client
    finally:
        if client:
            client.close()
