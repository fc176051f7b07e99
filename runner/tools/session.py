"""A program that stays in a sandbox and runs one action after another: a shell, or an interpreter.

In: actions, as text. Out: for each what it printed, its status and the working directory after it. The program reads actions from a pipe
and writes to a terminal, as programs expect it; the status has a pipe of its own, so that nothing that is printed can be taken for it.
Invariant: an action ends within its time, and a moment; what it prints beyond a limit is read and dropped.
"""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import termios
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from runner.sandboxes.sandbox import Sandbox
from spangrad.errors import SandboxRequestError

_SHELL = """
trap : INT
_marker=$1
shift
while IFS= read -r -d '' -u 3 action; do
    eval "$action" </dev/null 3<&- 4>&-
    printf '%d %s\\0' $? "$PWD" >&4
    printf %s "$_marker"
done
"""
"""Program of the shell; its argument is the marker that follows each action's output."""
_ENVIRONMENT = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "PS1": "$ ", "NO_COLOR": "1"}
_INTERRUPT = b"\x03"
_GRACE_SECONDS = 1.0
"""Time that an interrupted action has to end, in seconds; then its program is killed and started again."""
_CHUNK_BYTES = 2**16


class ToolFailedError(Exception):
    """An action failed in a way that the model should read."""


@dataclass(frozen=True, slots=True)
class ActionResult:
    """End of an action."""

    output: str
    """Text that it printed, both outputs in order; of a long one the beginning and the end."""
    exit_code: int | None
    """Exit code, or 1 where Python code raised. None: the program ended with the action, and was started again."""
    directory: str | None
    """Working directory after it. None: as `exit_code`."""
    timed_out: bool
    """True if it exceeded its time and was interrupted."""


