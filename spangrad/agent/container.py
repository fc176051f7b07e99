"""Agents that are container images: one container for each attempt, started by the container engine's own command line.

In: a task's input, as JSON on the container's standard input. Out: the last line of its standard output, as of a program. Invariant: the
container ends with its attempt. Killing the engine's command line does not kill the container, so a container whose attempt did not end by
itself is removed by its name; those of a host that was killed are found by their labels.

The container gets the same variables as a program: OTEL_*, OPENAI_* and TRACEPARENT, TRACESTATE, BAGGAGE, its prompt and its
environment. They are passed by name, so that no token appears on a command line.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import baggage

from spangrad.agent.command import ADDRESSED, AgentCommand, ExitCode, ProgramFailure, passed_variables, system_errors, variables_of
from spangrad.errors import AgentError
from spangrad.http.service import in_url
from spangrad.processes import MARK
from spangrad.semconv import ROLLOUT_ATTEMPT, ROLLOUT_ID, RUN_ID
from spangrad.types import AttemptFailure

LABEL_HOST = "spangrad.host"
"""Label of a container: the mark of the agent host that started it."""
LABEL_WORKER = "spangrad.worker"
"""Label of a container: the worker of that host, as `spangrad.leases.this_process` names it."""
_ADDRESS = re.compile(r"\bhttps?://[^\s,;'\"]+")
_REMOVE_SECONDS = 30.0
_ENGINE_FAILED = 125
"""Exit code of the engine's command line where no container was started."""
_MEANINGS = {
    126: "the image's command is there and cannot be run",
    127: "the image has no such command",
    137: "the container was killed by SIGKILL, by a user or because it exceeded its memory limit",
}

_running: dict[str, str] = {}
"""Containers of the running attempts: name -> the engine that runs it."""
os.register_at_fork(after_in_child=_running.clear)


@dataclass(frozen=True, slots=True)
class Container:
    """A container image, and how it is run; in JSON an argument of the agent host."""

    engine: str
    """Container engine: docker, podman, or another program that takes docker's arguments."""
    image: str
    command: Sequence[str]
    """Command after the image's name. Empty: the image's own command."""
    network: str
    """Network that the container is attached to."""
    arguments: Sequence[str]
    """Further arguments of `run`."""
    address: str | None
    """Address at which the container reaches the services of this machine's loopback. None: the same address."""


def reached_at(engine: str, network: str, platform: str = sys.platform) -> str | None:
    """Return the address at which a container reaches this machine. None: it shares this machine's network."""
    if network == "host" and platform == "linux":
        return None
    return "host.containers.internal" if Path(engine).name == "podman" else "host.docker.internal"


def require_engine(engine: str) -> None:
    """Refuse a container engine whose program was not found.

    Raises:
        AgentError: it is not in PATH.
    """
    if shutil.which(engine) is None:
        raise AgentError(f"the container engine {engine!r} is not in PATH. Install it, or name one: runner.container.engine.")


class AgentContainer(AgentCommand):
    """An agent in the form of a container image."""

    def __init__(self, container: Container, directory: Path, worker: str, *, on_group: Callable[[int, bool], None] | None = None) -> None:
        """`directory` is where the engine's command line runs, `worker` is a label's value; `on_group` as for `AgentCommand`.

        Raises:
            AgentError: the engine's program was not found.
        """
        self._container = container
        self._worker = worker
        require_engine(container.engine)
        super().__init__([container.engine], directory, instrument=False, on_group=on_group)

    async def __call__(self, given: object, endpoint: str | None, environment: object = None, image: str | None = None) -> object:
        """Run a container once, of the image that the attempt names, if it does.

        Raises:
            ExitCode: the agent in the container failed.
            ProgramFailure: the engine started no container, the system could not run its command line, or the last line is too long.
            PromptError: the prompt of the attempt could not be fetched, or is too long for a variable.
        """
        name = f"spangrad-{uuid.uuid4().hex}"
        container = self._container if image is None else replace(self._container, image=image)
        with system_errors(self._container.engine):
            variables = reachable(await variables_of(endpoint, environment), self._container.address)
        ended = False
        _running[name] = self._container.engine
        try:
            output = await self._run(given, run_command(container, name, variables, self._labels(variables)), variables)
            ended = True
            return output
        except ExitCode as error:
            ended = error.code > 0 and error.code not in {_ENGINE_FAILED, *_MEANINGS}
            if error.code == _ENGINE_FAILED:
                raise ProgramFailure(
                    AttemptFailure.CRASH,
                    f"the container engine {container.engine!r} started no container of {container.image!r}: "
                    "the attempt's log has the reason (no such image, no daemon, a wrong argument)",
                ) from None
            raise ExitCode(error.code, _MEANINGS.get(error.code, "")) from None
        finally:
            if not ended:  # a container that ended by itself is removed by the engine (--rm)
                with system_errors(self._container.engine):
                    await asyncio.shield(asyncio.to_thread(remove, self._container.engine, [name]))
            _running.pop(name, None)

    def _labels(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the container's labels: the current attempt, by its baggage, its worker and its host."""
        carried = baggage.get_all()
        attempt = {key: str(carried[key]) for key in (RUN_ID, ROLLOUT_ID, ROLLOUT_ATTEMPT) if key in carried}
        return {**attempt, LABEL_WORKER: self._worker, LABEL_HOST: variables.get(MARK, "")}


def run_command(container: Container, name: str, environment: Mapping[str, str], labels: Mapping[str, str]) -> list[str]:
    """Return the engine's command line for one attempt."""
    return [
        container.engine, "run", "--rm", "--interactive", "--name", name, "--network", container.network,
        *[word for key, value in labels.items() for word in ("--label", f"{key}={value}")],
        *[word for key in passed_variables(environment) for word in ("--env", key)],
        *container.arguments, container.image, *container.command,
    ]  # fmt: skip


def reachable(environment: Mapping[str, str], address: str | None) -> dict[str, str]:
    """Return the environment, with this machine's loopback addresses as the container sees them."""
    if address is None:
        return dict(environment)
    return {key: _replace_loopback(value, address) if ADDRESSED.fullmatch(key) else value for key, value in environment.items()}


def _replace_loopback(text: str, address: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        try:
            host = urlsplit(match[0]).hostname or ""
            is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:  # no address at all, or a name
            return match[0]
        return match[0].replace(in_url(host), address, 1) if is_loopback else match[0]

    return _ADDRESS.sub(replacement, text)


def remove(engine: str, names: list[str]) -> None:
    """Kill and remove containers, also those that were created and never started; missing ones are ignored."""
    if not names:
        return
    try:
        subprocess.run(**_removal(engine, names), timeout=_REMOVE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"spangrad: the containers {', '.join(names)} may still run ({error})", file=sys.stderr)


def remove_running() -> None:
    """Start the removal of the containers of all running attempts, without waiting; safe to call in a signal handler."""
    for name, engine in list(_running.items()):
        with suppress(OSError):  # the next worker's start removes it
            subprocess.Popen(**_removal(engine, [name]))


def _removal(engine: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the process that kills and removes containers; without the mark it is not killed together with the host."""
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return {"args": [engine, "rm", "--force", "--volumes", *names], "env": environment, "start_new_session": True, **nowhere}
