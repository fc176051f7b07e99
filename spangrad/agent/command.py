"""Agents that are whole programs: one process for each attempt, configured by environment variables and standard input.

In: a task's input, as JSON on the program's standard input. Out: the last line of its standard output, parsed as JSON where it is
JSON, else as text. Invariant: when an attempt ends, for whatever reason, nothing of its process group is left; nor when its host is
terminated, because the runner has died.

The program finds OPENAI_BASE_URL (the attempt's own endpoint), TRACEPARENT, BAGGAGE and OTEL_RESOURCE_ATTRIBUTES in its environment
variables, the prompt that the attempt is pinned to (`prompt_client.program_variables`) and, where the attempt has an environment,
SPANGRAD_ENVIRONMENT (JSON), beside what the agent host was started with (OPENAI_API_KEY, OTEL_EXPORTER_OTLP_ENDPOINT). Its standard
error, and then the end of its output, go to the attempt's log.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spangrad.agent import prompt_client
from spangrad.agent.attempt_log import attempt_log, free_beginning
from spangrad.agent.prompt_client import program_variables
from spangrad.agent.propagation import carrier_of, resource_variable
from spangrad.errors import JSON_ERRORS, AgentError
from spangrad.processes import MARK, dying_with_parent, kill_group
from spangrad.types import AttemptFailure

ENVIRONMENT_VARIABLE = "SPANGRAD_ENVIRONMENT"
ADDRESSED = re.compile(rf"(OTEL|OPENAI)_\w+|{ENVIRONMENT_VARIABLE}|{prompt_client.URL}")
"""Variables of an attempt that may hold addresses of services."""
_PASSED = re.compile(rf"{ADDRESSED.pattern}|TRACEPARENT|TRACESTATE|BAGGAGE|{prompt_client.TEXT}(_\w+)?")
STARTED_VARIABLE = "SPANGRAD_SANDBOX_STARTED"
"""Variable with the descriptor of a file to which a sandbox's launcher writes `1` when the program begins; programs do not see it."""
_INSTRUMENT = "opentelemetry-instrument"
_TAIL_BYTES = 2**20
"""Largest last line that is read, in bytes."""
FREE_SECONDS = 1.0
"""Pause between two looks at the space that outputs take, in seconds."""
_LAST_ERROR_BYTES = 1000
_GRACE_SECONDS = 1.0

_groups: set[int] = set()
"""Process groups of the running attempts, by leader."""
os.register_at_fork(after_in_child=_groups.clear)


class ProgramFailure(Exception):  # noqa: N818  # an outcome of the attempt, not an error of ours
    """The program of an attempt could not be run, or failed."""

    def __init__(self, failure: AttemptFailure, detail: str) -> None:
        """`failure` is the kind, `detail` a sentence for users."""
        super().__init__(detail)
        self.failure = failure


class ExitCode(ProgramFailure):
    """The program ended with an exit code other than 0 (below 0: killed by that signal)."""

    def __init__(self, code: int, means: str = "", last_line: str = "") -> None:
        """`means` explains the code where its number does not; `last_line` is the last one of the program's standard error."""
        super().__init__(AttemptFailure.EXIT_CODE, f"exit code {code}{means and f': {means}'}")
        self.code = code
        self.last_line = last_line


