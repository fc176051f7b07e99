"""Processes of sessions, as the server sees them: started, watched and started again.

In: sessions to open. Out: frames for them. Invariant: a session is opened in a process that has the fewest; the end of a process ends its
own sessions alone, each with an error, and another one takes its place; a process that does not answer is ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runner.sessions.frames import Frame, FrameKind, FrameReader
from runner.sessions.metrics import SessionCounts
from runner.sessions.shard import EnvironmentDescription
from spangrad.errors import EnvironmentsError
from spangrad.processes import dying_with_parent, kill_group
from spangrad.settings.sources import without_secrets

if TYPE_CHECKING:
    from runner.sessions.sessions import EnvironmentSession

_RETRY_SECONDS = (0.1, 1.0, 5.0, 30.0)
"""Pauses before a process is started again, in seconds; the last one repeats. A process that has served begins anew."""
_START_SECONDS = 300.0
"""Time that a process has to serve, in seconds. Then the server does not start; one that was started again is killed, and the next one
started."""
_END_SECONDS = 5.0
"""Time that a process has to close its environments when the server ends, in seconds."""
_PINGS_SECONDS = 1.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardCommand:
    """Command line of a shard, and its variables."""

    factory: str
    """Environment, as module:class."""
    directory: Path
    """Directory in which its modules are looked for first."""
    variables: Mapping[str, str]
    """Environment variables beside our own, without those that set secrets."""

    def start(self, requests: socket.socket, responses: socket.socket) -> subprocess.Popen[bytes]:
        """Start a process that inherits its ends of two connections."""
        descriptors = (requests.fileno(), responses.fileno())
        arguments = ("--factory", self.factory, "--path", str(self.directory.resolve()), "--sockets", *map(str, descriptors))
        environment = {**without_secrets(os.environ), **self.variables}
        return subprocess.Popen(
            dying_with_parent([sys.executable, "-P", "-m", "runner.sessions.shard", *arguments], environment, inherits_limit=True),
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=descriptors,
            start_new_session=True,
        )


class ShardProcess(asyncio.Protocol):
    """One process, from its start to its end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.users: dict[int, EnvironmentSession] = {}
        """Sessions, by number."""
        self.described: asyncio.Future[EnvironmentDescription] = loop.create_future()
        """Done once it serves; an `EnvironmentsError` if it cannot."""
        self.ended: asyncio.Future[None] = loop.create_future()
        self.answered = time.monotonic()
        """Time of the last answered ping, in seconds of the monotonic clock."""
        self._reader = FrameReader()
        self._requests: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    async def start(cls, command: ShardCommand) -> ShardProcess:
        """Start a process.

        Raises:
            OSError: this process or the machine lacks descriptors, memory or processes.
            SubprocessError: the process could not be prepared.
        """
        requests, responses = socket.socketpair(), socket.socketpair()
        try:
            with requests[1], responses[1]:
                process = command.start(requests[1], responses[1])
        except BaseException:
            requests[0].close()
            responses[0].close()
            raise
        loop = asyncio.get_running_loop()
        _, shard = await loop.create_connection(cls, sock=responses[0])
        shard._process = process
        shard._requests, _ = await loop.create_connection(asyncio.Protocol, sock=requests[0])
        return shard

    @property
    def serves(self) -> bool:
        """True if sessions can be opened."""
        return self.described.done() and self.described.exception() is None and not self.ended.done()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def send(self, frame: Frame) -> None:
        """Send a frame; after the end it is lost."""
        if self._requests is not None and not self._requests.is_closing():
            self._requests.write(frame.encode())

    async def stop(self) -> None:
        """End it: its environments have time to close; what is left of its group is killed."""
        assert self._process is not None
        if self._requests is not None:
            self._requests.close()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        await self.kill()

    async def kill(self) -> None:
        """End it and its children at once."""
        assert self._process is not None
        kill_group(self._process.pid)
        await asyncio.to_thread(self._process.wait)

    def data_received(self, data: bytes) -> None:
        """Hand each frame to its session."""
        for frame in self._reader.feed(data):
            if (user := self.users.get(frame.session)) is not None:
                user.receive(frame)
            elif frame.kind is FrameKind.PING:
                self.answered = time.monotonic()
            elif frame.kind is FrameKind.READY:
                self.answered = time.monotonic()
                self.described.set_result(msgspec.json.decode(frame.payload, type=EnvironmentDescription))
            elif frame.kind is FrameKind.BROKEN:
                self.described.set_exception(EnvironmentsError(frame.payload.decode()))

    def connection_lost(self, exc: Exception | None) -> None:
        """End its sessions."""
        if not self.described.done():
            sentence = "the process of environments ended before it served. Its own message is above; fix the environment."
            self.described.set_exception(EnvironmentsError(sentence))
        self.described.exception()  # it was seen
        if not self.ended.done():
            self.ended.set_result(None)
        if self._requests is not None:
            self._requests.close()
        users, self.users = list(self.users.values()), {}
        for user in users:
            user.lose("the process of this environment has ended, and the episode with it. Open a new session")


