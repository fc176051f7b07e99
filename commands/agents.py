"""Which agent a command line names; shared by `spangrad run` and `spangrad worker`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spangrad.errors import AgentError
from spangrad.types import Task

if TYPE_CHECKING:
    from runner.agents import AgentSpec

Command = Annotated[str, Parameter(allow_leading_hyphen=True)]


def agent_spec(
    command: tuple[str, ...], agent: str | None, evaluator: str | None, directory: Path, *, instrument: bool, environment: str | None = None
) -> AgentSpec:
    """The agent that is named.

    Raises:
        AgentError: none is, or two are.
    """
    from runner.agents import CallableAgent, CommandAgent

    if bool(agent) == bool(command):
        raise AgentError("name one agent: --agent MODULE:FUNCTION, or a command after `--`.")
    if agent:
        return CallableAgent(agent, evaluator=evaluator, environment=environment, directory=directory)
    return CommandAgent(command, evaluator=evaluator, environment=environment, directory=directory, instrument=instrument)


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


def on_signals(act: Callable[[], object]) -> None:
    """Do something at the first SIGTERM or SIGINT; the second one has its usual effect."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        act()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, once)
