"""The loop of an example: measure, train step by step, measure again.

In: an `Example`, a seed, a number of steps. Out: runs/NAME with all that the services wrote, a curve, and a line of JSON. Invariant:
store, engine, gateway, builder and trainer are the real ones, each in a process of its own; this loop puts questions, waits for
versions, and hands the trainer nothing. Held-out questions are put in mode `validate`, which no trainer takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from commands.demo.services import TrainingSupervisor, make_model
from commands.demo.settings import SETTINGS, demo_settings, write_settings
from examples.learning.command import run_command
from examples.learning.example import CHECKOUT, GROUP_SIZE, Example, write_questions
from examples.learning.report import draw, seconds_by_part
from examples.learning.success import success_rate
from runner.runner import Outcome, Runner
from runner.workers.agents import CallableAgent
from spangrad.client.task_files import read_tasks
from spangrad.episode.adapters.references import by_openenv
from spangrad.errors import SpangradError
from spangrad.processes import free_ports
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.supervisor.run_directory import fresh_directory
from spangrad.types import Mode, Task

POLL_SECONDS = 0.25
"""Time between two looks of builder and trainer into the store, in seconds. On two cores each look takes CPU from the agents."""
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables that keep vLLM from taking cores that it does not use. By default it ties each engine to the first of two cores, and a worker
of its own waits for work by spinning: two thirds of its CPU by a profile. The last variable lets the engine's process run the model."""
STAND_IN = 4
"""Number of questions for which one more is drawn, to stand in for a group that failed."""


@dataclass(frozen=True)
class Step:
    """One batch, as the loop saw it."""

    number: int
    success: float
    """Share of its rollouts that answered right."""
    calls: float
    """Model calls a rollout."""
    seconds_rollout: float
    seconds_until_served: float
    """Time from the last rollout's end until the new version answers: build, train, publish."""


def main(example: Example, options: Sequence[str] | None = None, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Run an example by its command line.

    Args:
        example: what to run.
        options: the command line without what `parents` have read. None: the process's own.
        parents: the example's own options, for --help.
    """
    run_command(example.name, example.steps, partial(run, example), options, parents)


def run(example: Example, directory: Path, seed: int, steps: int) -> dict[str, object]:
    """Run an example and return what its last line says."""
    with fresh_directory(directory) as fresh:
        fresh.clear()
        return _run(example, directory, seed, steps)


def _run(example: Example, directory: Path, seed: int, steps: int) -> dict[str, object]:
    began = time.monotonic()
    keep_to_cores()

    def on_event(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    drawn = example.questions(seed, example.groups * (1 + steps + steps // STAND_IN))
    write_questions(directory / "train.jsonl", "train", drawn.train)
    write_questions(directory / "held_out.jsonl", "held-out", drawn.held_out)
    values = example_settings(example, directory, seed, steps)
    engines = _judge(example, directory, values)
    values["gateway.backends"] = [{"url": url, "policy": example.judge} for url in engines.values()]
    settings = load_settings(values)
    write_settings(directory / SETTINGS, explain_settings(values))
    on_event("making the tiny model")
    make_model([sys.executable, "-m", example.model, str(directory / "model"), "--seed", str(seed)], directory)
    with ExitStack() as stack:
        if example.serve is not None:
            example = replace(example, environment=by_openenv(stack.enter_context(example.serve(directory / "logs"))))
        services = stack.enter_context(TrainingSupervisor(directory, settings, on_event, further_engines=engines))
        services.start(settings.engine.start_timeout_seconds)
        before, history, after = asyncio.run(_learn(example, settings, services, directory, steps, on_event))
        parts = seconds_by_part(settings)
    curve = directory / "curve.png"
    draw(curve, example, [step.success for step in history], before, after)
    (directory / "steps.jsonl").write_text("".join(f"{json.dumps(asdict(step))}\n" for step in history))
    report: dict[str, object] = {
        "example": example.name,
        "seed": seed,
        "before": round(before, 4),
        "after": round(after, 4),
        "target": example.target,
        "measure": example.measure,
        "steps": len(history),
        "seconds": round(time.monotonic() - began, 1),
        "seconds_rollout": round(sum(step.seconds_rollout for step in history), 1),
        **parts,
        "curve": str(curve),
    }
    (directory / "report.json").write_text(f"{json.dumps(report)}\n")
    return report


def keep_to_cores() -> None:
    """Keep this process's engines from taking cores that they do not use."""
    for name, value in THREADS.items():
        os.environ.setdefault(name, value)


def example_settings(example: Example, directory: Path, seed: int, steps: int) -> dict[str, object]:
    """The settings of a run, by dotted key: those of the demo, the rates of the three tasks, the example's own."""
    parser = CHECKOUT / "examples" / "learning" / "word_calls.py"
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "words", "--tool-parser-plugin", str(parser)]
    return {
        **demo_settings(directory, seed=seed, group_size=GROUP_SIZE),
        "engine.max_model_len": 256,
        "engine.extra_args": ["--seed", str(seed), "--distributed-executor-backend", "uni", *tools],
        "builder.rules": [],
        "builder.poll_seconds": POLL_SECONDS,
        "trainer.run_id": example.name,
        "trainer.max_steps": steps + 1,  # the trainer stays after the last step, to measure what is served
        "trainer.poll_seconds": POLL_SECONDS,
        "trainer.sampling.groups_per_batch": example.groups,
        "trainer.optim.mini_batches": 1,
        "trainer.optim.warmup_steps": 10,
        "trainer.loss.entropy_coef": 0.01,
        "runner.run_id": example.name,
        "runner.workers": 2,
        "runner.concurrency": 32,
        **example.settings,
    }