class Shards:
    """All processes of a server."""

    def __init__(self, command: ShardCommand, count: int, answer_seconds: float) -> None:
        """`count` processes are started; one that answers no ping for `answer_seconds` is ended."""
        self._command = command
        self._count = count
        self._answer_seconds = answer_seconds
        self._processes: dict[int, ShardProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.counts = SessionCounts()
        self.counts.shards.set_function(lambda: len(self.serving_processes))
        self.description: EnvironmentDescription

    async def start(self) -> None:
        """Start the processes, and wait for all of them.

        Raises:
            EnvironmentsError: a process cannot be started, no environment can be created, or a process does not serve in time.
        """
        for slot in range(self._count):
            try:
                self._processes[slot] = await ShardProcess.start(self._command)
            except (OSError, subprocess.SubprocessError) as error:
                raise EnvironmentsError(
                    f"process {slot + 1} of {self._count} for {self._command.factory} cannot be started ({error}). Lower --shards, or "
                    "raise the limit of processes."
                ) from error
        descriptions = [process.described for process in self._processes.values()]
        done, hanging = await asyncio.wait(descriptions, timeout=_START_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        for described in done:
            self.description = described.result()
        if hanging:
            pids = ", ".join(str(process.pid) for process in self._processes.values() if process.described in hanging)
            raise EnvironmentsError(
                f"the environment {self._command.factory} was not created within {_START_SECONDS:g} s (process {pids}). Its own "
                "messages are above, in the output of this server; see what it waits for as it is imported or created."
            )
        self._tasks = [asyncio.create_task(self._keep(slot, process), name=f"shard {slot}") for slot, process in self._processes.items()]
        self._tasks.append(asyncio.create_task(self._watch(), name="shards"))

    async def stop(self) -> None:
        """End all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    def least_loaded(self) -> ShardProcess | None:
        """Return the process with the fewest sessions. None: all of them are being started."""
        return min(self.serving_processes, key=lambda process: len(process.users), default=None)

    @property
    def serving_processes(self) -> list[ShardProcess]:
        """Processes that serve."""
        return [process for process in self._processes.values() if process.serves]

    async def _keep(self, slot: int, process: ShardProcess) -> None:
        while True:
            await process.ended
            self.counts.restarts.inc()
            await process.kill()
            log.warning("shard %d (process %d) has ended; another one is started", slot, process.pid)
            process = await self._replace(slot)

    async def _replace(self, slot: int) -> ShardProcess:
        failures = 0
        while True:
            await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
            process = None
            try:
                self._processes[slot] = process = await ShardProcess.start(self._command)
                await asyncio.wait_for(asyncio.shield(process.described), _START_SECONDS)
                return process
            except TimeoutError:
                log.warning("shard %d: its process has not served within %g s, and is killed", slot, _START_SECONDS)
            except (EnvironmentsError, OSError, subprocess.SubprocessError) as error:
                log.warning("shard %d: %s", slot, error)
            failures += 1
            if process is not None:
                await process.kill()

    async def _watch(self) -> None:
        """Ping the processes, and end those that do not answer."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(_PINGS_SECONDS)
            late, before = time.monotonic() - before - _PINGS_SECONDS, time.monotonic()
            for slot, process in self._processes.items():
                if late > _PINGS_SECONDS:
                    process.answered += late  # this process was stopped, or starved
                if process.serves and time.monotonic() - process.answered > self._answer_seconds + _PINGS_SECONDS:
                    log.warning("shard %d has not answered for %g s, and is ended", slot, self._answer_seconds)
                    kill_group(process.pid)
                process.send(Frame(FrameKind.PING))
