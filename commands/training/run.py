"""`spangrad run`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.training.agents import Command, agent_spec, on_signals
from spangrad.agent.reward_values import total
from spangrad.errors import AgentError
from spangrad.types import Mode, Task

if TYPE_CHECKING:
    from runner.runner import Outcome
    from runner.workers.agents import AgentSpec
    from spangrad.settings import RunnerSettings, Settings

_LINE = 200
"""Characters of a line that an agent has said."""


def run(
    *command: Command,
    tasks: str | None = None,
    agent: str | None = None,
    evaluator: str | None = None,
    environment: str | None = None,
    directory: Path = Path(),
    instrument: bool = False,
    image: str | None = None,
    mode: Mode = Mode.TRAIN,
    group_size: int | None = None,
    run_id: str | None = None,
    resume: bool = False,
    follow_demand: bool = False,
    seed: int = 0,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run an agent on tasks, several rollouts a task.

    Args:
        command: after `--`: a program that reads a task's input as JSON on stdin; its last line of output is its answer. Or FILE.py, in
            which a function is decorated with @spangrad.rollout.
        tasks: FILE.jsonl of lines {"task_id": ..., "input": ...}, FILE.parquet, DIRECTORY[:SPLIT] that Dataset.save_to_disk wrote,
            hf:OWNER/NAME[:SPLIT] on Hugging Face's hub, or queue:NAME, which a client has uploaded. Needed unless --resume.
        agent: a Python callable, as MODULE:FUNCTION or FILE.py:FUNCTION, instead of a command.
        evaluator: MODULE:FUNCTION or FILE.py:FUNCTION that is given (input, output) and returns the reward, or the URL of a reward service.
        environment: MODULE:FUNCTION that is given the input and makes what the agent works in, or the URL of a service that leases such.
        directory: where the agent's modules, or its program's files, are.
        instrument: start the command under opentelemetry-instrument.
        image: a container image that is such a program, instead of a command; what stands after `--` is then given to it.
        mode: what the rollouts are for.
        group_size: rollouts a task.
        run_id: the run that the rollouts belong to.
        resume: finish what a process that was killed has left of the run, instead of beginning anything.
        follow_demand: run tasks, in an order of the seed's, as long as trainers want groups of the run: the queue at runner.queue_url
            tells how many. Ends at SIGTERM, as a worker does.
        seed: of the order in which --follow-demand takes tasks.
    """
    settings = resolve(config, set_, {"runner.group_size": group_size, "runner.run_id": run_id})
    log_to_stderr()
    if resume != (tasks is None):
        raise AgentError(
            "give --tasks FILE, or --resume: what a process that was killed has left is finished before anything new is begun."
        )
    if follow_demand and (tasks is None or settings.runner.queue_url is None):
        raise AgentError("--follow-demand needs --tasks FILE, and runner.queue_url: the queue that trainers tell what they want.")
    spec = agent_spec(command, agent, evaluator, directory, settings.runner, instrument=instrument, image=image, environment=environment)
    read = None if tasks is None else _read(tasks, settings.runner)
    if follow_demand and read is not None:
        asyncio.run(_follow(settings, spec, read, seed))
        return
    try:
        outcomes = asyncio.run(_run(settings, spec, read, mode))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    _show(outcomes)
    _explain(outcomes, settings.runner)
    if outcomes and all(outcome.failure for outcome in outcomes):
        sys.exit(1)


def _read(tasks: str, runner: RunnerSettings) -> list[Task]:
    from spangrad.client.task_files import read_tasks
    from spangrad.client.task_store import STORED, TaskStore

    return TaskStore.of(runner).read(tasks.removeprefix(STORED)) if tasks.startswith(STORED) else read_tasks(tasks)


async def _follow(settings: Settings, spec: AgentSpec, tasks: Sequence[Task], seed: int) -> None:
    from runner.runner import Runner

    ending = asyncio.Event()
    on_signals(ending.set)
    async with Runner(settings, spec) as runner:
        await runner.follow(tasks, ending, seed=seed)


async def _run(settings: Settings, spec: AgentSpec, tasks: Sequence[Task] | None, mode: Mode) -> list[Outcome]:
    """Run tasks; None: finish what is left."""
    from rich.progress import Progress

    from commands.console import plain_console
    from runner.runner import Runner
    from spangrad.greedy_baseline import wants_greedy

    task = asyncio.current_task()
    assert task is not None
    # As asyncio does on SIGINT: root spans are ended and sent, and agents' processes end.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Runner(settings, spec, resume=tasks is None) as runner:
        size = settings.runner.group_size
        with Progress(console=plain_console()) as progress:
            total = len(await runner.waiting()) if tasks is None else len(tasks) * (size + wants_greedy(settings, mode))
            bar = progress.add_task("rollouts", total=total)

            def one(outcome: Outcome) -> None:
                progress.update(bar, advance=1)

            if tasks is None:
                return await runner.finish(one)
            return await runner.run(tasks, mode=mode, group_size=size, progress=one)


def _show(outcomes: Sequence[Outcome]) -> None:
    from rich.table import Table

    from commands.console import plain_console

    greedy = ["greedy"] if any(outcome.mode is Mode.GREEDY for outcome in outcomes) else []
    table = Table("task", "rollouts", "mean reward", *greedy, "failed", "calls", box=None, pad_edge=False)
    for task_id in dict.fromkeys(outcome.task_id for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.task_id == task_id]
        table.add_row(
            task_id,
            str(len(own)),
            _mean([one for one in own if one.mode is not Mode.GREEDY]),
            *([_mean([one for one in own if one.mode is Mode.GREEDY])] if greedy else []),
            str(sum(outcome.failure is not None for outcome in own)),
            str(sum(outcome.calls or 0 for outcome in own)),
        )
    plain_console().print(table)


def _explain(outcomes: Sequence[Outcome], runner: RunnerSettings) -> None:
    """Print why rollouts failed, a line a reason with one rollout as its example; and that agents made no calls, where none did."""
    failed = [outcome for outcome in outcomes if outcome.failure]
    for reason, count in Counter(outcome.failure for outcome in failed).most_common():
        example = next(outcome for outcome in failed if outcome.failure is reason)
        rollout_id = example.key.rollout_id
        print(f"{count} failed, {reason}: {_what_happened(example, runner)}; `spangrad rollout show {rollout_id}` tells more")
    if len(failed) < len(outcomes) and all(outcome.calls == 0 for outcome in outcomes):
        print("no rollout called the policy: agents find the gateway in OPENAI_BASE_URL, or in their argument `endpoint`")


def _what_happened(outcome: Outcome, runner: RunnerSettings) -> str:
    """The first and the last line of what is known of a failed attempt, what it printed included."""
    from runner.workers.attempt_files import AttemptFiles

    kept = AttemptFiles(runner.directory, runner.attempts_kept).kept(outcome.key.rollout_id)
    logs = [one.log for one in kept if one.attempt == outcome.key.attempt and one.log]
    lines = [line.strip() for text in (outcome.detail, *(log.read_text(errors="replace") for log in logs)) for line in text.splitlines()]
    told = [line for line in lines if line]
    return ": ".join(line[:_LINE] for line in dict.fromkeys((*told[:1], *told[-1:])))


def _mean(outcomes: Sequence[Outcome]) -> str:
    returns = [total(outcome.reward) for outcome in outcomes if outcome.reward]
    return f"{sum(returns) / len(returns):+.3f}" if returns else "-"
