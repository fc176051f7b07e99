"""Requests to a remote sandbox end in bounded time where the server accepts and does not answer."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from runner.sandboxes import remote
from runner.sandboxes.policy import RemoteServer
from runner.sandboxes.remote import RemoteSandbox
from runner.swe_rex.remote_shell import RemoteShell
from spangrad.errors import SandboxError, SandboxRequestError
from spangrad.http.server import HttpServer


class SlowServer:
    """Speaks as much of SWE-ReX as a sandbox needs, one request after the other, and answers none while it is silent."""

    def __init__(self) -> None:
        self.silent = False
        self._turn = asyncio.Lock()
        self.application = web.Application()
        self.application.add_routes([web.post("/{path}", self.answer)])

    async def answer(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json() if request.content_type == "application/json" else {}
        async with self._turn:
            if self.silent:
                await asyncio.Event().wait()
            command = body.get("command", "")
            if command[:1] == ["sleep"]:
                await asyncio.sleep(float(command[1]))
            return web.json_response({"exit_code": 0, "stdout": base64.b64encode(b"text").decode(), "stderr": "", "output": ""})


@asynccontextmanager
async def serving() -> AsyncGenerator[tuple[SlowServer, RemoteServer]]:
    slow = SlowServer()
    async with HttpServer(slow.application, "127.0.0.1", 0, drain_seconds=0.1) as server:
        yield slow, RemoteServer(server.url, None)


@pytest.fixture
def shorten(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Shorten the limit once a sandbox has started: on a slow machine its start may take longer."""
    return lambda: monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.5)


async def test_remote_sandbox_of_silent_server_does_not_start(tmp_path: Path, shorten: Callable[[], None]) -> None:
    async with serving() as (slow, server):
        shorten()
        slow.silent = True
        message = r"the sandbox of http://\S+ did not start: http://\S+/execute does not answer \(within 0\.5 s\)\. Start it"
        async with asyncio.timeout(10):
            with pytest.raises(SandboxError, match=message):
                await RemoteSandbox(server, tmp_path).__aenter__()


async def test_remote_run_on_silent_server_ends_after_its_own_limit(tmp_path: Path, shorten: Callable[[], None]) -> None:
    async with serving() as (slow, server), RemoteSandbox(server, tmp_path) as sandbox:
        slow.silent = True
        shorten()
        began = time.monotonic()
        async with asyncio.timeout(10):
            with pytest.raises(SandboxRequestError, match=r"/execute does not answer \(within 1\.5 s\)"):
                await sandbox.run(["true"], timeout_seconds=1.0)
            assert time.monotonic() - began >= 1.5
            with pytest.raises(SandboxRequestError, match=r"/upload does not answer \(within"):
                await sandbox.write("file", b"content")
        slow.silent = False


async def test_remote_shell_on_silent_server_ends_after_its_own_limit(tmp_path: Path, shorten: Callable[[], None]) -> None:
    async with serving() as (slow, server), RemoteSandbox(server, tmp_path) as sandbox, asyncio.timeout(20):
        shell = RemoteShell(sandbox, 100)
        await shell._start()
        slow.silent = True
        shorten()
        with pytest.raises(SandboxRequestError, match=r"/run_in_session does not answer \(within 1\.5 s\)"):
            await shell.act("true", 1.0)


async def test_remote_run_without_limit_waits_for_its_end(tmp_path: Path, shorten: Callable[[], None]) -> None:
    async with serving() as (_, server), RemoteSandbox(server, tmp_path) as sandbox:
        shorten()
        assert (await sandbox.run(["sleep", "1"])).exit_code == 0


async def test_remote_requests_wait_for_commands_before_them(tmp_path: Path, shorten: Callable[[], None]) -> None:
    async with serving() as (_, server), RemoteSandbox(server, tmp_path) as sandbox:
        shorten()
        run = asyncio.create_task(sandbox.run(["sleep", "1"], timeout_seconds=5))
        await asyncio.sleep(0.1)
        assert await sandbox.read("file") == b"text"
        await run
