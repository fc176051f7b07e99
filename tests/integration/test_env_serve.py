"""`spangrad env serve`: sessions over WebSocket and HTTP, in processes that may die."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from benchmarks.peers.environment import peer_environment, peer_packages
from runner.sessions.server import running
from runner.sessions.shards import ShardCommand
from spangrad.episode.adapters.openenv_server import OpenEnvServer
from spangrad.errors import EnvironmentsError
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import EnvironmentServiceSettings
from tests.support.otlp import OtlpSink
from tests.support.processes import run_spangrad
from tests.support.runners import environment_service_settings, until

AGENTS = Path(__file__).resolve().parent.parent / "agents"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def served(
    environment: str = "guess_game:Guess",
    shards: int = 1,
    capacity: int = 8,
    variables: dict[str, str] | None = None,
    settings: EnvironmentServiceSettings | None = None,
) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
    """A server, and a client of it."""
    commands = {"game": ShardCommand(environment, AGENTS, variables or {})}
    async with running(settings or environment_service_settings(), commands, shards, capacity) as url, aiohttp.ClientSession(url) as client:
        yield client, url


async def ask(connection: aiohttp.ClientWebSocketResponse, kind: str, data: object = None, **fields: object) -> dict[str, Any]:
    """A request and the data of its response."""
    await connection.send_json({"type": kind, "data": data, **fields})
    return (await connection.receive_json(timeout=40))["data"]


async def post(client: aiohttp.ClientSession, path: str, **fields: object) -> tuple[int, dict[str, Any]]:
    async with client.post(path, json=fields) as response:
        return response.status, await response.json()


async def opened(client: aiohttp.ClientSession) -> int:
    async with client.get("/v1/load") as response:
        return (await response.json())["sessions"]


@pytest.mark.parametrize("environment", ["guess_game:Guess", "guess_game:AsyncGuess"])
async def test_env_serve_sessions_are_apart_and_end_with_their_connection(environment: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with served(environment, shards=2, capacity=2) as (client, _):
        async with client.ws_connect("/ws") as first, client.ws_connect("/ws") as second:
            for number, connection in enumerate((first, second)):
                answer = await ask(connection, "reset", {"secret": number, "log": str(log), "episode_id": f"e{number}"})
                assert answer["observation"] == {"text": "Your guess?"}
            assert (await ask(first, "step", {"text": "5"}))["observation"] == {"played": [5]}
            assert (await ask(second, "step", {"text": "6"}))["observation"] == {"played": [6]}
            assert await ask(second, "state") == {"episode_id": "e1", "step_count": 1}
            assert (await ask(first, "step", {"text": "0"})) == {
                "observation": {"text": "Right."},
                "reward": 1.0,
                "done": True,
                "metadata": {"guesses": 2},
            }
            async with client.ws_connect("/ws") as third:
                refused = (await third.receive_json(timeout=40))["data"]
                assert (refused["code"], refused["max_sessions"]) == ("CAPACITY_REACHED", 2)
                assert (await third.receive(timeout=40)).type is aiohttp.WSMsgType.CLOSE
            await first.send_json({"type": "close"})
            assert (await first.receive(timeout=40)).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: _is(opened(client), 0))
        await until(lambda: _is(asyncio.to_thread(lambda: log.read_text().count("closed")), 2))


async def _is(value: Any, expected: object) -> bool:
    return await value == expected


async def test_env_serve_crash_ends_its_sessions_alone_with_an_error() -> None:
    async with (
        served(shards=2) as (client, url),
        client.ws_connect("/ws") as first,
        client.ws_connect("/ws") as second,
        client.ws_connect("/ws") as third,
    ):
        for connection in (first, second, third):  # the least loaded takes the next one
            await ask(connection, "reset")
        await first.send_json({"type": "step", "data": {"text": "crash"}})
        for connection in (first, third):
            error = await connection.receive_json(timeout=40)
            assert (error["type"], error["data"]["code"]) == ("error", "SESSION_ERROR")
            assert "process of this environment has ended" in error["data"]["message"]
        assert (await ask(second, "step", {"text": "5"}))["observation"] == {"played": [5]}
        await until(lambda: _has(client, 'spangrad_sessions_shards{environment="game"} 2.0'))
        async with client.ws_connect("/ws") as anew:
            assert (await ask(anew, "step", {"text": "1"}))["code"] == "SESSION_ERROR"
            assert (await ask(anew, "reset"))["reward"] is None
        assert await _has(client, 'spangrad_sessions_shard_restarts_total{environment="game"} 1.0')
        assert url.startswith("http://127.0.0.1:")


async def _has(client: aiohttp.ClientSession, line: str) -> bool:
    async with client.get("/metrics") as response:
        return line in (await response.text()).splitlines()


async def test_env_serve_step_retried_after_a_reconnect_is_not_played_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with served() as (client, _):
        async with client.ws_connect("/ws?session_id=a") as connection:
            await ask(connection, "reset", {"secret": 9, "log": str(log)})
            await connection.send_json({"type": "step", "data": {"text": "sleep"}, "step": 1})
        async with client.ws_connect("/ws?session_id=a") as connection:
            answer = await ask(connection, "step", {"text": "sleep"}, step=1)
            assert answer["observation"] == {"played": ["sleep"]}
            assert (await ask(connection, "step", {"text": "4"}, step=2))["observation"] == {"played": ["sleep", 4]}
        assert log.read_text().splitlines() == ["9 sleep", "9 4"]


async def test_env_serve_reset_retried_after_a_reconnect_or_over_http_resets_nothing() -> None:
    async with served() as (client, _):
        async with client.ws_connect("/ws?session_id=a") as connection:
            first = await ask(connection, "reset", {"secret": 9}, reset=1)
            await ask(connection, "step", {"text": "4"}, step=1)
        async with client.ws_connect("/ws?session_id=a") as connection:
            assert await ask(connection, "reset", {"secret": 9}, reset=1) == first
            assert (await ask(connection, "step", {"text": "5"}, step=2))["observation"] == {"played": [4, 5]}
        resets = [await post(client, "/reset", episode_id="e", secret=4, request_id="r") for _ in range(2)]
        assert resets[0] == resets[1]
        assert await _has(client, 'spangrad_sessions_resets_total{environment="game"} 2.0')


async def test_env_serve_http_keeps_the_episode_by_its_id() -> None:
    async with served(capacity=1) as (client, _):
        status, answer = await post(client, "/reset", secret=4)
        episode = answer["metadata"]["episode_id"]
        assert (status, answer["observation"]) == (200, {"text": "Your guess?"})
        for _ in range(2):
            status, answer = await post(client, "/step", episode_id=episode, action={"text": "7"}, step=1)
            assert (status, answer["observation"], answer["reward"]) == (200, {"played": [7]}, 0.25)
        async with client.get(f"/state?episode_id={episode}") as response:
            assert await response.json() == {"episode_id": episode, "step_count": 1}
        assert (await post(client, "/step", episode_id=episode, action={"text": "7"}, step=9))[0] == 422
        assert (await post(client, "/step", action={"text": "7"}))[0] == 422
        assert (await post(client, "/step", episode_id="another", action={"text": "7"}))[0] == 409
        status, answer = await post(client, "/reset", episode_id="another")
        assert (status, answer["code"]) == (503, "CAPACITY_REACHED")
        async with client.get("/health") as health, client.get("/schema") as schema, client.get("/metadata") as metadata:
            assert await health.json() == {"status": "healthy"}
            assert set(await schema.json()) == {"action", "observation", "state"}
            assert (await metadata.json())["system_prompt"] == "Guess the number."


async def test_env_serve_step_that_hangs_loses_its_session_and_no_other() -> None:
    settings = environment_service_settings(operation_seconds=5.0)
    async with served(settings=settings) as (client, _), client.ws_connect("/ws") as first, client.ws_connect("/ws") as second:
        for connection in (first, second):
            await ask(connection, "reset")
        await first.send_json({"type": "step", "data": {"text": "hang"}})
        assert (await ask(second, "step", {"text": "5"}))["observation"] == {"played": [5]}
        assert (await first.receive_json(timeout=40))["data"]["code"] == "EXECUTION_ERROR"
        assert (await first.receive(timeout=40)).type is aiohttp.WSMsgType.CLOSE
        assert (await ask(second, "step", {"text": "6"}))["observation"] == {"played": [5, 6]}


async def test_env_serve_idle_session_gets_an_error_and_ends() -> None:
    settings = environment_service_settings(idle_seconds=3.0)
    async with served(settings=settings) as (client, _), client.ws_connect("/ws") as connection:
        await ask(connection, "reset")
        error = await connection.receive_json(timeout=40)
        assert (error["data"]["code"], await opened(client)) == ("SESSION_ERROR", 0)


async def test_env_serve_spans_join_the_trace_of_the_client() -> None:
    with OtlpSink() as sink:
        async with (
            served(variables={"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url}) as (client, _),
            client.ws_connect("/ws", headers={"traceparent": TRACEPARENT, "baggage": "spangrad.rollout.id=r7"}) as connection,
        ):
            await ask(connection, "reset", {"secret": 2})
            await ask(connection, "step", {"text": "2"})
            await until(lambda: asyncio.sleep(0, len(sink.spans) >= 2))
        assert sorted(span.name for span in sink.spans) == ["execute_tool step", "reset"]
        assert {span.trace_id for span in sink.spans} == {TRACEPARENT[3:35]}


TWO = {"guess": "guess_game:Guess", "duel": "duel:Duel"}


@asynccontextmanager
async def served_together(capacity: int = 1) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
    """A server of two environments, and a client of it."""
    commands = {name: ShardCommand(reference, AGENTS, {}) for name, reference in TWO.items()}
    async with running(environment_service_settings(), commands, 1, capacity) as url, aiohttp.ClientSession(url) as client:
        yield client, url


async def test_env_serve_of_several_environments_keeps_them_apart() -> None:
    async with served_together() as (client, url):
        for name, roles in (("guess", None), ("duel", ["white", "black"])):
            async with client.get(f"/{name}/metadata") as metadata, client.get(f"/{name}/schema") as schema:
                about, fields = await metadata.json(), await schema.json()
            assert (about["name"].lower(), about.get("roles")) == (name, roles)
            assert ("actions" in fields["action"]["properties"]) == (roles is not None)
        async with client.ws_connect("/guess/ws?session_id=a") as guess, client.ws_connect("/duel/ws?session_id=a") as duel:
            assert (await ask(guess, "reset", {"secret": 4}))["observation"] == {"text": "Your guess?"}
            assert set((await ask(duel, "reset", {"city": "rome"}))["observation"]["players"]) == {"white", "black"}
            async with client.ws_connect("/guess/ws") as second:  # each is full for itself
                assert (await second.receive_json(timeout=40))["data"]["max_sessions"] == 1
            assert (await ask(guess, "step", {"text": "4"}))["done"] is True
            async with client.get("/health") as health, client.get("/duel/v1/load") as load:
                assert (await health.json(), await load.json()) == ({"status": "healthy"}, {"sessions": 1, "capacity": 1})
            assert await _has(client, 'spangrad_sessions_steps_total{environment="guess"} 1.0')
            assert await _has(client, 'spangrad_sessions_steps_total{environment="duel"} 0.0')
            await guess.send_json({"type": "close"})
        remote = await asyncio.to_thread(OpenEnvServer, [f"{url}/guess"])
        await asyncio.to_thread(remote.reset, {"secret": 7})
        assert (await asyncio.to_thread(remote.step, "7")).reward == 1.0
        await asyncio.to_thread(remote.close)


async def test_env_serve_unknown_name_is_refused_with_the_names() -> None:
    async with served_together() as (client, url):
        for path in ("", "/chess"):
            async with client.get(f"{path}/metadata") as refused:
                assert refused.status == 404
                assert "This server has guess, duel: add /NAME to its URL" in (await refused.json())["error"]
            for query in ("", "?session_id=a&role=white"):
                with pytest.raises(EnvironmentsError, match="This server has guess, duel"):
                    await asyncio.to_thread(OpenEnvServer, [f"{url}{path}{query}"])


async def test_env_serve_of_one_environment_has_it_at_the_root_and_by_name() -> None:
    async with served() as (client, _):
        for path in ("", "/game"):
            async with client.get(f"{path}/metadata") as metadata:
                assert (await metadata.json())["name"] == "Guess"


async def test_env_serve_environment_that_cannot_be_created_is_named() -> None:
    with pytest.raises(EnvironmentsError, match="nothing_like_it"):
        async with served("guess_game:nothing_like_it"):
            pass


async def test_env_serve_asks_for_its_token() -> None:
    settings = environment_service_settings(token=SecretStr("secret"))
    async with served(settings=settings) as (client, _):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect("/ws")
        assert refused.value.status == 401
        async with client.ws_connect("/ws", headers={"authorization": "Bearer secret"}) as connection:
            assert (await ask(connection, "reset"))["done"] is False


async def test_env_serve_players_of_a_game_have_a_connection_and_a_trace_each() -> None:
    with OtlpSink() as sink:
        async with (
            served("duel:Duel", variables={"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url}) as (client, _),
            client.ws_connect("/ws?session_id=duel&role=white", headers={"traceparent": TRACEPARENT}) as white,
            client.ws_connect("/ws?session_id=duel&role=black") as black,
        ):
            async with client.get("/metadata") as response:
                assert (await response.json())["roles"] == ["white", "black"]
            begun = asyncio.create_task(ask(black, "reset", {"task": {"city": "rome"}}))
            assert (await ask(white, "reset", {"task": {"city": "rome"}}))["observation"] == {"text": "say rome"}
            assert not begun.done()
            ended = asyncio.create_task(ask(white, "step", {"text": "oslo"}))
            assert (await begun)["observation"] == {"text": "say rome\nwhite spoke"}
            answer = await ask(black, "step", {"text": "oslo"})
            assert (answer["observation"], answer["reward"], answer["done"]) == ({"text": "black spoke"}, -1.0, True)
            answer = await ended
            assert (answer["observation"], answer["reward"], answer["done"]) == ({"text": "white spoke\nblack spoke"}, 1.0, True)
            assert answer["metadata"]["role"] == "white"
            async with client.ws_connect("/ws?session_id=duel&role=red") as red:
                assert "there is no role 'red'" in (await red.receive_json(timeout=40))["data"]["message"]
            for connection in (white, black):
                await connection.send_json({"type": "close"})
            await until(lambda: _is(opened(client), 0))
        await until(lambda: asyncio.sleep(0, len(sink.spans) >= 2))
    assert {span.trace_id for span in sink.spans} == {TRACEPARENT.split("-")[1]}
    assert {span.name: len(span.events) for span in sink.spans} == {"execute_tool step": 1, "reset": 0}


async def test_env_serve_players_request_that_is_made_again_has_one_span() -> None:
    headers = {"traceparent": TRACEPARENT}
    with OtlpSink() as sink:
        async with (
            served("duel:Duel", variables={"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url}) as (client, _),
            client.ws_connect("/ws?session_id=duel&role=white", headers=headers) as white,
            client.ws_connect("/ws?session_id=duel&role=white", headers=headers) as again,
            client.ws_connect("/ws?session_id=duel&role=black") as black,
        ):
            begun = asyncio.create_task(ask(black, "reset", {"task": {"city": "rome"}}))
            reset = await ask(white, "reset", {"task": {"city": "rome"}}, request_id="r")
            assert await ask(again, "reset", {"task": {"city": "rome"}}, request_id="r") == reset
            ended = asyncio.create_task(ask(white, "step", {"text": "oslo"}, step=1))
            await begun  # the step of white was played
            waiting = asyncio.create_task(ask(again, "step", {"text": "oslo"}, step=1))
            await ask(black, "step", {"text": "oslo"})
            assert await ended == await waiting == await ask(again, "step", {"text": "oslo"}, step=1)
            assert await ask(white, "reset", {"task": {"city": "rome"}}, request_id="r") == reset
            await until(lambda: asyncio.sleep(0, len(sink.spans) >= 2))
    assert sorted((span.name, len(span.events)) for span in sink.spans) == [("execute_tool step", 1), ("reset", 0)]


def test_env_serve_beyond_loopback_needs_a_token() -> None:
    done = run_spangrad("env", "serve", "guess_game:Guess", "--directory", str(AGENTS), "--set", "environments.host=0.0.0.0")
    assert done.returncode != 0
    assert "environments.token" in done.stderr


CLIENT = """
import sys
from openenv.core.generic_client import GenericEnvClient

