"""One training run of the credit benchmark: sample, send, build, train, and again.

In: an `Arm`, a seed, how many steps. Out: a `Result`. Invariant: store, builder and trainer are the project's own and know nothing of the
task; what the trainer publishes is what the next step is sampled with; a rollout reaches training through the store alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from clickhouse_connect.driver.client import Client

from benchmarks.credit_sampling import Sampled, Sampler, write_model
from benchmarks.credit_spans import Author, Served
from benchmarks.credit_tasks import Task
from spangrad.clickhouse import connect
from spangrad.errors import SpangradError, TrainerError
from spangrad.otlp_http import Poster
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import AirRule, BuilderSettings, GatewaySettings, Settings, StoreSettings, TrainerSettings
from spangrad.types import PolicyVersion
from trainer.engine import Engine
from trainer.estimators import estimator
from trainer.ledger import Ledger
from trainer.ledger_tables import LedgerVersion
from trainer.loop import Trainer
from trainer.mirror import Mirror
from trainer.publisher import Publisher
from trainer.recovery import newest_version, prepare
from trainer.shutdown import Shutdown
from trainer.source import Source
from transition_builder.loop import Builder

GROUPS = 4
"""A step."""
FRESH_ROLLOUTS = 1024
"""With which a trained policy is measured."""
_LOOKS = 100
"""How often the builder looks for a step's rollouts."""


@dataclass(frozen=True)
class Arm:
    """One way to train one task."""

    name: str
    task: Task
    credit: str = "identical"
    baseline: str = "rollout"
    rules: tuple[AirRule, ...] = ()
    retokenized: bool = False
    """Whether the spans hold ids that were made from the text again."""


@dataclass
class Result:
    """What came of a run, a value a step in each list."""

    task: str
    arm: str
    seed: int
    group: int
    steps: int
    success: list[float] = field(default_factory=list[float])
    """Of the rollouts that the step trains."""
    mean_return: list[float] = field(default_factory=list[float])
    alarms: list[int] = field(default_factory=list[int])
    """Versions at which the alarm of a gamed reward rang."""
    gap: float = 0.0
    """The largest |rollout logprob - trainer logprob| of all steps, in nats."""
    refused: str = ""
    """What the trainer said when it refused a step; the run ends there."""
    final: float = 0.0
    """Success of fresh rollouts by the last version."""
    sampled: int = 0
    trained: int = 0
    """Rollouts, as the store's otel.batches counts them."""
    calls: int = 0
    transitions: int = 0
    drops: int = 0
    unaccounted: int = 0
    """Calls that are neither, or both."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By stage, over all steps."""

    def json(self) -> dict[str, Any]:
        """As a line of a file."""
        return asdict(self)


class _Engine(Publisher):
    """In the gateway's place: takes each committed version into the sampler."""

    def __init__(self, sampler: Sampler, version: int) -> None:
        self._sampler = sampler
        self.version = version

    def served(self, policy: str) -> int:
        return self.version

    def publish(self, version: PolicyVersion, weights: object = None) -> float:
        began = time.monotonic()
        self._sampler.load(Path(version.path))
        self.version = version.version
        return time.monotonic() - began


