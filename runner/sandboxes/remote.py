"""Sandboxes on other machines: a client of a server that speaks SWE-ReX, in the shape of `Sandbox`.

In: programs and files. Out: their results. The server is the sandbox, and confines as it was set up to; nothing of the policy but the
working directory, which is uploaded, reaches it. What the protocol cannot do is refused with a sentence.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import signal
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import aiohttp

from runner.sandboxes.policy import RemoteServer, SandboxPolicy
from runner.sandboxes.program_io import MOST_BYTES, ProgramResult
from spangrad.errors import SandboxError, SandboxRequestError
from spangrad.http.client_timeouts import BODY_BYTES_A_SECOND
from spangrad.http.service import without_userinfo
from spangrad.types import SandboxRung

ANSWER_SECONDS = 60.0
"""Time that a server has to answer, in seconds, beside the time limits of the requests that it works on."""
STOP_SECONDS = 60.0
"""Time limit of the end of a sandbox, in seconds: a server may be busy with a command before it answers."""
_RAISED_STATUS = 511
"""HTTP status by which a server says that a request raised: the protocol's own."""
_REMEDY = "Start it (`swerex-remote`, or `spangrad tools --swe-rex`), or change runner.sandbox.url."
_READ = 'test -f "$2" || { echo "it is no regular file" >&2; exit 1; }; exec <"$2" || exit 1; head -c "$1" | base64'


class RemoteError(SandboxRequestError):
    """A request raised on the server."""

    def __init__(self, message: str, kind: str, extra: Mapping[str, Any]) -> None:
        """Keep the message, the name of the error's class there, and its further values."""
        super().__init__(message)
        self.kind = kind
        self.extra = extra


def require_expressible(policy: SandboxPolicy) -> RemoteServer:
    """Return the server of a policy that a remote sandbox can keep.

    Raises:
        SandboxError: the policy names no server, or demands what the protocol cannot do.
    """
    if policy.remote is None:
        raise SandboxError("a remote sandbox needs the URL of its server. Set runner.sandbox.url.")
    for demanded, name in ((policy.image, "the image"), (policy.services, "the services"), (policy.readable, "the readable files")):
        if demanded:
            raise SandboxError(
                f"a remote sandbox has what its server has: SWE-ReX cannot hand on {name} of a policy. Start the server with them, and "
                "leave them out here, or choose another runner.sandbox.engine."
            )
    return policy.remote


