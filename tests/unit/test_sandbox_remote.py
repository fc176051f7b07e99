"""Sandboxes on other machines whose server hangs: their end is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from runner.sandboxes import remote
from runner.sandboxes.policy import RemoteServer
from runner.sandboxes.remote import RemoteSandbox
from runner.swe_rex.remote_shell import RemoteShell
from spangrad.http.server import HttpServer


async def test_remote_sandbox_whose_server_hangs_stops_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STOP_SECONDS", 0.1)
    hangs = asyncio.Event()

    async def execute(request: web.Request) -> web.Response:
        if (await request.json())["command"][0] == "rm":
            await hangs.wait()
        return web.json_response({"stdout": "/tmp/private\n", "stderr": "", "exit_code": 0})

    async def close_session(request: web.Request) -> web.Response:
        await hangs.wait()
        return web.json_response({})

    async def upload(request: web.Request) -> web.Response:
        await request.post()
        return web.json_response({})

    application = web.Application()
    application.add_routes([web.post("/execute", execute), web.post("/upload", upload), web.post("/close_session", close_session)])
    async with HttpServer(application, "127.0.0.1", 0) as server:
        sandbox = await RemoteSandbox(RemoteServer(server.url), tmp_path).__aenter__()
        await asyncio.wait_for(RemoteShell(sandbox, 100).__aexit__(), 10)
        await asyncio.wait_for(sandbox.stop(), 10)
        hangs.set()