class ToolSession:
    """A program that stays; an async context manager. Its actions run one after another."""

    def __init__(self, sandbox: Sandbox, command: Sequence[str], marker: str, most_bytes: int) -> None:
        """`command` writes `marker` after the output of each action; `most_bytes` of an output are kept."""
        self._sandbox = sandbox
        self._command = command
        self._marker = marker.encode()
        self._most_bytes = most_bytes
        self._turn = asyncio.Lock()
        self._terminal = self._actions = self._statuses = -1
        self._pid = 0

    @classmethod
    def shell(cls, sandbox: Sandbox, most_bytes: int) -> Self:
        """Return a session of bash."""
        marker = f"\x1e{uuid.uuid4().hex}\x1f"
        return cls(sandbox, ["bash", "--norc", "--noprofile", "-c", _SHELL, "bash", marker], marker, most_bytes)

    @classmethod
    def interpreter(cls, sandbox: Sandbox, program: Sequence[str], most_bytes: int) -> Self:
        """Return a session of Python code; `program` runs `interpreter.py` inside."""
        marker = f"\x1e{uuid.uuid4().hex}\x1f"
        return cls(sandbox, [*program, marker], marker, most_bytes)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def interrupt(self) -> None:
        """Interrupt the action that runs, as by Ctrl-C; nothing happens where none does."""
        if self._turn.locked():
            os.write(self._terminal, _INTERRUPT)

    async def act(self, action: str, timeout_seconds: float | None) -> ActionResult:
        """Run an action to its end, or to its time limit, in seconds; None: there is none.

        Raises:
            ToolFailedError: the action holds a NUL.
            SandboxRequestError: the sandbox has ended.
        """
        if "\0" in action:
            raise ToolFailedError("the action holds a NUL character, which ends actions: escape it")
        async with self._turn:
            try:
                return await self._acted(action, timeout_seconds)
            except BaseException:  # it is not known where the output of the next action would begin
                await self._restart()
                raise

    async def _acted(self, action: str, timeout_seconds: float | None) -> ActionResult:
        output = _Output(self._most_bytes, self._marker)
        sending = asyncio.create_task(self._send(action.encode() + b"\0"))
        timed_out = False
        try:
            ended = await self._until_ended(output, timeout_seconds)
            if ended is None:
                timed_out = True
                os.write(self._terminal, _INTERRUPT)
                ended = await self._until_ended(output, _GRACE_SECONDS)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if not ended:
            await self._restart()
            return ActionResult(output.text(), None, None, timed_out)
        code, _, directory = (await self._status()).partition(" ")
        return ActionResult(output.text(), int(code), directory, timed_out)

    async def _until_ended(self, output: _Output, seconds: float | None) -> bool | None:
        """Read the terminal up to the marker; return False if the program ended, None if its time is over."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        data = os.read(self._terminal, _CHUNK_BYTES)
                    except BlockingIOError:
                        await self._readable(self._terminal)
                        continue
                    except OSError:  # Linux's answer when no program has the terminal open any more
                        data = b""
                    if not data:
                        return False
                    if output.add(data):
                        return True
                    await asyncio.sleep(0)  # whatever prints without end must not hold up the time limit
        except TimeoutError:
            return None

    async def _status(self) -> str:
        data = b""
        while not data.endswith(b"\0"):
            try:
                data += os.read(self._statuses, _CHUNK_BYTES)
            except BlockingIOError:
                await self._readable(self._statuses)
        return data[:-1].decode(errors="replace")

    async def _send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while data:
            try:
                data = data[os.write(self._actions, data) :]
            except BlockingIOError:
                ready = asyncio.Event()
                loop.add_writer(self._actions, ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_writer(self._actions)

    async def _readable(self, descriptor: int) -> None:
        ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)

    async def _start(self) -> None:
        self._terminal, terminal = pty.openpty()
        attributes = termios.tcgetattr(terminal)
        attributes[1] &= ~termios.OPOST  # lines end as the program wrote them
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)
        actions, self._actions = os.pipe()
        self._statuses, statuses = os.pipe()
        inner = [terminal, terminal, terminal, actions, statuses]
        for descriptor in (self._terminal, self._actions, self._statuses):
            os.set_blocking(descriptor, False)
        try:
            request: dict[str, object] = {"command": list(self._command), "environment": _ENVIRONMENT, "directory": None, "terminal": True}
            message, _ = await self._sandbox.ask("start", inner, **request)
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in {*inner}:
                os.close(descriptor)
        self._pid = message["process"]
        self._ended = self._sandbox.expect_end(self._pid)

    async def _end(self) -> None:
        self._close()
        try:
            await self._sandbox.ask("kill", process=self._pid, signal=int(signal.SIGKILL))
            await self._ended
        except SandboxRequestError:
            pass  # the sandbox has ended, and the program with it
        self._sandbox.forget_end(self._pid)

    async def _restart(self) -> None:
        await self._end()
        await self._start()

    def _close(self) -> None:
        for descriptor in (self._terminal, self._actions, self._statuses):
            os.close(descriptor)


class _Output:
    """Output of an action: its beginning, its end, and the number of bytes that are left out between."""

    def __init__(self, most_bytes: int, marker: bytes) -> None:
        self._half = most_bytes // 2
        self._marker = marker
        self._pending = b""
        """Last bytes, which may be the beginning of the marker."""
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> bool:
        """Add what was read, up to the marker; return True if it is there. What follows it is of no action."""
        data = self._pending + data
        before, marker, _ = data.partition(self._marker)
        kept = 0 if marker else min(len(before), len(self._marker) - 1)
        self._pending = before[len(before) - kept :]
        self._keep(before[: len(before) - kept])
        return bool(marker)

    def _keep(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (more := len(self._tail) - self._half) > 0:
            self._dropped += more
            del self._tail[:more]

    def text(self) -> str:
        """Return the output, with a line that counts what is left out."""
        self._keep(self._pending)
        self._pending = b""
        left_out = f"\n[{self._dropped} bytes left out]\n".encode() if self._dropped else b""
        return (self._head + left_out + self._tail).decode(errors="replace")