@dataclass(frozen=True, slots=True)
class SandboxLaunch:
    """Start of programs in sandboxes, as the runner prescribes it to an agent host, in JSON."""

    prefix: Sequence[str]
    """Beginning of the command line: it runs the rest of it in a sandbox."""
    variables: Sequence[str]
    """Names of environment variables that programs get, beside those of the attempt itself."""
    assigned: Mapping[str, str]
    """Environment variables that programs get instead of the host's."""
    descriptors: Sequence[int]
    """Descriptors that the prefix inherits."""
    has_image: bool = False
    """True if programs are those of an image, where this machine does not look for them."""

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a program in a sandbox."""
        names = {*passed_variables(variables), *self.variables, MARK}
        return {name: value for name, value in variables.items() if name in names} | dict(self.assigned)


class AgentCommand:
    """An agent in the form of a command line."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        instrument: bool,
        on_group: Callable[[int, bool], None] | None = None,
        sandbox: SandboxLaunch | None = None,
    ) -> None:
        """`command` runs in `directory`; `instrument` puts `opentelemetry-instrument` of the program's environment before it.

        `on_group` is called with the leader of each process group, when it begins (False) and when it has ended (True); `sandbox` says how
        each attempt's program is confined. None: it is not.

        Raises:
            AgentError: the program, or opentelemetry-instrument, was not found.
        """
        self._directory = directory
        self._on_group: Callable[[int, bool], None] = on_group or (lambda leader, ended: None)
        self._sandbox = sandbox
        self._command = command_line(command, directory, instrument=instrument, in_image=sandbox is not None and sandbox.has_image)

    async def __call__(self, given: object, endpoint: str | None, environment: object = None) -> object:
        """Run the program once.

        Args:
            given: the task's input.
            endpoint: the attempt's own endpoint of the policy. None: the program's environment variables name one.
            environment: environment of the attempt, as JSON. None: there is none.

        Raises:
            ExitCode: the program failed.
            ProgramFailure: its sandbox was not set up, the system could not run it, or its last line is too long.
            PromptError: the prompt of the attempt could not be fetched, or is too long for a variable.
        """
        with system_errors(self._command[0]):
            variables = await variables_of(endpoint, environment)
        if (sandbox := self._sandbox) is None:
            return await self._run(given, self._command, variables)
        with system_errors(self._command[0]), tempfile.TemporaryFile() as started:
            inside = {**sandbox.environment(variables), STARTED_VARIABLE: str(started.fileno())}
            try:
                return await self._run(given, [*sandbox.prefix, *self._command], inside, (*sandbox.descriptors, started.fileno()))
            except ExitCode as error:
                if os.pread(started.fileno(), 1, 0) == b"1":
                    raise
                reason = error.last_line or str(error)
                detail = f"the sandbox of the attempt was not set up, or its program not found in it: {reason}"
                raise ProgramFailure(AttemptFailure.SANDBOX, detail) from None

    async def _run(self, given: object, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> object:
        """Run a command for an attempt; its process group ends with it."""
        # Files, not pipes: a grandchild that keeps a pipe open cannot hold the attempt.
        log = attempt_log()
        files = tempfile.TemporaryFile
        with system_errors(command[0]), files() as stdin, files() as stdout, log.program() as stderr:
            stdin.write(json.dumps(given).encode())
            stdin.seek(0)
            outputs = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            process = await _start(command, **outputs, cwd=self._directory, env=environment, pass_fds=descriptors)
            _groups.add(process.pid)
            self._on_group(process.pid, False)
            freeing = asyncio.create_task(_free_space(stdout, stderr))
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _terminate(process)
                raise
            finally:
                freeing.cancel()
                kill_group(process.pid)
                _groups.discard(process.pid)
                self._on_group(process.pid, True)
                tail, whole = _tail(stdout)
                log.end_program(stderr, tail)
            if code:
                raise ExitCode(code, last_line=_last_error(stderr))
        return _last_line(tail, whole=whole)


@contextmanager
def system_errors(program: str) -> Generator[None]:
    """Raise ProgramFailure in place of an error of the system: memory, processes or files ran out, or a variable is too long.

    A RuntimeError is that of a thread that cannot be started, as asyncio does to wait for a process.
    """
    try:
        yield
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ProgramFailure(AttemptFailure.CRASH, f"the program {program!r} could not be run: {error}") from error


async def _start(command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
    """Start a program in a group of its own; if this is cancelled, end the group, of which asyncio would end the leader alone."""
    words = dying_with_parent(command, options["env"], options["cwd"])
    start = asyncio.create_subprocess_exec(*words, start_new_session=True, **options)
    starting = asyncio.create_task(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        if starting.exception() is None:
            kill_group(starting.result().pid)
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, command[0] if error.filename == words[0] else error.filename) from error


async def _free_space(*outputs: IO[bytes] | int) -> None:
    """Free the space of all but the ends of outputs now and then, so that a program that prints without end fills no disk."""
    while True:
        await asyncio.sleep(FREE_SECONDS)
        for output in outputs:
            if not isinstance(output, int):
                free_beginning(output.fileno())


def kill_groups() -> None:
    """Kill the programs of all running attempts at once; safe to call in a signal handler."""
    for leader in list(_groups):
        kill_group(leader)


async def variables_of(endpoint: str | None, leased: object) -> dict[str, str]:
    """Return the environment variables of the current attempt's program; arguments as `AgentCommand.__call__`.

    Raises:
        PromptError: the prompt of the attempt could not be fetched, or is too long for a variable.
    """
    environment = {**os.environ, **{name.upper(): value for name, value in carrier_of().items()}}
    environment |= resource_variable(environment)
    if endpoint is not None:
        environment["OPENAI_BASE_URL"] = endpoint
    if leased is not None:
        environment[ENVIRONMENT_VARIABLE] = json.dumps(leased)
    return environment | await asyncio.to_thread(program_variables, os.environ)


def passed_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the attempt's own variables, which a container or sandbox gets; the prompt's text may have any name."""
    text = environment.get(prompt_client.VARIABLE)
    return sorted(key for key in environment if _PASSED.fullmatch(key) or key == text)


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, so that the program may flush its spans, and wait a moment for it."""
    try:
        process.terminate()
        await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
    except (ProcessLookupError, TimeoutError):
        pass  # it has ended, or the kill that follows ends it


def _tail(stdout: IO[bytes]) -> tuple[bytes, bool]:
    """Return the end of the output, and True if it is all of it."""
    size = stdout.seek(0, os.SEEK_END)
    stdout.seek(max(0, size - _TAIL_BYTES))
    return stdout.read(), size <= _TAIL_BYTES


def _last_error(stderr: IO[bytes] | int) -> str:
    """Return the last line that a program wrote to its standard error; empty where that is not kept."""
    if isinstance(stderr, int):
        return ""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _LAST_ERROR_BYTES))
    return stderr.read().strip().rpartition(b"\n")[2].decode(errors="replace")