with GenericEnvClient(base_url=sys.argv[1]) as env:
    result = env.reset(secret=5, episode_id="mine")
    assert (result.observation, result.reward, result.done) == ({"text": "Your guess?"}, None, False), result
    result = env.step({"text": "4"})
    assert (result.observation, result.reward, result.done) == ({"played": [4]}, 0.25, False), result
    assert env.state() == {"episode_id": "mine", "step_count": 1}
    try:
        env.step({"text": "raise"})
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "bad luck" in str(error) and "EXECUTION_ERROR" in str(error), error
    result = env.step({"text": "5"})
    assert (result.reward, result.done, result.metadata) == (1.0, True, {"guesses": 3}), result
    try:
        with GenericEnvClient(base_url=sys.argv[1]) as other:
            other.reset()
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "CAPACITY_REACHED" in str(error), error
with GenericEnvClient(base_url=sys.argv[1]) as env:
    env.reset()
    try:
        env.step({"text": "crash"})
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "SESSION_ERROR" in str(error), error
print("ok")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_env_serve_answers_openenvs_own_client(tmp_path: Path) -> None:
    python = peer_environment("openenv") / "python"
    (port,) = free_ports(1)
    words = ("env", "serve", "guess_game:Guess", "--directory", str(AGENTS), "--port", str(port), "--sessions", "1")
    child = Child("environments", own_command(*words), tmp_path / "env.log", inherit_settings=False)
    try:
        url = f"http://127.0.0.1:{port}"
        client_environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        wait_until(lambda: answers(f"{url}/health"), 60, "environments", [child])
        done = subprocess.run([python, "-c", CLIENT, url], capture_output=True, text=True, check=False, env=client_environment)
        assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
    finally:
        child.stop()


OWN_EPISODE = """
import json
import gymnasium

environment = gymnasium.make("CartPole-v1")
results = [[environment.reset(seed=7)[0].tolist(), None, False]]
while not results[-1][2]:
    observation, reward, terminated, truncated, _ = environment.step(len(results) % 3 % 2)
    results.append([observation.tolist(), reward, terminated or truncated])
print(json.dumps(results))
"""


@pytest.mark.slow
async def test_env_serve_gives_the_results_of_gymnasiums_own_environment() -> None:
    programs = await asyncio.to_thread(peer_environment, "openenv")
    done = await asyncio.to_thread(subprocess.run, [programs / "python", "-c", OWN_EPISODE], capture_output=True, text=True, check=True)
    expected, peers = json.loads(done.stdout), {"PYTHONPATH": str(peer_packages("openenv"))}
    async with served("gymnasium:CartPole-v1", variables=peers) as (client, _), client.ws_connect("/ws") as connection:
        results = [await ask(connection, "reset", {"task": {"seed": 7}})]
        results += [await ask(connection, "step", {"value": number % 3 % 2}) for number in range(1, len(expected))]
    assert [[*result["observation"].values(), result["reward"], result["done"]] for result in results] == expected
