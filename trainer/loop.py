"""The trainer: ready groups -> lease -> credit -> step -> checkpoint -> commit -> mirror -> publish, as often as there are batches.

In: the settings; through them the span store, the model and the gateway. Out: policy versions. Invariant: at every instruction the
ledger knows enough to go on. A lease without a commit is undone, at once when this process fails or is asked to stop, else at the next
start; a commit that was not yet copied to the store, or not published, is copied and published at the next start. Nothing is repeated,
nothing skipped.

A batch in which every advantage is 0 takes no optimiser step, yet commits a version with its parent's weights: its groups are used, and
lineage and step count stay whole.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spangrad.clickhouse import connect
from spangrad.errors import GatewayError, LedgerError, SettingsError
from spangrad.selection import expression
from spangrad.settings import Settings
from spangrad.types import VersionStatus
from spangrad.weights import checksum_directory, tokenizer_hash
from trainer import alarms, checkpoint
from trainer.assemble import assemble
from trainer.batch import Batch
from trainer.credit import CreditRule, Normalise
from trainer.eligibility import ExpiryReason, expiry_reasons
from trainer.ledger import FILE as LEDGER_FILE
from trainer.ledger import Ledger, LedgerVersion
from trainer.mirror import Mirror
from trainer.publisher import Publisher
from trainer.shutdown import Shutdown, Stopped
from trainer.source import Group, Loaded, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""How often an idle trainer asks what is served."""


class GroupSource(Protocol):
    """Where groups come from."""

    @property
    def build_spec(self) -> str:
        """The build specification of all of them."""
        ...

    def ready(self) -> list[Group]:
        """Groups whose last rollout was built, oldest first."""
        ...

    def load(self, groups: Sequence[Group]) -> Loaded:
        """Their rollouts and transitions."""
        ...


class Optimiser(Protocol):
    """What steps the weights: `trainer.engine.Engine`."""

    @property
    def data_parallel_size(self) -> int:
        """The number that a batch's rows must be divisible by."""
        ...

    def step(self, batch: Batch) -> dict[str, float]:
        """One step; its metrics."""
        ...

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Parameters by name."""
        ...

    def save_state(self, directory: Path) -> None:
        """Write the optimiser's state."""
        ...


