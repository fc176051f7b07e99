"""Routes of SWE-ReX: the key, refusals and errors in the protocol's form, requests that come again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.context import Context

from runner.sandboxes.engines import SandboxEngine
from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.swe_rex import server as server_module
from runner.swe_rex.runtime import RexRuntime
from runner.swe_rex.server import rex_server, serve
from runner.tools.action_spans import ActionSpans
from spangrad.errors import SpangradError
from spangrad.settings import Settings, ToolServiceSettings
from spangrad.types import SandboxRung


class CountingRuntime(RexRuntime):
    """Runtime without a sandbox, which counts its ends."""

    def __init__(self) -> None:
        super().__init__(SandboxEngine(SandboxRung.NONE, (), "none is started"), ActionSpans(None))
        self.ends = 0

    async def close(self) -> dict[str, Any]:
        self.ends += 1
        return {}


async def asked(url: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with (
        aiohttp.ClientSession() as http,
        http.request("GET" if path == "/is_alive" else "POST", url + path, data=data, headers=headers) as response,
    ):
        return response.status, await response.json()


async def test_rex_server_without_its_key_is_refused() -> None:
    runtime = CountingRuntime()
    async with rex_server(runtime, "127.0.0.1", 0, "key", Context()) as server:
        for headers in ({}, {"X-API-Key": "other"}):
            status, answer = await asked(server.url, "/close", **headers)
            assert (status, answer) == (401, {"detail": "this server asks for its key: send `X-API-Key` with tools.token."})
        assert await asked(server.url, "/is_alive", **{"X-API-Key": "key"}) == (200, {"is_alive": True, "message": ""})
    assert runtime.ends == 0


async def test_rex_server_errors_have_the_form_of_the_protocol() -> None:
    async with rex_server(CountingRuntime(), "127.0.0.1", 0, None, Context()) as server:
        status, answer = await asked(server.url, "/run_in_session", {"action_type": "bash", "command": "true", "session": "x"})
        assert status == 511
        assert answer["swerexception"] == {
            "message": "session 'x' does not exist",
            "class_path": "swerex.exceptions.SessionDoesNotExistError",
            "traceback": "",
            "extra_info": {},
        }
        assert (await asked(server.url, "/run_in_session", {"action_type": "gdb", "command": "true"}))[0] == 422
        assert (await asked(server.url, "/run_in_session", b'{"x": ' + b"[" * 100_000))[0] == 422
        status, answer = await asked(server.url, "/nowhere")
        assert (status, answer["detail"]) == (404, "POST /nowhere is not answered here: these are SWE-ReX's routes.")


async def test_rex_server_repeated_request_is_answered_without_doing_it_again() -> None:
    runtime = CountingRuntime()
    async with rex_server(runtime, "127.0.0.1", 0, None, Context()) as server:
        for number in ("a", "a", "b"):
            assert await asked(server.url, "/close", **{"X-Request-ID": number}) == (200, {})
    assert runtime.ends == 2


async def test_rex_server_keeps_a_bounded_number_of_answers_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CountingRuntime()
    async with rex_server(runtime, "127.0.0.1", 0, None, Context()) as server:

        async def ends(*numbers: str) -> int:
            before = runtime.ends
            for number in numbers:
                await asked(server.url, "/close", **{"X-Request-ID": number})
            return runtime.ends - before

        monkeypatch.setattr(server_module, "_KEPT_RESPONSES", 2)
        assert await ends("a", "b", "c", "b", "c", "a") == 4
        monkeypatch.setattr(server_module, "_KEPT_BYTES", 1)
        assert await ends("d", "d", "c") == 2
        refused = [await asked(server.url, "/execute", {"command": 1}, **{"X-Request-ID": "e"}) for _ in range(2)]
        assert [status for status, _ in refused] == [422, 422]
        assert await ends("c") == 0, "a refusal is not kept"


def test_rex_server_beyond_loopback_requires_a_token(tmp_path: Path) -> None:
    policy = SandboxPolicy(tmp_path, (), {}, False, SandboxLimits(1, 1, 1))
    with pytest.raises(SpangradError, match=r"Set tools\.token, or bind 127\.0\.0\.1"):
        serve(Settings(tools=ToolServiceSettings(host="0.0.0.0")), policy, {})
