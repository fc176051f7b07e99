"""`spangrad run`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from spangrad.errors import AgentError
from spangrad.types import Mode, Task

if TYPE_CHECKING:
    from runner.agents import AgentSpec
    from runner.runner import Outcome
    from spangrad.settings import Settings


def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    tasks: Path,
    agent: str | None = None,
    evaluator: str | None = None,
    directory: Path = Path(),
    instrument: bool = False,
    mode: Mode = Mode.TRAIN,
    group_size: int | None = None,
    run_id: str | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run an agent on tasks, several rollouts a task.

    Args:
        command: after `--`: a program that reads a task's input as JSON on stdin; its last line of output is its answer.
        tasks: file of JSON lines, each {"task_id": ..., "input": ...}.
        agent: a Python callable, as MODULE:FUNCTION, instead of a command.
        evaluator: MODULE:FUNCTION that is given (input, output) and returns the reward.
        directory: where the agent's modules, or its program's files, are.
        instrument: start the command under opentelemetry-instrument.
        mode: what the rollouts are for.
        group_size: rollouts a task.
        run_id: the run that the rollouts belong to.
    """
    settings = resolve(config, set_, {"runner.group_size": group_size, "runner.run_id": run_id})
    log_to_stderr()
    from runner.agents import CallableAgent, CommandAgent

    if bool(agent) == bool(command):
        raise AgentError("name one agent: --agent MODULE:FUNCTION, or a command after `--`.")
    spec = (
        CallableAgent(agent, evaluator=evaluator, directory=directory)
        if agent
        else CommandAgent(command, evaluator=evaluator, directory=directory, instrument=instrument)
    )
    try:
        outcomes = asyncio.run(_run(settings, spec, read_tasks(tasks), mode))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    _show(outcomes)


async def _run(settings: Settings, spec: AgentSpec, tasks: Sequence[Task], mode: Mode) -> list[Outcome]:
    from rich.progress import Progress

    from runner.groups import wants_greedy
    from runner.runner import Runner

    task = asyncio.current_task()
    assert task is not None
    # As asyncio does on SIGINT: root spans are ended and sent, and agents' processes end.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Runner(settings, spec) as runner:
        with Progress() as progress:
            total = len(tasks) * (settings.runner.group_size + wants_greedy(settings, mode))
            bar = progress.add_task("rollouts", total=total)
            return await runner.run(
                tasks, mode=mode, group_size=settings.runner.group_size, progress=lambda _: progress.update(bar, advance=1)
            )


def read_tasks(path: Path) -> list[Task]:
    """Read tasks from JSON lines.

    Raises:
        AgentError: the file is missing, or a line is not a task.
    """
    if not path.is_file():
        raise AgentError(f"--tasks {path} is no file. Give JSON lines, each {{'task_id': ..., 'input': ...}}.")
    tasks: list[Task] = []
    for number, line in enumerate(path.read_text().split("\n"), 1):  # splitlines() would cut JSON at U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tasks.append(Task(str(row["task_id"]), row["input"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise AgentError(f"{path}, line {number} is not a task ({error!r}): each line is {{'task_id': ..., 'input': ...}}.") from None
    if not tasks:
        raise AgentError(f"--tasks {path} holds no task.")
    return tasks


def _show(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

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
    Console().print(table)


def _mean(outcomes: Sequence[Outcome]) -> str:
    returns = [sum(outcome.reward.values()) for outcome in outcomes if outcome.reward]
    return f"{sum(returns) / len(returns):+.3f}" if returns else "-"
