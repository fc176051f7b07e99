"""A program that stays in a sandbox and runs one action after another: a shell, or an interpreter.

In: actions, as text. Out: for each what it printed, its status and the working directory after it. The program reads actions from a pipe
and writes to a terminal, as programs expect it; the status has a pipe of its own, so that nothing that is printed can be taken for it.
An action that reads the terminal, such as a debugger, may stay open: lines are written to it until it ends.
Invariant: an action that does not read ends within its time, and a moment; what is printed beyond a limit is read and dropped.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import termios
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from runner.sandboxes.program_io import end_program, feed, until_ready
from runner.sandboxes.sandbox import Sandbox
from runner.tools.output import ActionOutput, Patterns
from spangrad.errors import SandboxRequestError

_SHELL = """
trap : INT
_marker=$1
shift
while IFS= read -r -d '' -u 3 input && IFS= read -r -d '' -u 3 action; do
    if [ "$input" ]; then
        eval "$action" 3<&- 4>&-
    else
        eval "$action" </dev/null 3<&- 4>&-
    fi
    printf '%d %s\\0' $? "$PWD" >&4
    printf %s "$_marker"
done
"""
"""Program of the shell; its argument is the marker that follows each action's output."""
_ENVIRONMENT = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "PS1": "$ ", "NO_COLOR": "1"}
_INTERRUPT = b"\x03"
_LINE_BYTES = 4095
"""Longest line that a terminal hands to a program, in bytes; it drops the rest."""
_GRACE_SECONDS = 1.0
"""Time that an interrupted action has to end, in seconds; then its program is killed and started again."""
_CHUNK_BYTES = 2**16
UNKNOWN_CODE = -1
"""Exit code of an action in a shell of another server, which lost it."""


class ToolFailedError(Exception):
    """An action failed in a way that the model should read."""


def text_bytes(text: str) -> bytes:
    """Return a text of a model as a sandbox takes it; bytes that were no text when they were read are themselves again.

    Raises:
        ToolFailedError: it has half of a surrogate pair.
    """
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        place = f"{text[error.start]!r} at {error.start}"
        raise ToolFailedError(f"the text has half of a surrogate pair, {place}, which is no character: leave it out") from None


def action_bytes(action: str) -> bytes:
    """Return an action as its program reads it.

    Raises:
        ToolFailedError: it holds a NUL or half of a surrogate pair.
    """
    if "\0" in action:
        raise ToolFailedError("the action holds a NUL character, which ends actions: escape it")
    return text_bytes(action)


@dataclass(frozen=True, slots=True)
class ActionResult:
    """End of an action."""

    output: str
    """Text that it printed, both outputs in order; of a long one the beginning and the end."""
    exit_code: int | None
    """Exit code, `UNKNOWN_CODE`, or 1 where Python code raised. None: the program ended and was started again; or the action is open."""
    directory: str | None
    """Working directory after it; empty: Python code has deleted it. None: as `exit_code`."""
    timed_out: bool
    """True if it exceeded its time: it was interrupted, or is still open if it reads."""
    matched: str | None = None
    """Pattern that its output matched; the match is not in `output`, and the action is open. None: no pattern."""


