"""Agent hosts, seen from the runner: processes that run attempts, and are replaced when they die or hang.

Invariant: each job gets an answer even when its process dies (`crash`), and no process outlives its pool.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import subprocess
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

from runner.workers.agents import AgentSpec, ContainerAgent, host_command, initialises
from runner.workers.attempt_files import HostLog
from runner.workers.containers import remove_of_host
from spangrad.agent.command import SandboxLaunch
from spangrad.agent.host import LINE_LIMIT_BYTES
from spangrad.errors import JSON_ERRORS, AgentError
from spangrad.processes import MARK, dying_with_parent, kill_group, kill_marked, make_private
from spangrad.settings import RunnerSettings
from spangrad.types import AttemptFailure

T = TypeVar("T")
_START_SECONDS = 120.0
_DRAIN_SECONDS = 1.0
"""Time for which a dead host's answers are read, in seconds: a process that it left behind may hold their pipe open for ever."""
_END_SECONDS = 12.0
"""Time that a host has to end, in seconds: its spans may wait 10 s for the store."""
_LOAD_PAUSES = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Pauses before a host that was killed while it loaded, or found no resources, is started again, in seconds; then the pool gives up."""
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Errors of a system that has too few descriptors, processes or memory for the moment."""
_LOADED = ""
"""Key of a host's first message, which has no id."""

_logger = logging.getLogger(__name__)


class _PassingStartError(AgentError):
    """A signal ended the process before the agent was loaded, or it found no resources to start. The next process may live."""