@dataclass
class Trainer:
    """The parts of a training run, wired."""

    settings: Settings
    ledger: Ledger
    source: GroupSource
    optimiser: Optimiser
    normalise: Normalise
    mirror: Mirror
    publisher: Publisher | None
    """None: versions are not published."""
    shutdown: Shutdown
    _looked: float = 0.0

    def start(self) -> None:
        """Bring the store's copy and the gateway up to what the ledger has committed."""
        self.mirror.catch_up()
        if self.publisher:
            self._await_engine(self.publisher)
            # Also when that version is said to be served: the gateway compares weights, not numbers, and mends what is down.
            self._publish(self.publisher)

    def _publish(self, publisher: Publisher) -> None:
        newest = newest_version(self.ledger)
        seconds = publisher.publish(newest.policy_version)
        logger.info("version %d is served (%.2f s)", newest.version, seconds)

    def _publish_again(self) -> None:
        """An engine that was restarted serves what it was started with: have it serve the newest version."""
        if self.publisher and self.publisher.served(self.settings.trainer.policy) not in {None, newest_version(self.ledger).version}:
            self._publish(self.publisher)

    def _rest(self) -> None:
        """While nothing is ready: see now and then that the newest version is served, and tolerate a gateway that is away."""
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            try:
                self._publish_again()
            except GatewayError as error:
                logger.warning("%s", error)
        time.sleep(self.settings.trainer.poll_seconds)

    def _await_engine(self, publisher: Publisher) -> None:
        """Wait until the gateway knows its engine, which may be starting beside us.

        Raises:
            GatewayError: it admits none in the time that an engine has to start.
        """
        end = time.monotonic() + self.settings.engine.start_timeout_seconds
        while publisher.served(self.settings.trainer.policy) is None:
            self.shutdown.check()
            if time.monotonic() > end:
                raise GatewayError(f"the gateway at {self.settings.gateway.url} has no engine. Start one with `spangrad engine`.")
            time.sleep(self.settings.trainer.poll_seconds)

    def run(self, *, follow: bool) -> None:
        """Train batch after batch: with `follow` until trainer.max_steps batches are committed, else until no whole batch is ready."""
        limit = self.settings.trainer.max_steps if follow else 0
        while True:
            self.shutdown.check()
            if 0 < limit <= len(self.ledger.committed_versions()) - 1:
                logger.info("trainer.max_steps = %d steps are done", limit)
                return
            loaded = self.take()
            if loaded:
                self.step(loaded)
            elif follow:
                self._rest()
            else:
                return

    def take(self) -> Loaded | None:
        """The oldest groups that make a whole batch, once those that may not be trained are put aside. None: too few are ready."""
        settings = self.settings.trainer
        while True:
            finished = self.ledger.finished_groups(settings.run_id, self.source.build_spec)
            ready = [group for group in self.source.ready() if (group.mode, group.group_id) not in finished]
            if len(ready) < settings.groups_per_batch:
                return None
            chosen = ready[: settings.groups_per_batch]
            loaded = self.source.load(chosen)
            reasons = expiry_reasons(
                chosen,
                loaded.transitions.filter(loaded.own(settings.policy, settings.selection)),
                lineage=self.ledger.lineage(),
                max_staleness=settings.max_staleness,
                tokenizer_hash=newest_version(self.ledger).tokenizer_hash,
                max_tokens=settings.max_tokens_per_device,
            )
            if not reasons:
                return loaded
            if ExpiryReason.STALE in reasons.values():
                self._publish_again()
            for reason in set(reasons.values()):
                groups = [group for group, why in reasons.items() if why is reason]
                self.ledger.expire(groups, reason)
                logger.warning("%d groups will not be trained (%s): %s", len(groups), reason, ", ".join(one.group_id for one in groups))

    def step(self, loaded: Loaded) -> None:
        """Make one version of one batch; when anything goes wrong before the commit, undo the lease."""
        parent = newest_version(self.ledger)
        settings, rows = self.settings.trainer, self.optimiser.data_parallel_size
        batch, facts = assemble(loaded, settings, self.normalise, version=parent.version, divisor=rows)
        rule = alarms.GamingRule.of(settings)
        history = [one.metrics for one in self.ledger.versions() if one.status is VersionStatus.COMMITTED]
        facts |= alarms.gaming([*history, facts], rule)
        try:
            made = self._commit(loaded, batch, facts, parent)
        except BaseException:
            self.shutdown.end()
            undo_leases(self.ledger, self.settings)
            raise
        if made.metrics.get("gaming_alarm") and not parent.metrics.get("gaming_alarm"):
            logger.warning("%s", alarms.told(made.version, made.metrics, rule))
        self.mirror.write(made)
        if self.publisher:
            seconds = self.publisher.publish(made.policy_version)
            self.ledger.add_metrics(made.version, {"seconds_publish": seconds})
            made = newest_version(self.ledger)
            self.mirror.write(made)
        committed = self.ledger.committed_versions()
        mine = set(committed) - self.ledger.lent()
        checkpoint.prune(settings.directory, settings.policy, settings.branch, committed=mine, keep=settings.keep_checkpoints)
        logger.info("%s", describe(made, len(committed) - 1))

    def _commit(self, loaded: Loaded, batch: Batch, facts: dict[str, float], parent: LedgerVersion) -> LedgerVersion:
        settings, began = self.settings.trainer, time.monotonic()
        with self.shutdown.shielded():
            lease = self.ledger.begin(loaded.rollouts)
        metrics = self.optimiser.step(batch)
        trained = time.monotonic()
        written = checkpoint.write(
            settings.directory,
            policy=settings.policy,
            branch=settings.branch,
            version=lease.version,
            parent=lease.parent,
            batch_id=lease.batch_id,
            base=Path(parent.policy_version.path),
            weights=self.optimiser.weights(),
            save_state=self.optimiser.save_state,
        )
        metrics |= {"seconds_train": trained - began, "seconds_checkpoint": time.monotonic() - trained, **facts}
        with self.shutdown.shielded():
            self.ledger.commit(
                lease, checksum=written.checksum, path=str(written.path), tokenizer_hash=written.tokenizer_hash, metrics=metrics
            )
        return newest_version(self.ledger)


def train(settings: Settings, *, follow: bool) -> None:
    """Train until there is no whole batch (or, with `follow`, until trainer.max_steps or a signal).

    Args:
        settings: the whole tree; the trainer reads its own section, the store's, the gateway's and the builder's specification.
        follow: wait for groups as they finish.

    Raises:
        SpangradError: a setting, the store, the gateway, a checkpoint or a batch is not as it must be; the ledger is left so that the
            next call goes on.
    """
    CreditRule.of(settings.trainer).check()
    expression(settings.trainer.selection)
    shutdown = Shutdown()
    try:
        with shutdown.listening():
            _train(settings, follow, shutdown)
    except Stopped:
        logger.info("stopped by %s", shutdown.requested)