class ToolSession:
    """A program that stays; an async context manager. Its actions run one after another."""

    def __init__(self, sandbox: Sandbox, command: Sequence[str], most_bytes: int, *, is_shell: bool = False) -> None:
        """`command` gets a marker to write after the output of each action, of which `most_bytes` are kept; a shell is told if it reads."""
        marker = f"\x1e{uuid.uuid4().hex}\x1f"
        self._sandbox = sandbox
        self._command = [*command, marker]
        self._marker = marker.encode()
        self._most_bytes = most_bytes
        self._is_shell = is_shell
        self._turn = asyncio.Lock()
        self._terminal = self._actions = self._statuses = -1
        self._attributes: list[Any] = []
        """Attributes of the terminal, which an action that reads may change."""
        self._pid = 0
        self._unread: bytes | None = None
        """Bytes that an open action printed after the last result. None: no action is open."""
        self._restarting: asyncio.Task[None] | None = None
        """Restart of the program after an action that was cancelled; the next action waits for it."""
        self._closing = False

    @classmethod
    def shell(cls, sandbox: Sandbox, most_bytes: int) -> Self:
        """Return a session of bash."""
        return cls(sandbox, ["bash", "--norc", "--noprofile", "-c", _SHELL, "bash"], most_bytes, is_shell=True)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the program; an action that runs fails."""
        self._closing = True
        if self._turn.locked():
            await end_program(self._sandbox, self._pid, self._ended)
        async with self._turn:
            await self._wait_restarted()
            await self._end()

    @property
    def is_open(self) -> bool:
        """True if an action waits for lines of input."""
        return self._unread is not None

    async def interrupt(self, timeout_seconds: float, *, tries: int = 1, patterns: Sequence[str] = ()) -> ActionResult | None:
        """Interrupt the action that runs or is open, as by Ctrl-C; return the end of one that is open, and None otherwise.

        Args:
            timeout_seconds: time that an open action has after each try; after the last its program is killed and started again.
            tries: how often an open action is interrupted.
            patterns: as of `act`.

        Raises:
            SandboxRequestError: the sandbox has ended, or its program could not be started again.
        """
        compiled = _compiled(patterns)
        if self._turn.locked():
            if self._terminal >= 0:  # otherwise the program is being started again, and no action runs
                os.write(self._terminal, _INTERRUPT)
            return None
        await self._require_program()
        if self.is_open:
            async with self._turn:
                while True:
                    result = await self._waited(timeout_seconds, compiled, True, feed(self._terminal, _INTERRUPT))
                    if not result.timed_out:
                        return result
                    tries -= 1
                    if tries < 1:
                        await self._restart()
                        return replace(result, timed_out=False)
        return None

    async def act(self, action: str, timeout_seconds: float | None, *, reads: bool = False, patterns: Sequence[str] = ()) -> ActionResult:
        """Run an action to its end, to its time limit, or until its output matches a pattern.

        Args:
            action: text of the action.
            timeout_seconds: time limit; None: there is none.
            reads: True if the shell's action reads the terminal, to which `write_line` writes. Otherwise it reads nothing.
            patterns: regular expressions; an action whose output matches is left open.

        Raises:
            ToolFailedError: the action holds a NUL or half of a surrogate pair, a pattern is none, or another action is open.
            SandboxRequestError: the sandbox has ended, or its program could not be started again.
        """
        data, compiled = action_bytes(action), _compiled(patterns)
        async with self._turn:
            await self._require_program()
            if self.is_open:
                raise ToolFailedError("an action is open: write lines to it until it ends, or interrupt it")
            source = (b"terminal\0" if reads else b"\0") if self._is_shell else b""
            sending = feed(self._actions, source + data + b"\0")
            return await self._waited(timeout_seconds, compiled, reads, sending)

    async def write_line(self, line: str, timeout_seconds: float | None, *, patterns: Sequence[str] = ()) -> ActionResult:
        """Write a line to the action that is open, and wait as `act` does.

        Raises:
            ToolFailedError: no action is open, or the line is longer than a terminal takes.
            SandboxRequestError: the sandbox has ended, or its program could not be started again.
        """
        compiled, data = _compiled(patterns), line.encode() + b"\n"
        if max(map(len, data.split(b"\n"))) > _LINE_BYTES:
            raise ToolFailedError(f"a line has more than {_LINE_BYTES} bytes, which a terminal does not take: give it by a file")
        async with self._turn:
            await self._require_program()
            if not self.is_open:
                raise ToolFailedError("no action is open to read a line")
            return await self._waited(timeout_seconds, compiled, True, feed(self._terminal, data))

    async def _waited(
        self, timeout_seconds: float | None, patterns: Patterns, reads: bool, sending: Coroutine[Any, Any, None]
    ) -> ActionResult:
        """Send, and return how the action ended, or what it printed until it was left open."""
        sent = asyncio.create_task(sending)
        try:
            return await self._result(timeout_seconds, patterns, reads, sent)
        except BaseException:  # it is not known where the output of the next action would begin
            # In a task of its own: where a scope of anyio has cancelled this one, it cancels each wait in it.
            self._restarting = asyncio.create_task(self._restart())
            await asyncio.shield(self._restarting)
            raise

    async def _result(self, timeout_seconds: float | None, patterns: Patterns, reads: bool, sent: asyncio.Task[None]) -> ActionResult:
        output = ActionOutput(self._most_bytes, self._marker, patterns)
        unread, self._unread = self._unread or b"", None
        timed_out = False
        try:
            ended = await self._until_ended(output, timeout_seconds, unread)
            if output.matched is not None:  # perhaps what was unread before: the program is still to read what is sent
                await asyncio.wait({sent}, timeout=_GRACE_SECONDS)
            if ended is None:
                timed_out = True
                if not reads:
                    os.write(self._terminal, _INTERRUPT)
                    ended = await self._until_ended(output, _GRACE_SECONDS)
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
        if output.matched is not None or (ended is None and reads):
            if ended is None:
                output.pause()
            self._unread = output.unread
            return ActionResult(output.text(), None, None, timed_out, output.matched)
        if not ended or (status := self._status()) is None:
            await self._restart()
            return ActionResult(output.text(), None, None, timed_out)
        if reads:
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._attributes)
        code, _, directory = status.partition(" ")
        return ActionResult(output.text(), int(code), directory, timed_out)

    async def _until_ended(self, output: ActionOutput, seconds: float | None, unread: bytes = b"") -> bool | None:
        """Read the terminal up to the output's end; return False if the program ended, None if its time is over."""
        if output.add(unread):
            return True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        data = os.read(self._terminal, _CHUNK_BYTES)
                    except BlockingIOError:
                        if self._ended.done():  # what it left behind may hold the terminal open
                            return False
                        await until_ready(loop.add_reader, loop.remove_reader, self._terminal, self._ended)
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

    def _status(self) -> str | None:
        """Return the status and the directory, which are written before the marker; None if there are none: the action wrote the marker."""
        data = b""
        while not data.endswith(b"\0"):
            try:
                read = os.read(self._statuses, _CHUNK_BYTES)
            except BlockingIOError:
                return None
            if not read:  # the program has ended
                return None
            data += read
        return data[:-1].decode(errors="replace")

    async def _start(self) -> None:
        inner: list[int] = []
        try:
            self._terminal, terminal = pty.openpty()
            inner.append(terminal)
            self._attributes = termios.tcgetattr(terminal)
            self._attributes[1] &= ~termios.OPOST  # lines end as the program wrote them
            self._attributes[3] &= ~termios.ECHO
            termios.tcsetattr(terminal, termios.TCSANOW, self._attributes)
            actions, self._actions = os.pipe()
            inner.append(actions)
            self._statuses, statuses = os.pipe()
            inner.append(statuses)
            for descriptor in (self._terminal, self._actions, self._statuses):
                os.set_blocking(descriptor, False)
            streams = [terminal, terminal, *inner]
            self._pid, self._ended = await self._sandbox.start_program(self._command, streams, environment=_ENVIRONMENT, terminal=True)
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in inner:
                os.close(descriptor)

    async def _end(self) -> None:
        self._close()
        await end_program(self._sandbox, self._pid, self._ended)

    async def _restart(self) -> None:
        self._unread = None
        await self._end()
        if self._closing:
            raise SandboxRequestError(f"{self._command[0]} was closed in the sandbox while an action ran. Start another one.")
        await self._start()

    async def _wait_restarted(self) -> None:
        if self._restarting is not None:
            await asyncio.wait([self._restarting])
            self._restarting = None

    async def _require_program(self) -> None:
        await self._wait_restarted()
        if self._terminal < 0:
            raise SandboxRequestError(f"{self._command[0]} ended in the sandbox, and could not be started again. Start another sandbox.")

    def _close(self) -> None:
        descriptors = self._terminal, self._actions, self._statuses
        self._terminal = self._actions = self._statuses = -1  # soon the numbers are those of other files
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


def _compiled(patterns: Sequence[str]) -> Patterns:
    """Return patterns for the bytes that a terminal prints."""
    try:
        return [re.compile(pattern.encode(), re.DOTALL) for pattern in patterns]
    except re.error as error:
        raise ToolFailedError(f"{error.pattern!r} is no regular expression: {error}") from None