@dataclass(eq=False)
class AgentHost:
    """One process, and its jobs without an answer."""

    _process: asyncio.subprocess.Process
    _jobs: asyncio.WriteTransport
    _answers: asyncio.StreamReader
    _pipe: asyncio.ReadTransport
    _log: HostLog
    _mark: str
    _spec: AgentSpec

    def __post_init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.stage_callbacks: dict[str, Callable[[str], None]] = {}
        """Callbacks by job id: called with the name of the next stage when a stage of the attempt is over."""
        self._messages: list[bytes] = []
        """Messages of this turn of the event loop: they are written together, since each write wakes the process."""
        self._groups: set[int] = set()
        """Process groups of the programs that it runs, by leader."""
        self._process_task = asyncio.create_task(self._deliver_answers())
        self.retired = False
        """True if it gets no further jobs."""

    @classmethod
    async def start(
        cls,
        spec: AgentSpec,
        settings: RunnerSettings,
        environment: Mapping[str, str],
        log_file: Path,
        sandbox: SandboxLaunch | None = None,
    ) -> AgentHost:
        """Start a process, and wait until it has loaded the agent; `sandbox` confines its programs.

        Raises:
            AgentError: the process cannot be started, or the interpreter, the agent or the evaluator cannot be loaded.
        """
        command = [*host_command(spec), *(["--sandbox", json.dumps(asdict(sandbox))] if sandbox else [])]
        if settings.empty_reward is not None:
            command += ["--empty-reward", str(settings.empty_reward)]
        if settings.close_after_run:
            command += ["--close-after-run"]
        mark = uuid.uuid4().hex
        try:
            with ExitStack() as own, ExitStack() as inherited:
                make_private(settings.directory)
                log = HostLog(log_file)
                # Own pipes: those of asyncio would hide the process's end for as long as a child of it holds them open.
                jobs_out, jobs_in = _open_pipe(inherited, own)
                answers_out, answers_in = _open_pipe(own, inherited)
                process = await asyncio.create_subprocess_exec(
                    *dying_with_parent(command, environment, inherits_limit=True),
                    stdin=jobs_out,
                    stdout=answers_in,
                    stderr=inherited.enter_context(log.open()),
                    env={**environment, MARK: mark},
                    start_new_session=True,
                    pass_fds=sandbox.descriptors if sandbox else (),
                )
                own.pop_all()
        except (OSError, subprocess.SubprocessError) as error:
            raise _start_error(error, command[0]) from None
        loop = asyncio.get_running_loop()
        answers = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), answers_out)
        jobs, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, jobs_in)
        host = cls(process, jobs, answers, pipe, log, mark, spec)
        loaded = host.expect(_LOADED)
        try:
            async with asyncio.timeout(_START_SECONDS):
                message = await loaded
        except (TimeoutError, asyncio.CancelledError) as stopped:
            await host.stop()
            if isinstance(stopped, TimeoutError):
                raise AgentError(f"the agent is not loaded after {_START_SECONDS:g} s. Its log is {log.file}.") from None
            raise
        if not message.get("ready"):
            await host.stop()
            kind = AgentError if "error" in message or (process.returncode or 0) >= 0 else _PassingStartError
            raise kind(message.get("error") or f"the agent cannot be loaded: {message['detail']}")
        return host

    @property
    def ended(self) -> bool:
        """Return whether the process has ended, and its jobs are answered."""
        return self._process_task.done()

    @property
    def attempts(self) -> int:
        """Number of attempts that run in it."""
        return len(self.stage_callbacks)

    def expect(self, id: str) -> asyncio.Future[dict[str, Any]]:
        """Return a future of the next answer to this id."""
        self._waiting[id] = asyncio.get_running_loop().create_future()
        return self._waiting[id]

    async def _deliver_answers(self) -> None:
        """Deliver answers until the process ends; then answer the remaining jobs with `crash`."""
        reading = asyncio.create_task(self._read())
        freeing = asyncio.create_task(self._log.free_space())
        code = await self._process.wait()
        freeing.cancel()
        self.retired = True
        kill_group(self._process.pid)
        await asyncio.wait([reading], timeout=_DRAIN_SECONDS)
        reading.cancel()
        try:
            for leader in self._groups:
                kill_group(leader)
            await asyncio.to_thread(kill_marked, self._mark)
            await asyncio.to_thread(remove_of_host, self._spec, self._mark)
        except (OSError, RuntimeError) as error:  # there are no descriptors or threads: the jobs get their answers all the same
            _logger.warning("what the agent's process %d has started may still run: %s", self._process.pid, error)
        finally:
            self._pipe.close()
            self._jobs.close()
            end = self._log.tail()
            log = f"The end of {self._log.file}:\n{end}" if end else f"Its log {self._log.file} is empty."
            detail = f"the agent's process ended with exit code {code}. {log}"
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_result({"reward": None, "failure": AttemptFailure.CRASH, "detail": detail})
            self._waiting.clear()

    async def _read(self) -> None:
        """Deliver answers to the end of their pipe; kill the process at one that cannot be read, so that its jobs are answered."""
        try:
            await self._read_lines()
        except (*JSON_ERRORS, AttributeError, LookupError, TypeError) as error:
            _logger.warning("an answer of the agent's process %d cannot be read, and it is killed: %s", self._process.pid, error)
            kill_group(self._process.pid)

    async def _read_lines(self) -> None:
        # Half a line is what the host was writing when it died.
        while (line := await self._answers.readline()).endswith(b"\n"):
            message = json.loads(line)
            if "program" in message:
                (self._groups.discard if message["ended"] else self._groups.add)(message["program"])
                continue
            if "stage" in message:
                if (on_stage_end := self.stage_callbacks.get(message["id"])) is not None:
                    on_stage_end(message["stage"])
                continue
            answered = self._waiting.pop(message.get("id", _LOADED), None)
            if answered is not None and not answered.done():
                answered.set_result(message)

    def forget(self, id: str) -> None:
        """Drop the callbacks of a job, which no caller waits for any more."""
        self._waiting.pop(id, None)
        self.stage_callbacks.pop(id, None)

    async def wait_ended(self) -> None:
        """Wait for the end of the process."""
        await asyncio.shield(self._process_task)

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message, if the process can still read it."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._write)
        self._messages.append(json.dumps(message).encode() + b"\n")

    def _write(self) -> None:
        messages, self._messages = self._messages, []
        if messages and not self._jobs.is_closing():
            self._jobs.write(b"".join(messages))

    async def stop(self) -> None:
        """Let the process end by itself, for a bounded time, then kill its whole group; idempotent."""
        self._write()
        self._jobs.close()
        try:
            if not self.retired:  # what hangs will not end by itself
                async with asyncio.timeout(_END_SECONDS):
                    await self.wait_ended()
        except TimeoutError:
            _logger.warning("an agent's process did not end in %g s and is killed", _END_SECONDS)
        finally:
            kill_group(self._process.pid)
            await self.wait_ended()


def _open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """Open a pipe; each stack closes an end."""
    read, write = os.pipe()
    return reader.enter_context(os.fdopen(read, "rb")), writer.enter_context(os.fdopen(write, "wb"))


def _start_error(error: OSError | subprocess.SubprocessError, interpreter: str) -> AgentError:
    if isinstance(error, OSError) and error.errno in _SCARCE:
        remedy = "Raise the limits of open files, processes and memory, or lower runner.workers"
        return _PassingStartError(f"the agent's process cannot be started: {error.strerror}. {remedy}.")
    if isinstance(error, OSError) and error.filename == interpreter:
        return AgentError(f"the agent's interpreter {interpreter} cannot be started: {error.strerror}. Name another one.")
    return AgentError(f"the agent's process cannot be started: {error}. See that runner.directory can be written to.")


