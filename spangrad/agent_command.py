"""Runs an agent that is a whole program: one process an attempt, told everything by its environment and its input.

In: a task's input, as JSON on the program's standard input. Out: the last line of its standard output, parsed as JSON where it is
JSON, else as text. Invariant: when an attempt ends, however it ends, nothing of its process group is left.

The program finds OPENAI_BASE_URL (the attempt's own endpoint), TRACEPARENT and BAGGAGE in its environment, beside what the agent
host was started with (OPENAI_API_KEY, OTEL_EXPORTER_OTLP_ENDPOINT). Its standard error, and all of its output, go to the log.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from spangrad.errors import AgentError
from spangrad.processes import die_with_parent
from spangrad.propagation import carrier_of

_INSTRUMENT = "opentelemetry-instrument"
_TAIL_BYTES = 2**20
_GRACE_SECONDS = 1.0


class ExitCode(Exception):  # noqa: N818  # it is what happened, not an error of ours
    """The program ended with a code other than 0 (below 0: of that signal)."""


class CommandAgent:
    """An agent in the form of a command line."""

    def __init__(self, command: Sequence[str], directory: Path, *, instrument: bool) -> None:
        """`command` runs in `directory`; `instrument` puts `opentelemetry-instrument` of the program's environment before it.

        Raises:
            AgentError: the program, or opentelemetry-instrument, is not there.
        """
        self._directory = directory
        program = _program(command, directory)
        self._command = [_instrumenter(program), *command] if instrument else list(command)

    async def __call__(self, given: object, endpoint: str | None) -> object:
        """Run the program once.

        Args:
            given: the task's input.
            endpoint: the attempt's own endpoint of the policy. None: the program's environment says where it is.

        Raises:
            ExitCode: the program failed.
        """
        # Files, not pipes: a grandchild that keeps a pipe open cannot hold the attempt.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            stdin.write(json.dumps(given).encode())
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=stdin,
                stdout=stdout,
                cwd=self._directory,
                env=_environment(endpoint),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _ask_to_end(process)
                raise
            finally:
                _kill_group(process.pid)
            tail = _tail(stdout)
        os.write(2, tail)
        if code:
            raise ExitCode(f"exit code {code}")
        return _last_line(tail)


def _environment(endpoint: str | None) -> dict[str, str]:
    environment = {**os.environ, **{name.upper(): value for name, value in carrier_of().items()}}
    if endpoint is not None:
        environment["OPENAI_BASE_URL"] = endpoint
    return environment


async def _ask_to_end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, so that the program may flush its spans, and a moment for it."""
    try:
        process.terminate()
        await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
    except (ProcessLookupError, TimeoutError):
        pass  # it has ended, or the kill that follows ends it


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left of it


def _tail(stdout: IO[bytes]) -> bytes:
    size = stdout.seek(0, os.SEEK_END)
    stdout.seek(max(0, size - _TAIL_BYTES))
    return stdout.read()


def _last_line(tail: bytes) -> object:
    lines = tail.decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return lines[-1]


def _program(command: Sequence[str], directory: Path) -> Path:
    if not command:
        raise AgentError("the agent's command is empty: give the program and its arguments.")
    found = shutil.which(command[0]) or shutil.which(command[0], path=str(directory))
    if found is None:
        raise AgentError(f"the agent's program {command[0]!r} is neither in PATH nor in {directory}.")
    return Path(found)


def _instrumenter(program: Path) -> str:
    beside = program.parent / _INSTRUMENT
    found = str(beside) if beside.exists() else shutil.which(_INSTRUMENT)
    if found is None:
        raise AgentError(
            f"{_INSTRUMENT} is neither beside {program} nor in PATH. "
            "Install spangrad in the agent's environment, or run it without instrumentation."
        )
    return found