def _last_line(tail: bytes, *, whole: bool) -> object:
    # Split bytes, because a text's whitespace and line ends include U+2028 and U+0085, which JSON may hold as they are.
    _, newline, line = tail.strip().rpartition(b"\n")
    if not (whole or newline):
        raise ProgramFailure(AttemptFailure.INVALID_OUTPUT, f"the last line of output is longer than {_TAIL_BYTES} bytes")
    text = line.decode(errors="replace")
    try:
        return json.loads(text)
    except JSON_ERRORS:
        return text or None


def command_line(command: Sequence[str], directory: Path, *, instrument: bool, in_image: bool) -> list[str]:
    """Return the command, with the instrumenter before it if it is to be instrumented.

    Raises:
        AgentError: the command is empty; or it is outside an image, and the program or the instrumenter was not found.
    """
    if not command:
        raise AgentError("the agent's command is empty: give the program and its arguments.")
    if in_image:
        return [_INSTRUMENT, *command] if instrument else [*command]
    program = program_file(command[0], directory)
    if program is None:
        raise AgentError(f"the agent's program {command[0]!r} is neither in PATH nor in {directory}.")
    words = [*command] if shutil.which(command[0]) else [str(program), *command[1:]]
    return [_instrumenter(program), *words] if instrument else words


def program_file(name: str, directory: Path) -> Path | None:
    """Return the file of a program that runs in a directory: of PATH, or in that directory. None: there is none."""
    in_path = None if os.sep in name else shutil.which(name)
    program = in_path or shutil.which(str(directory / name))
    return Path(program) if program else None


def _instrumenter(program: Path) -> str:
    beside = program.parent / _INSTRUMENT
    instrumenter = str(beside) if beside.exists() else shutil.which(_INSTRUMENT)
    if instrumenter is None:
        raise AgentError(
            f"{_INSTRUMENT} is neither beside {program} nor in PATH. "
            "Install spangrad in the agent's environment, or run it without instrumentation."
        )
    return instrumenter
