"""Programs in sandboxes, as the process outside has them: their pipes are fed and read without blocking, up to a limit."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spangrad.errors import SandboxRequestError

if TYPE_CHECKING:
    from runner.sandboxes.sandbox import Sandbox

_CHUNK_BYTES = 2**16
MOST_BYTES = 2**20
"""Bytes of an output that are kept unless told otherwise."""
_END_SECONDS = 5.0
"""Longest wait for the end of a program that was killed, in seconds."""


class SandboxProcess:
    """A program that runs in a sandbox, with pipes."""

    def __init__(self, sandbox: Sandbox, pid: int, ended: asyncio.Future[int], stdin: int, stdout: int, stderr: int) -> None:
        """`pid` is its process inside; the last three are this process's ends of its pipes, which `close` closes."""
        self._sandbox = sandbox
        self._pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.ended = ended
        """Done with the exit code when the program has ended."""

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the program and to what it has started in its session."""
        await self._sandbox.ask("kill", self._pid, int(number))

    async def end(self) -> None:
        """Kill the program, and wait a bounded time for its end."""
        await end_program(self._sandbox, self._pid, self.ended)

    def close_stdin(self) -> None:
        """Close its input; idempotent."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Close the pipes."""
        self.close_stdin()
        os.close(self.stdout)
        os.close(self.stderr)


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """End of a program in a sandbox."""

    exit_code: int
    """Exit code; below 0: it was ended by that signal."""
    stdout: bytes
    stderr: bytes
    truncated: bool
    """True if an output was longer than what was kept."""
    timed_out: bool
    """True if it exceeded its time and was killed."""


async def end_program(sandbox: Sandbox, pid: int, ended: asyncio.Future[int]) -> None:
    """Kill a program and what it has started in its session, and wait a bounded time for its end."""
    try:
        await sandbox.ask("kill", pid, int(signal.SIGKILL))
        await asyncio.wait([ended], timeout=_END_SECONDS)
    except SandboxRequestError:
        pass  # the sandbox has ended, and the program with it


async def feed(descriptor: int, data: bytes) -> None:
    """Write a program's input, or to its terminal, until it reads no more."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    try:
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                await until_ready(loop.add_writer, loop.remove_writer, descriptor)
    except BrokenPipeError:
        pass  # it reads no more


async def read_all(descriptor: int, most_bytes: int) -> tuple[bytes, bool]:
    """Read a pipe to its end, or until cancelled; return what is kept, and True if more came."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    kept, more = bytearray(), False
    try:
        while True:
            try:
                data = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                await until_ready(loop.add_reader, loop.remove_reader, descriptor)
                continue
            if not data:
                break
            more |= len(kept) + len(data) > most_bytes
            kept += data[: most_bytes - len(kept)]
    except asyncio.CancelledError:
        pass  # a process that was left behind holds the pipe
    return bytes(kept), more


async def until_ready(add: Any, remove: Any, descriptor: int, ended: asyncio.Future[int] | None = None) -> None:
    """Wait until a descriptor can be read or written, by the methods of the event loop that add and remove its callback, or `ended`."""
    ready = asyncio.Event()

    def wake(_: object) -> None:
        ready.set()

    add(descriptor, ready.set)
    if ended is not None:
        ended.add_done_callback(wake)
    try:
        await ready.wait()
    finally:
        remove(descriptor)
        if ended is not None:
            ended.remove_done_callback(wake)
