"""`spangrad env serve` of environments that raise what `except Exception` does not catch: their own session alone gets an error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runner.sessions.server import running
from runner.sessions.shards import ShardCommand
from tests.support.runners import environment_service_settings

AGENTS = Path(__file__).resolve().parent.parent / "agents"


@asynccontextmanager
async def served(environment: str) -> AsyncGenerator[aiohttp.ClientSession]:
    """A client of a server with one process, which must be the same at the end."""
    commands = {"game": ShardCommand(f"raising_games:{environment}", AGENTS, {})}
    async with running(environment_service_settings(), commands, 1, 8) as url, aiohttp.ClientSession(url) as client:
        yield client
        async with client.get("/metrics") as response:
            assert 'spangrad_sessions_shard_restarts_total{environment="game"} 0.0' in (await response.text()).splitlines()


async def ask(connection: aiohttp.ClientWebSocketResponse, kind: str, data: object = None) -> dict[str, Any]:
    """A request and the data of its response, which must come at once."""
    await connection.send_json({"type": kind, "data": data})
    return (await connection.receive_json(timeout=40))["data"]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ("PlainPanics", "RuntimeError: Panic: broken"),
        ("PlainCancels", "RuntimeError: cancelled by the user's code itself, in a task of its own"),
        ("PlainInterrupts", "the environment ended its session by KeyboardInterrupt. Open a new one"),
        ("AwaitedPanics", "RuntimeError: Panic: broken"),
        ("AwaitedExits", "SystemExit: 3"),
        ("AsyncPanics", "RuntimeError: Panic: broken"),
        ("AsyncInterrupts", "the environment ended its session by KeyboardInterrupt. Open a new one"),
        ("AsyncCancels", "RuntimeError: cancelled by the user's code itself, in a task of its own"),
        ("AsyncCancelsItself", "the environment ended its session by CancelledError. Open a new one"),
    ],
)
async def test_env_serve_step_that_raises_anything_ends_no_other_session(environment: str, sentence: str) -> None:
    async with served(environment) as client, client.ws_connect("/ws") as first, client.ws_connect("/ws") as second:
        for connection in (first, second):
            assert (await ask(connection, "reset"))["observation"] == {"text": "Begin."}
        assert await ask(first, "step", {"text": "raise"}) == {"code": "EXECUTION_ERROR", "message": sentence}
        assert (await ask(second, "step", {"text": "on"}))["observation"] == {"text": "on"}
        if "Open a new one" not in sentence:
            assert (await ask(first, "step", {"text": "on"}))["observation"] == {"text": "on"}


@pytest.mark.parametrize(("environment", "kind"), [("RefusesTasks", "reset"), ("PlainPanics", "step")])
async def test_env_serve_log_has_the_traceback_of_an_environment(environment: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with served(environment) as client, client.ws_connect("/ws") as connection:
        await ask(connection, "reset")
        await ask(connection, "step", {"text": "raise"})
    errors = capfd.readouterr().err
    assert "the environment failed: " in errors
    assert re.search(rf'raising_games\.py", line \d+, in {kind}\n', errors)


async def test_env_serve_task_of_environment_that_exits_ends_no_session(capfd: pytest.CaptureFixture[str]) -> None:
    async with served("AsyncExitsInTask") as client, client.ws_connect("/ws") as first, client.ws_connect("/ws") as second:
        for connection in (first, second):
            await ask(connection, "reset")
        for action in ("raise", "on", "raise", "on"):
            for connection in (first, second):
                assert (await ask(connection, "step", {"text": action}))["observation"] == {"text": action}
            await asyncio.sleep(0.1)
    assert "a task of an environment has ended by SystemExit: " in capfd.readouterr().err


@pytest.mark.parametrize("environment", ["PanicsWhenCreated", "AsyncPanicsWhenCreated"])
async def test_env_serve_creation_that_raises_anything_ends_no_other_session(environment: str) -> None:
    async with served(environment) as client, client.ws_connect("/ws") as first:
        await ask(first, "reset")
        async with client.ws_connect("/ws") as second:
            error = (await second.receive_json(timeout=40))["data"]
            assert (error["code"], error["message"]) == ("FACTORY_ERROR", "no environment can be created: RuntimeError: Panic: broken")
        assert (await ask(first, "step", {"text": "on"}))["observation"] == {"text": "on"}


async def test_env_serve_request_over_http_that_is_none_is_refused_with_a_remedy() -> None:
    async with served("PlainPanics") as client:
        async with client.post("/step", json={"episode_id": "e", "action": "on"}) as response:
            sentence = "the action 'on' is no object. Send {'text': ...}"
            assert (response.status, (await response.json())["error"]) == (422, sentence)
        async with client.get("/step") as response:
            sentence = "environment game has no path /step for GET. See docs/guides/environments.md"
            assert (response.status, (await response.json())["error"]) == (404, sentence)
        async with client.get("/game") as response:
            assert (await response.json())["error"] == sentence.replace("/step", "/")


async def test_env_serve_reset_over_http_that_fails_without_a_name_leaves_no_session() -> None:
    """Its client never hears the name that the server gave it, and could not use the session."""
    async with served("RefusesTasks") as client:
        for fields, sessions in (({}, 0), ({"episode_id": "mine"}, 1)):
            async with client.post("/reset", json=fields) as response:
                assert (response.status, (await response.json())["error"]) == (500, "ValueError: no such task")
            async with client.get("/v1/load") as response:
                assert (await response.json())["sessions"] == sessions
