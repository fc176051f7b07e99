"""Runtime of SWE-ReX over one of our sandboxes: its methods, with its errors.

In: requests of the protocol. Out: responses of the protocol, or a `RexError`. Invariant: each action is a span `execute_tool`; after
`close` the next request meets a sandbox in which nothing has run.
"""

from __future__ import annotations

import asyncio
import errno
import json
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from opentelemetry.context import Context

from runner.sandboxes.engines import SandboxEngine
from runner.sandboxes.policy import inner_interpreter
from runner.sandboxes.sandbox import Sandbox, start
from runner.swe_rex.wire import RexAction, RexClosedSession, RexCommand, RexError, RexInterrupt, RexRead, RexSession, RexWrite
from runner.tools.action_spans import ActionSpans
from runner.tools.output import shortened
from runner.tools.session import ActionResult, ToolFailedError, ToolSession
from runner.tools.toolbox import OUTPUT_BYTES
from spangrad.errors import SandboxError, SandboxRequestError

MOST_BYTES = 2**24
"""Largest output of a program, and largest file that is read, in bytes."""
_BASH = {"session_type": "bash"}


class RexRuntime:
    """A sandbox and its shells by name."""

    def __init__(self, engine: SandboxEngine, spans: ActionSpans) -> None:
        """`engine` starts each sandbox, as `prepare_tools` returns it; `spans` record the actions."""
        self._engine = engine
        self._spans = spans
        self._changing = asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self._sessions: dict[str, ToolSession] = {}

    async def create_session(self, request: RexSession, parent: Context) -> dict[str, Any]:
        """Start a shell, and have it read its first files."""
        sandbox = await self._opened()
        async with self._changing:
            if request.session in self._sessions:
                raise RexError("SessionExistsError", f"session {request.session} already exists")
            shell = ToolSession.shell(sandbox, OUTPUT_BYTES)
            await shell.__aenter__()
            self._sessions[request.session] = shell
        output = ""
        if request.startup_source:
            async with self._recorded("shell", {"source": request.startup_source}, parent) as end:
                script = "\n".join(f"source {path}" for path in request.startup_source)
                output = (await shell.act(script, request.startup_timeout)).output
                end(output, False)
        return {"output": output, **_BASH}

    async def run_in_session(self, request: RexAction | RexInterrupt, parent: Context) -> dict[str, Any]:
        """Run a command in a shell, or interrupt the one that runs."""
        if (shell := self._sessions.get(request.session)) is None:
            raise RexError("SessionDoesNotExistError", f"session {request.session!r} does not exist")
        if isinstance(request, RexInterrupt):
            async with self._recorded("shell", {"interrupt": True}, parent) as end:
                interrupted = await shell.interrupt(request.timeout, tries=request.n_retry, patterns=request.expect)
                end(interrupted.output if interrupted else "", False)
            return _observation(0, interrupted)
        reads = request.is_interactive_command or request.is_interactive_quit
        if not shell.is_open:
            await self._require_syntax(request.command)
        async with self._recorded("shell", {"command": request.command}, parent) as end:
            if reads and shell.is_open:
                result = await shell.write_line(request.command, request.timeout, patterns=request.expect)
            else:
                result = await shell.act(request.command, request.timeout, reads=reads, patterns=request.expect)
            end(result.output, result.timed_out or (result.matched is None and result.exit_code != 0))
        if result.timed_out:
            raise RexError("CommandTimeoutError", f"timeout after {request.timeout} seconds while running command {request.command!r}")
        if reads or result.matched is not None:
            return _observation(0, result)
        if request.check == "raise" and result.exit_code is None:
            raise RexError("NoExitCodeError", f"the shell ended with command {request.command!r}, and was started again")
        if request.check == "raise" and result.exit_code != 0:
            facts = f"Command {request.command!r} failed with exit code {result.exit_code}. Here is the output:\n{result.output!r}"
            raise _failed(request.error_msg, facts)
        return _observation(None if request.check == "ignore" else result.exit_code, result)

    async def _require_syntax(self, command: str) -> None:
        """Refuse what is no command of bash, of which a part would run otherwise."""
        checked = await (await self._opened()).run(["bash", "-n"], stdin=command.encode())
        if checked.exit_code:
            stderr = checked.stderr.decode(errors="backslashreplace")
            values = {"bash_stdout": checked.stdout.decode(errors="backslashreplace"), "bash_stderr": stderr}
            raise RexError(
                "BashIncorrectSyntaxError", f"Error (exit code {checked.exit_code}) while checking bash command:\n{stderr}", values
            )

    async def close_session(self, request: RexClosedSession, parent: Context) -> dict[str, Any]:
        """End a shell."""
        del parent
        if (shell := self._sessions.pop(request.session, None)) is None:
            raise RexError("SessionDoesNotExistError", f"session {request.session!r} does not exist")
        await shell.__aexit__(None, None, None)
        return _BASH

    async def execute(self, request: RexCommand, parent: Context) -> dict[str, Any]:
        """Run a program to its end, apart from all shells."""
        words = [request.command] if isinstance(request.command, str) else request.command
        command = ["sh", "-c", *words] if request.shell else words
        if request.merge_output_streams:
            command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *command]
        sandbox = await self._opened()
        async with self._recorded("execute", {"command": request.command}, parent) as end:
            result = await sandbox.run(
                command, environment=request.env, directory=request.cwd, timeout_seconds=request.timeout, most_bytes=MOST_BYTES
            )
            stdout, stderr = (output.decode(errors="backslashreplace") for output in (result.stdout, result.stderr))
            end(stdout + stderr, result.timed_out or result.exit_code != 0)
        if result.timed_out:
            raise RexError("CommandTimeoutError", f"Timeout ({request.timeout}s) exceeded while running command")
        if result.truncated:
            raise RexError("SwerexException", f"the program wrote more than {MOST_BYTES} bytes: have it write to a file.")
        if request.check and result.exit_code:
            facts = f"Command {request.command!r} failed with exit code {result.exit_code}. Stdout:\n{stdout!r}\nStderr:\n{stderr!r}"
            raise _failed(request.error_msg, facts)
        return {"stdout": stdout, "stderr": stderr, "exit_code": result.exit_code}

    async def read_file(self, request: RexRead, parent: Context) -> dict[str, Any]:
        """Return a file's text."""
        sandbox = await self._opened()
        async with self._recorded("read_file", {"path": request.path}, parent) as end:
            content = await sandbox.read(request.path, MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise RexError("SwerexException", f"{request.path} has more than {MOST_BYTES} bytes: read a part of it by a command.")
            try:
                text = content.decode(request.encoding or "utf-8", request.errors or "strict")
            except (UnicodeDecodeError, LookupError) as error:
                raise RexError("builtins.ValueError", f"{request.path}: {error}") from None
            end(text, False)
        return {"content": text}

    async def write_file(self, request: RexWrite, parent: Context) -> dict[str, Any]:
        """Write a file, and the directories above it."""
        sandbox = await self._opened()
        async with self._recorded("write_file", msgspec.structs.asdict(request), parent) as end:
            await sandbox.write(request.path, request.content.encode())
            end(f"wrote {request.path}", False)
        return {}

    async def upload(self, path: str, content: bytes, unzip: bool, parent: Context) -> dict[str, Any]:
        """Write a file, or the files of a zip archive to a directory."""
        sandbox = await self._opened()
        async with self._recorded("upload", {"path": path, "bytes": len(content)}, parent) as end:
            archive = f"{sandbox.home}/.{uuid.uuid4().hex}.zip"
            await sandbox.write(archive if unzip else path, content)
            if unzip:
                # Inside, where names of the archive lead nowhere else, and the sandbox's limits hold.
                program = [str(inner_interpreter(sandbox.image)), "-I", "-m", "zipfile", "-e", archive, path]
                unpacked = await sandbox.run(program)
                await sandbox.run(["rm", "-f", archive])
                if unpacked.exit_code:
                    raise SandboxRequestError(f"{path} cannot be unpacked: {unpacked.stderr.decode(errors='replace').strip()[-500:]}")
            end(f"wrote {path}", False)
        return {}

    async def close(self) -> dict[str, Any]:
        """End the sandbox, if there is one."""
        async with self._changing:
            sandbox, self._sandbox = self._sandbox, None
            sessions, self._sessions = self._sessions, {}
            if sandbox is not None:
                try:
                    for shell in sessions.values():
                        await shell.__aexit__(None, None, None)
                finally:
                    await sandbox.stop()
        return {}

    async def _opened(self) -> Sandbox:
        async with self._changing:
            if self._sandbox is None:
                self._sandbox = await start(self._engine)
            return self._sandbox

    @asynccontextmanager
    async def _recorded(self, tool: str, arguments: dict[str, object], parent: Context) -> AsyncGenerator[Callable[[str, bool], None]]:
        """Record an action; its failure inside is an error of the protocol."""
        with self._spans.action(tool, json.dumps(arguments), parent=parent) as end:
            try:
                yield lambda text, failed: end(shortened(text, OUTPUT_BYTES), failed)
            except (SandboxError, ToolFailedError) as error:
                end(str(error), True)
                missing = isinstance(error, SandboxRequestError) and error.errno == errno.ENOENT
                raise RexError("builtins.FileNotFoundError" if missing else "SwerexException", str(error)) from None


def _observation(exit_code: int | None, result: ActionResult | None) -> dict[str, Any]:
    """Return the answer to an action, with the pattern that its output matched. None: it was interrupted, and answers its own request."""
    output, matched = (result.output, result.matched or "") if result else ("", "")
    return {"output": output, "exit_code": exit_code, "expect_string": matched, "failure_reason": "", **_BASH}


def _failed(message: str, facts: str) -> RexError:
    """Return the error of another exit code than 0, with the client's own message before the facts."""
    return RexError("NonZeroExitCodeError", f"{message}: {facts}" if message else facts)