class HostPool:
    """A fixed number of hosts that share a fixed number of slots; a host that dies or hangs is replaced.

    A slot is normally one of stage run. Where hosts create environments themselves, it is one of the stages before: such an attempt takes
    its slot of stage run (`Attempts`) later, in the same host.
    """

    def __init__(
        self,
        spec: AgentSpec,
        settings: RunnerSettings,
        environment: Mapping[str, str],
        sandbox: SandboxLaunch | None = None,
        name: str = "",
    ) -> None:
        """Start nothing yet; `name` tells the logs of this pool's hosts from those of others."""
        self._name = name
        self._spec = spec
        self._sandbox = sandbox
        self._settings = settings
        self._environment = environment
        self.initialises = initialises(spec)
        """True if hosts create environments."""
        self._slot_count = settings.initialised_ahead if self.initialises else settings.concurrency
        """Slots of all hosts."""
        self._host_count = min(settings.workers, self._slot_count)
        self._slots: asyncio.Queue[AgentHost | AgentError] = asyncio.Queue()
        self._active_hosts: dict[AgentHost, int] = {}
        """Hosts that get jobs, with their numbers."""
        self._busy: dict[AgentHost, int] = {}
        """Number of taken slots of each host that is not stopped."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def takes_image(self, image: str) -> bool:
        """Return whether an attempt may name this container image."""
        return isinstance(self._spec, ContainerAgent) and any(fnmatchcase(image, allowed) for allowed in self._settings.container.images)

    async def start(self) -> None:
        """Start all hosts.

        Raises:
            AgentError: the agent cannot be loaded.
        """
        hosts = await asyncio.gather(*(self._in_background(self._start(number)) for number in range(self._host_count)))
        for place in range(self._slot_count):
            self._slots.put_nowait(hosts[place % self._host_count])

    async def _start(self, number: int) -> AgentHost:
        name = f"{quote(self._name, safe='')}-{number}" if self._name else str(number)
        log = self._settings.directory / "logs" / f"agent-host-{name}.log"
        pauses = iter(_LOAD_PAUSES)
        while True:
            try:
                host = await AgentHost.start(self._spec, self._settings, self._environment, log, self._sandbox)
                break
            except _PassingStartError as error:
                if (pause := next(pauses, None)) is None:
                    raise
                _logger.warning("%s\nIt is started again in %g s.", error, pause)
                await asyncio.sleep(pause)
        self._active_hosts[host] = number
        self._busy[host] = 0
        self._in_background(self._watch(host))
        return host

    async def _watch(self, host: AgentHost) -> None:
        await host.wait_ended()
        self._replace(host)
        if not self._busy.get(host):
            self._busy.pop(host, None)

    def _replace(self, host: AgentHost) -> None:
        """Start another host in place of one that died or hangs, once."""
        number = self._active_hosts.pop(host, None)
        if number is not None:
            self._in_background(self._start_again(number))

    async def _start_again(self, number: int) -> None:
        try:
            host = await self._start(number)
        except AgentError as error:
            self._slots.put_nowait(error)
            return
        for _ in range(number, self._slot_count, self._host_count):
            self._slots.put_nowait(host)

    async def _end(self, host: AgentHost) -> None:
        await host.stop()
        self._busy.pop(host, None)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin work that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def take(self) -> AgentHost:
        """Wait for a free slot, take it, and return its host; `give` returns the slot.

        Raises:
            AgentError: a host had to be replaced, and the agent cannot be loaded any more.
        """
        while True:
            host = await self._slots.get()
            if isinstance(host, AgentError):
                self._slots.put_nowait(host)  # for the other waiting tasks
                raise host
            if not host.retired:
                break
        self._busy[host] += 1
        return host

    def free(self, host: AgentHost) -> None:
        """Free the slot for another attempt, while this attempt continues in a later stage."""
        if not host.retired:
            self._slots.put_nowait(host)

    def give(self, host: AgentHost, *, freed: bool) -> None:
        """Return what `take` took, freed before or not; a host that died or hangs is replaced."""
        self._busy[host] -= 1
        if not host.retired:
            if not freed:
                self._slots.put_nowait(host)
        else:
            self._replace(host)
            if not self._busy[host]:
                self._in_background(self._end(host))

    async def close(self) -> None:
        """Stop all processes, including replaced ones."""
        self._active_hosts.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(host) for host in list(self._busy)))