def _judge(example: Example, directory: Path, values: Mapping[str, object]) -> dict[str, str]:
    """Write the settings of the engine of the example's judge: file name -> URL. Nothing, where it has none."""
    if example.judge is None:
        return {}
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    own = {"gateway.policy": example.judge, "engine.port": port, "engine.model": str(directory / f"model-{example.judge}")}
    write_settings(directory / f"{example.judge}.toml", explain_settings({**values, **own}))
    return {f"{example.judge}.toml": url}


async def _learn(
    example: Example, settings: Settings, services: TrainingSupervisor, directory: Path, steps: int, on_event: Callable[[str], None]
) -> tuple[float, list[Step], float]:
    """Success on held-out questions, the steps, and success on the same questions after them."""
    agent = CallableAgent(example.agent, evaluator=example.evaluator, environment=example.environment, directory=CHECKOUT)
    questions, held_out = iter(read_tasks(directory / "train.jsonl")), read_tasks(directory / "held_out.jsonl")
    history: list[Step] = []
    async with Runner(settings, agent) as runner:

        async def measured() -> float:
            return await success_rate(example, settings, await runner.run(held_out, mode=Mode.VALIDATE, group_size=1))

        before = await measured()
        on_event(f"held-out success {before:.3f} before training")
        for number in range(steps):
            version, began = services.served(), time.monotonic()
            outcomes = await _one_batch(runner, questions, example.groups)
            rolled_out = time.monotonic()
            await services.wait_for_version(version + 1)
            done = time.monotonic()
            calls = sum(outcome.calls or 0 for outcome in outcomes) / len(outcomes)
            success = await success_rate(example, settings, outcomes)
            step = Step(number, success, calls, rolled_out - began, done - rolled_out)
            history.append(step)
            on_event(
                f"step {number:3d}  success {step.success:.2f}  calls {step.calls:.2f}  rollouts {step.seconds_rollout:.1f} s"
                f"  build, train, publish {step.seconds_until_served:.1f} s"
            )
        after = await measured() if steps else before
        on_event(f"held-out success {after:.3f} after {steps} steps")
    return before, history, after


async def _one_batch(runner: Runner, questions: Iterator[Task], groups: int) -> list[Outcome]:
    """Roll out until as many whole groups are there as a step takes: a group of which a rollout failed is never trained."""
    outcomes: list[Outcome] = []
    missing = groups
    while missing:
        ran = await runner.run(list(islice(questions, missing)), mode=Mode.TRAIN, group_size=GROUP_SIZE)
        if not ran:
            raise SpangradError("too many groups failed: no questions are left. Look into the run's logs.")
        outcomes += ran
        missing = len({outcome.task_id for outcome in ran if outcome.failure and outcome.reward is None})
    return outcomes
