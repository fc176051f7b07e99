"""Servers that need no token refuse what pages of foreign web sites have a browser of this machine send."""

from __future__ import annotations

from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.context import Context
from pydantic import SecretStr

from collector.auth import Guardian
from collector.otlp.receiver_http import HTTPReceiver
from runner.sandboxes.engines import SandboxEngine
from runner.swe_rex.runtime import RexRuntime
from runner.swe_rex.server import rex_server
from runner.tools.action_spans import ActionSpans
from spangrad.http.foreign_sites import foreign_problem
from spangrad.http.server import Address, HttpServer, json_response, json_server
from spangrad.types import SandboxRung
from tests.support.gateways import ASKED, staged

FOREIGN = [{"Host": "rebound.example:80"}, {"Origin": "http://evil.example"}, {"Origin": "null"}]
"""Headers of requests that a page of a foreign site has a browser send."""


@pytest.mark.parametrize(
    ("host", "origin", "foreign"),
    [
        (None, None, False),
        ("127.0.0.1:8123", None, False),
        ("LOCALHOST", None, False),
        ("[::1]:8123", None, False),
        ("host.docker.internal:8100", None, False),
        ("gateway:8100", None, False),
        ("localhost.:8123", None, False),
        ("[fe80::1%25eth0]:8123", None, False),
        ("127.0.0.1:8123", "", False),
        ("127.0.0.1:8123", "http://localhost:3000", False),
        ("127.0.0.1:8123", "http://[::1]:3000", False),
        ("10.0.2.2:8123", "http://10.0.2.2:8123", False),
        ("rebound.example:8123", None, True),
        ("rebound.example:8123", "http://rebound.example:8123", True),
        ("127.0.0.1.rebound.example", None, True),
        ("rebound.example.:8123", None, True),
        ("127.0.0.1:8123", "http://evil.example", True),
        ("127.0.0.1:8123", "http://localhost@evil.example", True),
        ("127.0.0.1:8123", "http://127.0.0.1.evil.example", True),
        ("127.0.0.1:8123", "null", True),
    ],
)
def test_foreign_problem_names_hosts_and_origins_of_other_sites(host: str | None, origin: str | None, foreign: bool) -> None:
    assert bool(foreign_problem(host, origin)) == foreign


async def _echo(request: web.Request) -> web.StreamResponse:
    if request.method == "POST":
        return json_response(await request.text())
    connection = web.WebSocketResponse()
    await connection.prepare(request)
    await connection.close()
    return connection


def _server(token: SecretStr | None) -> HttpServer:
    routes = [web.post("/", _echo), web.get("/ws", _echo)]
    return json_server(Address("queue", "docs/guides/queue.md", "127.0.0.1", 0, token), routes)


async def _status(url: str, headers: dict[str, str], **more: Any) -> int:
    async with aiohttp.ClientSession() as client, client.post(url, headers=headers, **more) as response:
        return response.status


@pytest.mark.parametrize("headers", FOREIGN)
async def test_json_server_without_token_refuses_foreign_sites(headers: dict[str, str]) -> None:
    async with _server(None) as server, aiohttp.ClientSession() as client:
        # A form's content type, with which a browser sends no request before this.
        async with client.post(server.url, data="{}", headers={"Content-Type": "text/plain", **headers}) as response:
            assert (response.status, "Set queue.token" in (await response.json())["error"]) == (403, True)
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await client.ws_connect(f"{server.url}/ws", headers=headers)
        assert await _status(server.url, {}, data="{}") == 200
        await (await client.ws_connect(f"{server.url}/ws", headers={"Origin": server.url})).close()


@pytest.mark.parametrize("headers", FOREIGN)
async def test_json_server_with_token_answers_by_any_name(headers: dict[str, str]) -> None:
    async with _server(SecretStr("secret")) as server:
        assert await _status(server.url, {"Authorization": "Bearer secret", **headers}) == 200
        assert await _status(server.url, headers) == 401


@pytest.mark.parametrize("headers", FOREIGN)
async def test_rex_server_without_key_refuses_foreign_sites(headers: dict[str, str]) -> None:
    runtime = RexRuntime(SandboxEngine(SandboxRung.NONE, (), "none is started"), ActionSpans(None))
    async with rex_server(runtime, "127.0.0.1", 0, None, Context()) as server:
        assert await _status(f"{server.url}/execute", headers, data='{"command": "id", "shell": true}') == 403


@pytest.mark.parametrize("headers", FOREIGN)
async def test_otlp_receiver_without_token_refuses_foreign_sites(headers: dict[str, str]) -> None:
    application = HTTPReceiver(cast("Any", None), Guardian(None)).application()
    async with HttpServer(application, "127.0.0.1", 0) as server:
        assert await _status(f"{server.url}/v1/traces", headers, data="{}") == 403


@pytest.mark.parametrize("headers", FOREIGN)
async def test_gateway_without_token_refuses_foreign_sites(headers: dict[str, str]) -> None:
    async with staged() as stage:
        for path in ("/v1/chat/completions", "/add_llm_server"):
            async with stage.client.post(path, json=ASKED, headers=headers) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"], "Set gateway.token" in error["message"]) == (403, 403, True)
    async with staged(token="root") as stage, stage.client.post("/v1/chat/completions", json=ASKED, headers=headers) as response:
        assert response.status == 200