class RemoteSandbox:
    """A sandbox that a server is; an async context manager."""

    rung = SandboxRung.REMOTE
    image = None
    """The file system is the server's."""

    def __init__(self, server: RemoteServer, directory: Path) -> None:
        """`directory` is uploaded, and is the working directory of programs."""
        self._server = server
        self._source = directory
        self._session: aiohttp.ClientSession | None = None
        self._limits: list[float] = []
        """Time limits of the requests under way, in seconds: SWE-ReX's server works on one after the other."""
        self.home = ""
        """Private, writable directory on the server; empty until the sandbox is entered."""
        self.directory = ""
        """Working directory of programs: a copy of the policy's."""

    async def __aenter__(self) -> RemoteSandbox:
        """Connect, and upload the working directory.

        Raises:
            SandboxError: the server does not answer, or refuses.
        """
        headers = {"X-API-Key": self._server.key} if self._server.key else {}
        # SWE-ReX's server does nothing else while a command runs, and closes connections that it left waiting in the meantime.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)
        try:
            created = await self._execute(["mktemp", "-d"])
            if created["exit_code"]:
                raise SandboxRequestError(f"no directory can be created on the server: {created['stderr'].strip()}")
            self.home = created["stdout"].strip()
            self.directory = f"{self.home}/directory"
            await self._upload(self.directory, await asyncio.to_thread(zipped, self._source), unzip=True)
        except SandboxRequestError as error:
            await self._session.close()
            raise SandboxError(f"the sandbox of {without_userinfo(self._server.url)} did not start: {error}") from None
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def ask(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Send a request of the protocol, and wait for as long as its own time limit allows; without one, for ever.

        Raises:
            RemoteError: it raised on the server.
            SandboxRequestError: the server does not answer, or refuses.
        """
        limit = cast("float | None", body.get("timeout", body.get("startup_timeout", 0.0)))
        return await self._send(path, math.inf if limit is None else limit, json=body)

    async def _send(self, path: str, limit_seconds: float = 0.0, **content: Any) -> dict[str, Any]:
        assert self._session is not None
        url = f"{self._server.url.rstrip('/')}/{path}"
        shown_url = without_userinfo(url)
        self._limits.append(limit_seconds)
        seconds = sum(self._limits) + ANSWER_SECONDS
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None), self._session.post(url, **content) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SandboxRequestError(f"{shown_url} does not answer ({str(error) or f'within {seconds:g} s'}). {_REMEDY}") from None
        finally:
            self._limits.remove(limit_seconds)
        try:
            answer = json.loads(text)
            if response.status == _RAISED_STATUS:
                raised = answer["swerexception"]
                raise RemoteError(raised["message"], raised["class_path"].rpartition(".")[2], raised.get("extra_info") or {})
            if response.status >= 300:
                detail = answer.get("detail", text) if isinstance(answer, dict) else text
                raise SandboxRequestError(f"{shown_url} refuses ({response.status}): {detail}. See runner.sandbox.token.")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SandboxRequestError(f"{shown_url} does not speak SWE-ReX ({response.status}): {text[:200]!r}. {_REMEDY}") from None
        return answer

    async def _execute(self, command: Sequence[str], directory: str | None = None, **timeout: float | None) -> dict[str, Any]:
        """Run a program; one without `timeout` ends at once."""
        return await self.ask("execute", {"command": list(command), "cwd": directory, **timeout})

    async def _upload(self, path: str, content: bytes, *, unzip: bool = False) -> None:
        form = aiohttp.FormData()
        form.add_field("file", content, filename="content", content_type="application/octet-stream")
        form.add_field("target_path", path)
        form.add_field("unzip", str(unzip).lower())
        await self._send("upload", len(content) / BODY_BYTES_A_SECOND, data=form)

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        timeout_seconds: float | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> ProgramResult:
        """Run a program to its end; arguments and errors as of `Sandbox.run`.

        What is no UTF-8 in an output is escaped; a program that exceeds its time has no outputs.
        """
        words = list(command)
        if environment:
            words = ["env", *(f"{name}={value}" for name, value in environment.items()), *words]
        if stdin:
            file = f"{self.home}/.{uuid.uuid4().hex}"
            await self._upload(file, stdin)
            words = ["sh", "-c", 'exec <"$1" && rm -f "$1" && shift && exec "$@"', "sh", file, *words]
        try:
            ended = await self._execute(words, directory or self.directory, timeout=timeout_seconds)
        except RemoteError as error:
            if error.kind != "CommandTimeoutError":
                raise
            return ProgramResult(-signal.SIGKILL, b"", b"", False, True)
        stdout, stderr = (str(ended[name]).encode(errors="surrogateescape") for name in ("stdout", "stderr"))
        truncated = max(len(stdout), len(stderr)) > most_bytes
        return ProgramResult(int(ended["exit_code"]), stdout[:most_bytes], stderr[:most_bytes], truncated, False)

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the first bytes of a regular file on the server; errors as of `Sandbox.read`."""
        # The protocol's own route reads text, and changes the ends of its lines.
        ended = await self._execute(["sh", "-c", _READ, "sh", str(most_bytes), path], self.directory)
        if ended["exit_code"]:
            raise SandboxRequestError(f"{path} cannot be read on the server: {ended['stderr'].strip()}")
        return base64.b64decode(ended["stdout"])

    async def write(self, path: str, content: bytes) -> None:
        """Write a file on the server, and the directories above it; errors as of `Sandbox.write`."""
        await self._upload(path, content)

    async def open_process(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, directory: str | None = None
    ) -> NoReturn:
        """Refuse by a SandboxRequestError: the protocol has no pipes."""
        del environment, directory
        raise SandboxRequestError(f"SWE-ReX has no pipes, so {command[0]} cannot be started with any. Run it to its end by `run`.")

    async def expose(self, port: int) -> NoReturn:
        """Refuse by a SandboxRequestError: the protocol passes no connections."""
        raise SandboxRequestError(f"SWE-ReX passes no connections, so port {port} cannot be exposed. Use an engine of this machine.")

    async def stop(self) -> None:
        """Remove the private directory, end the server's sessions, and disconnect, in bounded time; idempotent."""
        session = self._session
        if session is None or session.closed:
            return
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._execute(["rm", "-rf", self.home])
                await self._send("close")
        except (SandboxRequestError, TimeoutError):
            pass  # a server that is away has nothing left to end
        finally:
            await session.close()


def zipped(directory: Path) -> bytes:
    """Return the regular files below a directory as a zip archive, links left out."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.is_symlink():
                archive.write(path, path.relative_to(directory))
    return packed.getvalue()