def _train(settings: Settings, follow: bool, shutdown: Shutdown) -> None:
    require_beginning(settings)
    client = connect(settings.store)
    ledger = Ledger(settings.trainer.directory, settings.trainer.policy, settings.trainer.branch)
    try:
        newest = prepare(ledger, settings)

        from trainer.engine import Engine, group_relative

        model = Path(newest.policy_version.path)
        optimiser = Engine(model, settings.trainer)
        if newest.policy_version.batch_id:
            optimiser.load_state(model)
        logger.info("version %d of %s is loaded on %s", newest.version, settings.trainer.policy, optimiser.device)
        trainer = Trainer(
            settings=settings,
            ledger=ledger,
            source=Source(client, settings),
            optimiser=optimiser,
            normalise=group_relative,
            mirror=Mirror(client, settings.store.url, ledger),
            publisher=Publisher(settings.gateway) if settings.trainer.publish else None,
            shutdown=shutdown,
        )
        trainer.start()
        trainer.run(follow=follow)
    finally:
        ledger.close()
        client.close()


def require_beginning(settings: Settings) -> None:
    """See, before anything is opened or made, that there are weights to begin with, or a ledger that names some.

    Raises:
        SettingsError: there are neither.
    """
    model = settings.trainer.model
    if model is None and not (settings.trainer.directory / LEDGER_FILE).exists():
        raise SettingsError(
            "trainer.model is not set. Give the directory of the weights that training begins with: `spangrad train --model DIR`."
        )
    if model is not None and not model.is_dir():
        raise SettingsError(
            f"trainer.model = {str(model)!r} is no directory. Give the one that holds the weights that training begins with."
        )


def prepare(ledger: Ledger, settings: Settings) -> LedgerVersion:
    """Undo what a crash left, enter the weights that training begins with if there are none, and verify the newest version.

    Raises:
        SettingsError: there is no version and no trainer.model.
        CheckpointError: trainer.model holds no weights or tokenizer, or the newest version's directory is not what was committed.
    """
    undo_leases(ledger, settings)
    if ledger.frontier() is None:
        model = settings.trainer.model
        if model is None:
            raise SettingsError(
                f"trainer.model is not set, and the ledger knows no version of {settings.trainer.policy} on {settings.trainer.branch}."
                " Give the directory of the weights that training begins with: `spangrad train --model DIR`."
            )
        path = model.absolute()
        ledger.register_initial(
            checksum=checksum_directory(path), path=str(path), tokenizer_hash=tokenizer_hash(path), run_id=settings.trainer.run_id
        )
        begun = newest_version(ledger)
        if begun.parent_branch:
            logger.info("branch %s begins with version %d of branch %s", begun.branch, begun.version, begun.parent_branch)
    newest = newest_version(ledger)
    checkpoint.verify(Path(newest.policy_version.path), newest.policy_version.checksum)
    return newest


def undo_leases(ledger: Ledger, settings: Settings) -> None:
    """Free the rollouts of leases without a commit, and remove what was written of their versions."""
    trainer = settings.trainer
    orphans = ledger.recover()
    for version in orphans:
        checkpoint.remove(trainer.directory, trainer.policy, trainer.branch, version)
        logger.warning("version %d was never committed: its number stays taken, its rollouts are free again", version)
    checkpoint.sweep(trainer.directory, trainer.policy, trainer.branch)


def newest_version(ledger: Ledger) -> LedgerVersion:
    """The version that the next step trains.

    Raises:
        LedgerError: there is none.
    """
    newest = ledger.frontier()
    if newest is None:
        raise LedgerError("the ledger has no weights to train. Start `spangrad train` with --model.")
    return newest


def describe(version: LedgerVersion, step: int) -> str:
    """One line about a step."""
    m = version.metrics
    gap = f"{m['logprob_gap']:.0e}" if "logprob_gap" in m else "unknown"
    parts = [
        f"{m['groups']:.0f} groups",
        f"{m['rollouts']:.0f} rollouts",
        f"{m['transitions']:.0f} transitions",
        *([f"{m['merge_ratio']:.1f}x fewer tokens in {m['sequences']:.0f} sequences"] if m["merge_ratio"] > 1 else []),
        *([f"{m['too_long']:.0f} calls too long"] if m["too_long"] else []),
        f"return {m['mean_return']:+.2f}",
        f"gap {gap}",
        f"train {m['seconds_train']:.2f} s",
    ]
    if "seconds_publish" in m:
        parts.append(f"publish {m['seconds_publish']:.2f} s")
    if not m.get("updated", 1):
        parts.append("all advantages 0: weights as before")
    return f"step {step} -> version {version.version}: {', '.join(parts)}"
