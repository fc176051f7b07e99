"""The agent that a command line names, and the handling of signals, shared by `spangrad run` and `spangrad worker`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spangrad.callables import is_file, split
from spangrad.errors import AgentError
from spangrad.settings import RunnerSettings

if TYPE_CHECKING:
    from runner.workers.agents import AgentsBySource, AgentSpec

ProgramArguments = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""Words after an agent's program. The program itself has no leading hyphen unless `--` is before it: the parser refuses unknown options."""


def command_of(program: str | None, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line from its program on. Empty: it names no program."""
    return () if program is None else (program, *arguments)


def agent_spec(
    command: tuple[str, ...],
    agent: str | None,
    evaluator: str | None,
    directory: Path,
    runner: RunnerSettings,
    *,
    instrument: bool,
    image: str | None = None,
    environment: str | None = None,
) -> AgentSpec:
    """Return the agent that the arguments name: a callable, a container image (which gets the command as arguments), or a command.

    An environment without any of them is played by the agent without code. A command of one word that ends in `.py`, or in `.py:FUNCTION`,
    names a file with a callable.

    Raises:
        AgentError: the arguments name no agent, or several; or a file or the directory does not exist.
    """
    from runner.workers.agents import CallableAgent, CommandAgent, ContainerAgent, is_service
    from spangrad.episode.adapters.references import by_openenv, names_environment
    from spangrad.episode.agent import REFERENCE

    if not directory.is_dir():
        raise AgentError(f"{directory} is no directory. Name the one of the agent's modules, or of its program's files.")
    if command and not command[0]:
        raise AgentError("the agent's program is an empty word. Name a program, and give its arguments after it.")
    evaluator = None if evaluator is None else located(evaluator, directory)
    if agent is None and image is None and len(command) == 1 and is_file(command[0]):
        agent, command = command[0], ()
    elif image is None and len(command) > 1 and _names_function(command[0], directory):
        raise AgentError(
            f"{command[0]} is followed by {command[1]!r}, and a file whose function is called gets no arguments. Fix the option's name; or "
            f"run the file as a program, after `--`: python {split(command[0])[0]} ARGUMENTS."
        )
    if environment is not None and not (agent or image or command):
        environment = by_openenv(environment)
    if environment is not None and not is_service(environment):
        environment = environment if names_environment(environment) else located(environment, directory)
        agent = agent or (None if image or command else REFERENCE)
    if sum(map(bool, (agent, image, command and not image))) != 1:
        raise AgentError("name one agent: FILE.py, --agent MODULE:FUNCTION, --image IMAGE, a command after `--`, or only --environment.")
    if agent:
        return CallableAgent(located(agent, directory), evaluator=evaluator, environment=environment, directory=directory)
    if not image:
        return CommandAgent(command, evaluator=evaluator, environment=environment, directory=directory, instrument=instrument)
    return ContainerAgent(image, command, evaluator=evaluator, environment=environment, directory=directory, container=runner.container)


def agents_of(
    settings: RunnerSettings,
    command: tuple[str, ...],
    agent: str | None,
    evaluator: str | None,
    directory: Path,
    *,
    instrument: bool,
    image: str | None = None,
    environment: str | None = None,
) -> AgentSpec | AgentsBySource:
    """Return the agent that the arguments name; if they name none, the agents of `runner.handlers` by data source.

    Raises:
        AgentError: as `agent_spec`.
    """
    if settings.handlers and not (command or agent or image or environment):
        if evaluator is not None or instrument:
            raise AgentError("--evaluator and --instrument belong to an agent: name one, or set them in runner.handlers.")
        return {source: _of_handler(settings, source) for source in settings.handlers}
    return agent_spec(command, agent, evaluator, directory, settings, instrument=instrument, image=image, environment=environment)


def _of_handler(settings: RunnerSettings, source: str) -> AgentSpec:
    """Return the agent of a handler."""
    handler = settings.handlers[source]
    try:
        spec = agent_spec(
            tuple(handler.command),
            handler.agent,
            handler.evaluator,
            handler.directory,
            settings.of_handler(source),
            instrument=handler.instrument,
            image=handler.image,
            environment=handler.environment,
        )
        return replace(spec, on_failure=handler.on_failure and located(handler.on_failure, handler.directory))
    except AgentError as error:
        raise AgentError(f"runner.handlers.{source}: {error}") from error


def _names_function(word: str, directory: Path) -> bool:
    """Return whether a word names a function of a file, or a file that no shell would run by that name."""
    file, function = split(word)
    return is_file(word) and (function is not None or ("/" not in file and any((place / file).is_file() for place in (directory, Path()))))


def located(reference: str, directory: Path) -> str:
    """Return a reference with the absolute path of its file, if it names one: in the agent's directory, else in the working directory.

    Raises:
        AgentError: the file does not exist.
    """
    module, function = split(reference)
    if not is_file(reference):
        return reference
    for file in (directory / module, Path(module)):
        if file.is_file():
            return str(file.resolve()) + (f":{function}" if function is not None else "")
    raise AgentError(f"{module} is no file{'' if directory == Path() else f', neither here nor in {directory}'}. Name the agent's file.")


def on_signals(act: Callable[[], object]) -> None:
    """Call a function at the first SIGTERM or SIGINT; a second signal has its usual effect."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        act()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, once)
