"""The project's store, builder and trainer around a policy that is sampled in this process.

In: settings, samplers, bodies of spans. Out: a store with what was sent, transitions of it, policy versions. Invariant: nothing here knows
of a task; what the trainer publishes is what the sampler serves next, and a rollout reaches training through the store alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from clickhouse_connect.driver.client import Client

from benchmarks.credit_sampling import Sampler
from span_processors.otlp_http import Poster
from spangrad.errors import SpangradError, TrainerError
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.types import PolicyVersion
from trainer.credit.estimators import estimator
from trainer.data.source import GroupReader
from trainer.ledger.ledger import Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import newest_version, prepare
from trainer.ledger.tables import LedgerVersion
from trainer.loop import Trainer
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish.publisher import Publisher
from trainer.shutdown import Shutdown
from transition_builder.builder import Builder

_LOOKS = 100
"""Largest number of looks that the builder makes for a step's rollouts."""


class _Served(Publisher):
    """Publisher that loads each committed version into the sampler, in place of the gateway."""

    def __init__(self, sampler: Sampler, version: int) -> None:
        self._sampler = sampler
        self.version = version

    def served(self, policy: str) -> int:
        return self.version

    def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
        began = time.monotonic()
        self._sampler.load(Path(version.path))
        self.version = version.version
        return time.monotonic() - began


@contextmanager
def own_store(directory: Path) -> Iterator[StoreSettings]:
    """Run a `spangrad store` for the run alone, with its data in the directory."""
    grpc, http, sql = free_ports(3)
    (directory / "spangrad.toml").touch()
    ports = ["--otlp-grpc-port", str(grpc), "--otlp-http-port", str(http), "--clickhouse-port", str(sql)]
    command = own_command("store", "--config", str(directory / "spangrad.toml"), "--path", str(directory / "store"), *ports)
    child = Child("spangrad store", command, directory / "store.log", inherit_settings=False)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{sql}/ping"), 120, "the store", [child])
        yield StoreSettings(url=f"http://127.0.0.1:{sql}", otlp_endpoint=f"http://127.0.0.1:{http}")
    finally:
        child.stop()


@contextmanager
def training(settings: Settings, client: Client, sampler: Sampler) -> Iterator[Trainer]:
    """A trainer wired as `spangrad train` wires it, but that the sampler takes the gateway's place."""
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(settings.trainer.directory, settings.trainer.policy, settings.trainer.branch)))
        newest = prepare(ledger, settings)

        def engine(version: LedgerVersion) -> VerlOptimizer:
            # The samplers of benchmarks compute in float32.
            return stack.enter_context(closing(VerlOptimizer(Path(version.policy_version.path), settings.trainer, engine_dtype="float32")))

        trainer = Trainer(
            settings=settings,
            ledger=ledger,
            source=GroupReader(client, settings),
            optimizer=engine(newest),
            normalise=estimator(settings.trainer),
            mirror=Mirror(client, settings.store, ledger),
            publisher=_Served(sampler, newest.version),
            shutdown=Shutdown(),
            loaded=newest,
            load_optimizer=engine,
        )
        trainer.start()
        yield trainer


def send(poster: Poster, bodies: Iterable[bytes]) -> None:
    """Post a step's spans.

    Raises:
        SpangradError: the store did not take them.
    """
    for body in bodies:
        answer = poster(body)
        if answer != 0:
            raise SpangradError(f"the store did not take a step's spans: {answer}.")


def build(builder: Builder, rollouts: int) -> None:
    """Have so many rollouts built, which were all sent.

    Raises:
        SpangradError: they were not.
    """
    built = 0
    for _ in range(_LOOKS):
        built += builder.build_ready().rollouts
        if built == rollouts:
            return
        time.sleep(0.05)
    raise SpangradError(f"of a step's {rollouts} rollouts, {built} were built.")


def train_step(trainer: Trainer) -> LedgerVersion:
    """The version that the trainer makes of the groups that were built.

    Raises:
        SpangradError: none is ready.
        TrainerError: the step was refused, and its groups are skipped.
    """
    before = newest_version(trainer.ledger)
    loaded = trainer.take()
    if loaded is None:
        raise SpangradError("a step's groups were built, and the trainer finds none ready.")
    trainer.step(loaded)
    trainer.commits.settle()
    newest = newest_version(trainer.ledger)
    if newest.version == before.version:
        raise TrainerError(trainer.ledger.skips.read()[-1].detail)
    return newest


@contextmanager
def clocked(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time that a stage takes to its sum."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began
