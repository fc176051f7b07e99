"""The agent that a command line names, and the handling of signals, shared by `spangrad run` and `spangrad worker`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from commands.options import require_directory
from spangrad.callables import is_file, require, split
from spangrad.errors import AgentError
from spangrad.settings import RunnerSettings
from spangrad.settings.runner import HandlerSettings

if TYPE_CHECKING:
    from runner.workers.agents import AgentsBySource, AgentSpec

T = TypeVar("T")
_DIRECTORY = "the directory of the agent's modules, or of its program's files"
ProgramArguments = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""Words after an agent's program. The program itself has no leading hyphen unless `--` is before it: the parser refuses unknown options."""


def command_of(program: str | None, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line from its program on. Empty: it names no program."""
    return () if program is None else (program, *arguments)


@Parameter(name="*")
@dataclass(frozen=True)
class AgentOptions:
    """Options of commands that run an agent: a callable or an image in place of a program, and the parts that belong to the agent."""

    agent: Annotated[
        str | None, Parameter(help="Python callable of the agent, as MODULE:FUNCTION or FILE.py:FUNCTION, instead of a command.")
    ] = None
    evaluator: Annotated[
        str | None,
        Parameter(
            help="MODULE:FUNCTION or FILE.py:FUNCTION that is called with (input, output) and returns the reward, or URL of a reward "
            "service."
        ),
    ] = None
    environment: Annotated[
        str | None,
        Parameter(
            help="MODULE:CLASS with reset(task) and step(action), gymnasium:ID, or URL of a server of such environments, joined by commas "
            "where there are several: they need no agent, since the policy's replies are the actions. For an agent: MODULE:FUNCTION that "
            "is called with the input and returns its environment, or URL of a service that leases environments."
        ),
    ] = None
    directory: Annotated[Path, Parameter(help="directory of the agent's modules, or of its program's files.")] = Path()
    instrument: Annotated[bool, Parameter(help="start the command under opentelemetry-instrument.")] = False
    image: Annotated[
        str | None,
        Parameter(help="container image of the agent, instead of a command; the words after `--` are then its arguments."),
    ] = None


def handler_of(program: str | None, arguments: Sequence[str], options: AgentOptions | None) -> HandlerSettings:
    """Return the agent of a command line as the settings of a handler.

    Raises:
        SettingsError: its directory does not exist.
    """
    options = options or AgentOptions()
    require_directory("--directory", options.directory, _DIRECTORY)
    return HandlerSettings(command=list(command_of(program, arguments)), **asdict(options))


def agent_spec(handler: HandlerSettings, runner: RunnerSettings) -> AgentSpec:
    """Return the agent that a handler's settings name: a callable, a container image (which gets the command as arguments), or a command.

    An environment without any of them is played by the agent without code. A command of one word that ends in `.py`, or in `.py:FUNCTION`,
    names a file with a callable.

    Raises:
        AgentError: they name no agent, or several; or a file does not exist.
    """
    from runner.workers.agents import CallableAgent, CommandAgent, ContainerAgent, is_service
    from spangrad.episode.adapters.references import by_openenv, names_environment
    from spangrad.episode.agent import REFERENCE

    command, agent, image, environment, directory = handler.command, handler.agent, handler.image, handler.environment, handler.directory
    if command and not command[0]:
        raise AgentError("the agent's program is an empty word. Name a program, and give its arguments after it.")
    if agent is None and image is None and len(command) == 1 and is_file(command[0]):
        agent, command = command[0], []
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
    functions = {name: located(word, directory) for name in ("evaluator", "on_failure") if (word := getattr(handler, name))}
    common: dict[str, Any] = {**functions, "environment": environment, "directory": directory}
    if agent:
        return CallableAgent(located(agent, directory), **common)
    if not image:
        return CommandAgent(tuple(command), instrument=handler.instrument, **common)
    return ContainerAgent(image, tuple(command), container=runner.container, **common)


def agents_of(runner: RunnerSettings, handler: HandlerSettings) -> AgentSpec | AgentsBySource:
    """Return the agent that a command line names; if it names none, the agents of `runner.handlers` by data source.

    Raises:
        AgentError: as `agent_spec`.
        SettingsError: the directory of a handler does not exist.
    """
    if runner.handlers and not (handler.command or handler.agent or handler.image or handler.environment):
        if handler.evaluator is not None or handler.instrument:
            raise AgentError("--evaluator and --instrument belong to an agent: name one, or set them in runner.handlers.")
        return {source: _of_source(runner, source) for source in runner.handlers}
    return agent_spec(handler, runner)


def require_loadable(agents: AgentSpec | AgentsBySource, runner: RunnerSettings) -> None:
    """Refuse agents that cannot be loaded, before anything is waited for: modules are looked for, and not imported.

    Raises:
        AgentError: there is no such module, function, program or container engine.
    """
    if isinstance(agents, Mapping):
        for source, agent in agents.items():
            try:
                require_loadable(agent, runner.of_handler(source))
            except AgentError as error:
                raise AgentError(f"runner.handlers.{source}: {error}") from error
        return
    from runner.workers.agents import CallableAgent, CommandAgent, is_service
    from spangrad.agent.command import command_line
    from spangrad.agent.container import require_engine
    from spangrad.episode.adapters.references import names_environment

    directory = agents.directory.resolve()
    if isinstance(agents, CommandAgent):
        command_line(agents.command, directory, instrument=agents.instrument, in_image=runner.sandbox.image is not None)
    elif not isinstance(agents, CallableAgent):
        require_engine(agents.container.engine)
    callables = [agents.agent] if isinstance(agents, CallableAgent) else []
    for reference in (*callables, agents.evaluator, agents.environment, agents.on_failure):
        if reference is not None and not is_service(reference) and not names_environment(reference):
            require(reference, directory)


def _of_source(runner: RunnerSettings, source: str) -> AgentSpec:
    handler = runner.handlers[source]
    require_directory(f"runner.handlers.{source}.directory =", handler.directory, _DIRECTORY)
    try:
        return agent_spec(handler, runner.of_handler(source))
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
    raise AgentError(f"{module} is no file{'' if directory == Path() else f', neither here nor in {directory}'}. Name one that exists.")


def run_until_sigterm(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, which SIGTERM cancels as Ctrl-C does: root spans are ended, agents' processes stopped, and the process exits."""

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


def end_signal() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second signal has its usual effect."""
    ending, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return ending
