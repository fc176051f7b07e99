"""One training run of the credit benchmark: sample, send, build, train, and again.

In: an `Arm`, a seed, how many steps. Out: a `Result`. Invariant: store, builder and trainer are the project's own and know nothing of the
task; what the trainer publishes is what the next step is sampled with; a rollout reaches training through the store alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from clickhouse_connect.driver.client import Client

from benchmarks.credit_sampling import AGENT, Sampled, Sampler, write_model
from benchmarks.credit_spans import Author, Served
from benchmarks.credit_tasks import Task
from benchmarks.in_process import build, clocked, own_store, send, train_step, training
from span_processors.otlp_http import Poster
from spangrad.errors import TrainerError
from spangrad.settings import AirRule, BuilderSettings, GatewaySettings, Settings, StoreSettings, TrainerSettings
from spangrad.settings.trainer_learning import CreditSettings, LossSettings, OptimSettings, SamplingSettings
from spangrad.settings.trainer_service import CheckpointSettings
from spangrad.store.clickhouse import connect
from trainer.ledger.recovery import newest_version
from trainer.loop import Trainer
from transition_builder.builder import Builder

GROUPS = 4
"""Groups of rollouts in a training step."""
FRESH_ROLLOUTS = 1024
"""Number of new rollouts on which a trained policy is measured."""


@dataclass(frozen=True)
class Arm:
    """One way to train one task."""

    name: str
    task: Task
    credit: str = "identical"
    baseline: str = "rollout"
    rules: tuple[AirRule, ...] = ()
    retokenized: bool = False
    """True if the spans hold token ids that were made by tokenising the text again."""


@dataclass
class Result:
    """Result of one run; lists have one value a step."""

    task: str
    arm: str
    seed: int
    group: int
    steps: int
    success: list[float] = field(default_factory=list[float])
    """Success of the rollouts that each step trains."""
    mean_return: list[float] = field(default_factory=list[float])
    alarms: list[int] = field(default_factory=list[int])
    """Versions at which the alarm of a gamed reward rang."""
    gap: float = 0.0
    """The largest |rollout logprob - trainer logprob| of all steps, in nats."""
    refused: str = ""
    """Error with which the trainer refused a step, which ends the run; empty if it refused none."""
    final: float = 0.0
    """Success of fresh rollouts by the last version."""
    sampled: int = 0
    trained: int = 0
    """Number of rollouts in the store's spangrad_internal.batches."""
    calls: int = 0
    transitions: int = 0
    drops: int = 0
    unaccounted: int = 0
    """Calls that are neither transition nor drop, or both."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage, summed over all steps."""

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)


def run(arm: Arm, seed: int, steps: int, directory: Path, on_step: Callable[[Result], None] = lambda _: None) -> Result:
    """Train from a fresh model, in a fresh store.

    Args:
        arm: task, credit and rules of the run.
        seed: random seed of the model, of sampling and of the tasks.
        steps: number of optimizer steps.
        directory: directory for everything that the run writes.
        on_step: called with the result so far, after each step.
    """
    write_model(directory / "model", arm.task, seed)
    result = Result(arm.task.name, arm.name, seed, arm.task.group, steps)
    with own_store(directory) as store:
        settings = _settings(arm, store, directory, f"{arm.task.name}-{arm.name}-{seed}")
        sampler = Sampler(directory / "model", seed + 77)
        with closing(connect(store)) as client:
            with training(settings, client, sampler) as trainer:
                _Loop(arm, settings, trainer, sampler, Builder(settings), result).run(seed, steps, on_step)
            goals = arm.task.goals(random.Random(seed + 5), FRESH_ROLLOUTS // arm.task.group)
            result.final = success(arm.task, sampler.rollouts(arm.task, goals))
            _account(result, client, settings.trainer.run_id)
    return result


@dataclass
class _Loop:
    """The steps of a run."""

    arm: Arm
    settings: Settings
    trainer: Trainer
    sampler: Sampler
    builder: Builder
    result: Result

    def run(self, seed: int, steps: int, on_step: Callable[[Result], None]) -> None:
        rng = random.Random(seed + 1000)
        author = Author(self.settings.trainer.run_id, self.arm.task, seed)
        poster = Poster(f"{self.settings.store.otlp_endpoint}/v1/traces", {}, None)
        clock = self.result.seconds
        for step in range(steps):
            with clocked(clock, "sample"):
                rollouts = self.sampler.rollouts(self.arm.task, self.arm.task.goals(rng, GROUPS))
            with clocked(clock, "send"):
                send(poster, author.bodies(rollouts, step, {AGENT: self._served()}))
            with clocked(clock, "build"):
                build(self.builder, len(rollouts))
            self.result.success.append(success(self.arm.task, rollouts))
            self.result.sampled += len(rollouts)
            self.result.calls += sum(len(one.calls) for one in rollouts)
            try:
                with clocked(clock, "train"):
                    version = train_step(self.trainer)
            except TrainerError as error:
                self.result.refused = str(error)
                return
            self.result.mean_return.append(round(version.metrics["mean_return"], 4))
            self.result.gap = max(self.result.gap, version.metrics["logprob_gap_max"])
            if version.metrics.get("gaming_alarm"):
                self.result.alarms.append(version.version)
            on_step(self.result)

    def _served(self) -> Served:
        newest = newest_version(self.trainer.ledger)
        return Served(self.settings.trainer.policy, newest.version, newest.tokenizer_hash, self.arm.retokenized)


def _settings(arm: Arm, store: StoreSettings, directory: Path, run_id: str) -> Settings:
    """Return the settings that docs/concepts/credit.md advises."""
    return Settings(
        store=store,
        gateway=GatewaySettings(),
        builder=BuilderSettings(rules=arm.rules),
        trainer=TrainerSettings(
            run_id=run_id,
            model=directory / "model",
            directory=directory / "policies",
            sampling=SamplingSettings(groups_per_batch=GROUPS),
            credit=CreditSettings(scheme=arm.credit, baseline=arm.baseline),  # type: ignore[arg-type]  # pydantic validates them
            optim=OptimSettings(learning_rate=1e-3),
            loss=LossSettings(entropy_coef=arm.task.entropy),
            max_tokens_per_device=1 << 16,  # a step is one micro-batch
            checkpoint=CheckpointSettings(keep=1),
        ),
    )


_COUNTS = """
SELECT
    (SELECT uniqExact(RolloutId) FROM spangrad.batches WHERE RunId = %(run)s),
    (SELECT groupUniqArray(CallId) FROM spangrad.transitions WHERE RunId = %(run)s),
    (SELECT groupUniqArray(CallId) FROM spangrad.drops WHERE RunId = %(run)s)
"""


def _account(result: Result, client: Client, run_id: str) -> None:
    """Set the numbers of trained rollouts, transitions and drops that the store holds of the run."""
    trained, transitions, drops = client.query(_COUNTS, parameters={"run": run_id}).result_rows[0]
    result.trained, result.transitions, result.drops = trained, len(transitions), len(drops)
    result.unaccounted = abs(result.calls - len(set(transitions) | set(drops))) + len(set(transitions) & set(drops))


def success(task: Task, rollouts: Sequence[Sampled]) -> float:
    """Return the mean success of the rollouts."""
    return mean(task.success(one.goal, one.turns()) for one in rollouts)
