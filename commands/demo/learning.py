"""The demo's training loop: run a batch of rollouts, wait until the gateway serves the version trained on it, record the step, repeat.

Invariant: rollouts reach the trainer only through the span store; the loop passes nothing to the trainer itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from collector.otelcol import find_binary
from commands.console import plain_console
from commands.demo.report import DemoStep, conclude
from commands.demo.services import TrainingSupervisor
from commands.demo.settings import SETTINGS, collector_settings, demo_settings, direct_mode_settings, write_settings
from runner.runner import Outcome, Runner
from runner.workers.agents import CallableAgent
from spangrad import semconv
from spangrad.agent.reward_values import total
from spangrad.client.task_files import read_tasks
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.supervisor.run_directory import fresh_directory
from spangrad.types import Mode, Task

TARGET_BATCHES = 3
"""Batches over which the success rate is averaged before it is compared with the target."""


@dataclass(frozen=True)
class DemoPlan:
    """Arguments of one run of the demo."""

    example: Path
    directory: Path
    seed: int
    max_steps: int
    target: float
    group_size: int
    otelcol: bool
    """True if spans go through the real OpenTelemetry Collector."""
    gateway: bool
    """True if the agent's calls go through the gateway, False if they go to vLLM directly."""


@dataclass
class History:
    """Steps of the run so far, and the start of its clock."""

    started: float = field(default_factory=time.monotonic)
    steps: list[DemoStep] = field(default_factory=list)

    def reached(self, target: float) -> bool:
        """Return whether the mean success rate of the last TARGET_BATCHES batches is at least the target."""
        last = self.steps[-TARGET_BATCHES:]
        return len(last) == TARGET_BATCHES and sum(step.success for step in last) / len(last) >= target


def learn(plan: DemoPlan, flags: Mapping[str, object], config: Path | None) -> None:
    """Run the demo from start to report."""
    with fresh_directory(plan.directory) as run:
        run.clear()
        _learn(plan, flags, config)


def _learn(plan: DemoPlan, flags: Mapping[str, object], config: Path | None) -> None:
    console = plain_console(highlight=False)
    tasks = read_tasks(plan.example / "tasks.jsonl")
    otelcol = find_binary(os.environ) if plan.otelcol else None
    defaults = demo_settings(plan.directory, seed=plan.seed, group_size=plan.group_size)
    collected = collector_settings(plan.directory) if otelcol else {}
    direct = {} if plan.gateway else direct_mode_settings(otelcol=plan.otelcol)
    values = {**defaults, **collected, **direct, **flags}
    settings = load_settings(values, file=config)
    write_settings(plan.directory / SETTINGS, explain_settings(values, file=config))
    history = History()

    def on_event(text: str) -> None:
        console.print(f"{_clock(history)} {text}", style="dim")

    model = [sys.executable, str(plan.example / "model.py"), str(plan.directory / "model"), "--seed", str(plan.seed)]
    with TrainingSupervisor(plan.directory, settings, on_event, otelcol, model=model) as services:
        services.start(settings.engine.start_timeout_seconds)
        held_out = asyncio.run(_loop(plan, settings, services, history, tasks, console))
        conclude(plan.directory, settings, services, history.steps, held_out, plan.seed, history.started, console)


async def _loop(
    plan: DemoPlan, settings: Settings, services: TrainingSupervisor, history: History, tasks: Sequence[Task], console: Console
) -> float:
    """Train until the target is reached, then return the last version's success rate on held-out rollouts, which are never trained."""
    agent = CallableAgent("agent:agent", evaluator="task:evaluate", directory=plan.example)
    # If off-policy calls may be trained, rollouts continue during the training step.
    on_policy = settings.trainer.sampling.max_staleness == 0
    async with Runner(settings, agent) as runner:
        with _progress(console) as progress:
            bar = progress.add_task("training", total=plan.max_steps)
            while _trained(history, version := services.served(), on_policy) < plan.max_steps and not history.reached(plan.target):
                began = time.monotonic()
                outcomes = await runner.run(tasks, mode=Mode.TRAIN, group_size=plan.group_size)
                rolled_out = time.monotonic()
                if on_policy:
                    await services.wait_for_version(version + 1)
                step = DemoStep(
                    number=len(history.steps),
                    version=version,
                    success=success_rate(outcomes),
                    mean_reward=_mean([total(outcome.reward) for outcome in outcomes if outcome.reward]),
                    rollouts=len(outcomes),
                    calls=sum(outcome.calls or 0 for outcome in outcomes) if plan.gateway else None,
                    seconds_rollout=rolled_out - began,
                    seconds_until_served=time.monotonic() - rolled_out,
                )
                history.steps.append(step)
                progress.console.print(step.line(_clock(history)), soft_wrap=True)
                progress.update(bar, completed=_trained(history, services.served(), on_policy), description=f"success {step.success:.2f}")
        return success_rate(await runner.run(tasks, mode=Mode.VALIDATE, group_size=plan.group_size))


def _trained(history: History, served: int, on_policy: bool) -> int:
    """Return the number of training steps so far; on policy, each batch is one step."""
    return len(history.steps) if on_policy else max(served, 0)


def success_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the share of rollouts whose final reward is 1; a failed rollout counts as unsuccessful."""
    return _mean([float((outcome.reward or {}).get(semconv.REWARD_NAME) == 1.0) for outcome in outcomes])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _clock(history: History) -> str:
    return f"{time.monotonic() - history.started:6.1f} s"


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