def run(arm: Arm, seed: int, steps: int, directory: Path, said: Callable[[Result], None] = lambda _: None) -> Result:
    """Train from a fresh model, in a fresh store.

    Args:
        arm: what is trained how.
        seed: of the model, of sampling and of the tasks.
        steps: optimiser steps.
        directory: for everything that the run writes.
        said: told of the result as it grows, after each step.
    """
    write_model(directory / "model", arm.task, seed)
    result = Result(arm.task.name, arm.name, seed, arm.task.group, steps)
    with _store(directory) as store:
        settings = _settings(arm, store, directory, f"{arm.task.name}-{arm.name}-{seed}")
        sampler = Sampler(directory / "model", seed + 77)
        with closing(connect(store)) as client:
            with _training(settings, client, sampler) as trainer:
                _Loop(arm, settings, trainer, sampler, Builder(settings), result).run(seed, steps, said)
            goals = arm.task.goals(random.Random(seed + 5), FRESH_ROLLOUTS // arm.task.group)
            result.final = success(arm.task, sampler.rollouts(arm.task, goals))
            _account(result, client, settings.trainer.run_id)
    return result


@contextmanager
def _training(settings: Settings, client: Client, sampler: Sampler) -> Iterator[Trainer]:
    """A trainer wired as `spangrad train` wires it, but that the sampler takes the gateway's place."""
    with closing(Ledger(settings.trainer.directory, settings.trainer.policy, settings.trainer.branch)) as ledger:
        newest = prepare(ledger, settings)

        def engine(version: LedgerVersion) -> Engine:
            return Engine(Path(version.policy_version.path), settings.trainer)

        trainer = Trainer(
            settings=settings,
            ledger=ledger,
            source=Source(client, settings),
            optimiser=engine(newest),
            normalise=estimator(settings.trainer),
            mirror=Mirror(client, settings.store.url, ledger),
            publisher=_Engine(sampler, newest.version),
            shutdown=Shutdown(),
            loaded=newest,
            load_optimiser=engine,
        )
        trainer.start()
        yield trainer


@dataclass
class _Loop:
    """The steps of a run."""

    arm: Arm
    settings: Settings
    trainer: Trainer
    sampler: Sampler
    builder: Builder
    result: Result

    def run(self, seed: int, steps: int, said: Callable[[Result], None]) -> None:
        dice = random.Random(seed + 1000)
        author = Author(self.settings.trainer.run_id, self.arm.task, seed)
        poster = Poster(f"{self.settings.store.otlp_endpoint}/v1/traces", {}, None)
        for step in range(steps):
            with self._clocked("sample"):
                rollouts = self.sampler.rollouts(self.arm.task, self.arm.task.goals(dice, GROUPS))
            with self._clocked("send"):
                self._send(poster, author, rollouts, step)
            with self._clocked("build"):
                self._build(len(rollouts))
            self.result.success.append(success(self.arm.task, rollouts))
            self.result.sampled += len(rollouts)
            self.result.calls += sum(len(one.calls) for one in rollouts)
            try:
                with self._clocked("train"):
                    self._train()
            except TrainerError as error:
                self.result.refused = str(error)
                return
            said(self.result)

    def _send(self, poster: Poster, author: Author, rollouts: Sequence[Sampled], step: int) -> None:
        newest = newest_version(self.trainer.ledger)
        served = Served(self.settings.trainer.policy, newest.version, newest.tokenizer_hash, self.arm.retokenized)
        for body in author.bodies(rollouts, step, served):
            answer = poster(body)
            if answer != 0:
                raise SpangradError(f"the store did not take a step's spans: {answer}.")

    def _build(self, rollouts: int) -> None:
        built = 0
        for _ in range(_LOOKS):
            built += self.builder.look().rollouts
            if built == rollouts:
                return
            time.sleep(0.05)
        raise SpangradError(f"of a step's {rollouts} rollouts, {built} were built.")

    def _train(self) -> None:
        loaded = self.trainer.take()
        if loaded is None:
            raise SpangradError("a step's groups were built, and the trainer finds none ready.")
        self.trainer.step(loaded)
        made = newest_version(self.trainer.ledger)
        self.result.mean_return.append(round(made.metrics["mean_return"], 4))
        self.result.gap = max(self.result.gap, made.metrics["logprob_gap"])
        if made.metrics.get("gaming_alarm"):
            self.result.alarms.append(made.version)

    @contextmanager
    def _clocked(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.result.seconds[stage] = self.result.seconds.get(stage, 0.0) + time.monotonic() - began


def _settings(arm: Arm, store: StoreSettings, directory: Path, run_id: str) -> Settings:
    """As docs/credit.md tells."""
    return Settings(
        store=store,
        gateway=GatewaySettings(),
        builder=BuilderSettings(rules=arm.rules),
        trainer=TrainerSettings(
            run_id=run_id,
            model=directory / "model",
            directory=directory / "policies",
            groups_per_batch=GROUPS,
            credit=arm.credit,  # type: ignore[arg-type]  # pydantic says what is wrong with it
            baseline=arm.baseline,  # type: ignore[arg-type]
            learning_rate=1e-3,
            max_tokens_per_device=1 << 16,  # a step is one micro-batch
            keep_checkpoints=1,
        ),
    )


@contextmanager
def _store(directory: Path) -> Iterator[StoreSettings]:
    """A store of the run's own."""
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


_COUNTS = """
SELECT
    (SELECT uniqExact(RolloutId) FROM otel.v_batches WHERE RunId = %(run)s),
    (SELECT groupUniqArray(CallId) FROM otel.v_transitions WHERE RunId = %(run)s),
    (SELECT groupUniqArray(CallId) FROM otel.v_drops WHERE RunId = %(run)s)
"""


def _account(result: Result, client: Client, run_id: str) -> None:
    """What the store holds of the run."""
    trained, transitions, drops = client.query(_COUNTS, parameters={"run": run_id}).result_rows[0]
    result.trained, result.transitions, result.drops = trained, len(transitions), len(drops)
    result.unaccounted = abs(result.calls - len(set(transitions) | set(drops))) + len(set(transitions) & set(drops))


def success(task: Task, rollouts: Sequence[Sampled]) -> float:
    """Mean over rollouts."""
    return mean(task.success(one.goal, one.turns()) for one in rollouts)
