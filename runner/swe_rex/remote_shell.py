"""A shell that stays on a server that speaks SWE-ReX, in the shape of `ToolSession`."""

from __future__ import annotations

import asyncio
import base64
import re
import shlex
import uuid
from typing import Any, Self

from runner.sandboxes import remote
from runner.sandboxes.remote import RemoteError, RemoteSandbox
from runner.tools.output import shortened
from runner.tools.session import UNKNOWN_CODE, ActionResult, action_bytes
from spangrad.errors import SandboxRequestError

_STARTUP_SECONDS = 10.0
_INTERRUPTED = 130
"""Exit code of a command that was interrupted."""
_SYNTAX_ERROR = 2
_PROBES = 5
"""Commands that may be answered with what earlier ones left, before the shell is started again."""
_PROMPTS = 3
"""Prompts that SWE-ReX's own server has the shell write for a command: after it, and after the empty line and the `echo` for its code."""
_KEEP_CODES = """PROMPT_COMMAND='_spangrad_codes="$? ${_spangrad_codes:0:99}"'"""
"""Command that keeps the exit codes at the newest prompts, the last one first."""
_SHOW_PROMPT = 'echo "<$(printf %s "$PS1" | base64 | tr -d \'\\n\')>"'
"""Command that prints the prompt as base64: SWE-ReX's own server would take the prompt itself for the end of a command."""


class RemoteShell:
    """A session of a remote sandbox; an async context manager. Its actions run one after another."""

    def __init__(self, sandbox: RemoteSandbox, most_bytes: int) -> None:
        """`most_bytes` of an output are kept: its beginning and its end."""
        self._sandbox = sandbox
        self._most = most_bytes
        self._turn = asyncio.Lock()
        self._session = ""
        self._prompt = ""
        """Prompt of the shell, which is left in an output whose command's exit code the server lost."""

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def act(self, action: str, timeout_seconds: float | None) -> ActionResult:
        """Run an action to its end, or to its time limit, in seconds; None: there is none.

        Raises:
            ToolFailedError: the action holds a NUL or half of a surrogate pair.
            SandboxRequestError: the server does not answer.
        """
        action_bytes(action)  # refused here as in any sandbox: the server's refusal would be no action's
        async with self._turn:
            try:
                ended = await self._asked(action, timeout_seconds)
            except RemoteError as error:
                return await self._failed(error)
            code, output = ended.get("exit_code"), str(ended.get("output", ""))
            if code is None and (codes := await self._synchronize()) is not None:
                # SWE-ReX's own server asks the shell for the code, and loses it where the prompt comes 0.1 s late.
                code = codes[_PROMPTS - 1] if len(codes) >= _PROMPTS else UNKNOWN_CODE
                output = output.replace(self._prompt, "") if self._prompt else output
        return ActionResult(self._kept(output), code, None, False)

    async def _asked(self, action: str, timeout_seconds: float | None) -> dict[str, Any]:
        request = {"action_type": "bash", "command": action, "timeout": timeout_seconds, "session": self._session, "check": "silent"}
        return await self._sandbox.ask("run_in_session", request)

    async def _failed(self, error: RemoteError) -> ActionResult:
        """Return the end of an action for which the server raised; the shell is started again where it cannot be used any more."""
        if error.kind == "BashIncorrectSyntaxError":
            return ActionResult(self._kept(str(error.extra.get("bash_stderr") or error)), _SYNTAX_ERROR, None, False)
        timed_out = error.kind == "CommandTimeoutError"
        if timed_out:
            try:
                await self._sandbox.ask("run_in_session", {"action_type": "bash_interrupt", "session": self._session})
            except RemoteError:
                pass
            else:
                return ActionResult("", None if await self._synchronize() is None else _INTERRUPTED, None, True)
        await self._restart()
        return ActionResult("" if timed_out else self._kept(str(error)), None, None, timed_out)

    async def _synchronize(self) -> list[int] | None:
        """Read what earlier commands left on the terminal, so that the next one's output is its own.

        SWE-ReX's own server tells outputs apart by prompts, and leaves some behind when it interrupts twice or meets one late.

        Returns:
            Exit codes at the newest prompts before this, the last one first; none where the shell is not interactive. None: the shell was
            started again, here or, as its lost variables say, by the server.
        """
        marker = uuid.uuid4().hex
        for number in range(_PROBES):
            try:
                answer = await self._asked(f"echo {marker} $_spangrad_session $_spangrad_codes", _STARTUP_SECONDS)
            except RemoteError:
                break
            words = str(answer.get("output", "")).split()
            if words[:2] == [marker, self._session] and all(word.isdecimal() for word in words[2:]):
                return [int(word) for word in words[2:]][_PROMPTS * number :]
        await self._restart()
        return None

    async def _restart(self) -> None:
        await self._end()
        await self._start()

    async def _start(self) -> None:
        self._session = f"spangrad-{uuid.uuid4().hex}"
        await self._sandbox.ask("create_session", {"session": self._session, "session_type": "bash", "startup_timeout": _STARTUP_SECONDS})
        begin = f"cd {shlex.quote(self._sandbox.directory)}; _spangrad_session={self._session}; {_KEEP_CODES}; {_SHOW_PROMPT}"
        answer = await self._asked(begin, _STARTUP_SECONDS)
        written = re.search(r"<([\w+/=]*)>", str(answer.get("output", "")))
        self._prompt = base64.b64decode(written[1]).decode(errors="replace") if written else ""

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(remote.STOP_SECONDS):
                await self._sandbox.ask("close_session", {"session": self._session, "session_type": "bash"})
        except (SandboxRequestError, TimeoutError):
            pass  # the session or the server has ended

    def _kept(self, output: str) -> str:
        return shortened(output.replace("\r\n", "\n"), self._most)  # a terminal's, which SWE-ReX's own server leaves
