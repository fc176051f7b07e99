"""Environments on servers, as environments with reset and step: ours, others of OpenEnv's protocol, ORS and OpenTinker."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.peers.environment import peer_environment, peer_packages
from runner.sessions.server import running
from runner.sessions.shards import ShardCommand
from span_processors.reward import reward
from spangrad.callables import load
from spangrad.episode.adapters import server_choice
from spangrad.episode.adapters.openenv_server import OpenEnvServer, RemoteStepError
from spangrad.episode.adapters.ors_server import OrsServer
from spangrad.episode.adapters.references import factory_of
from spangrad.episode.environment import EnvironmentCalls, StepResult, ToolAction
from spangrad.episode.episode import Episode, EpisodeOutcome
from spangrad.episode.match import Match, MatchOutcome
from spangrad.episode.player import EpisodeLimits, ModelReply, ReplyRequest
from spangrad.errors import EnvironmentsError
from spangrad.processes import Child, answers, free_ports, wait_until
from spangrad.semconv import EPISODE_OBSERVATION, EPISODE_STEP, EPISODE_STEP_REWARD, EVALUATION_SCORE
from tests.support.otlp import HttpServer, OtlpSink
from tests.support.runners import environment_service_settings, until

AGENTS = Path(__file__).resolve().parent.parent / "agents"


@asynccontextmanager
async def served(environment: str = "guess_game:Guess", capacity: int = 8, **variables: str) -> AsyncGenerator[str]:
    async with running(environment_service_settings(), {"game": ShardCommand(environment, AGENTS, variables)}, 1, capacity) as url:
        yield url


@dataclass
class Script:
    """Model whose replies are written down."""

    texts: list[str]

    async def reply(self, request: ReplyRequest) -> ModelReply:
        return ModelReply({"role": "assistant", "content": self.texts.pop(0)}, "stop", "", 1)


async def played(reference: str, task: object, *texts: str) -> EpisodeOutcome:
    """An episode with a script's replies."""
    calls = await EnvironmentCalls.create(factory_of(reference, load))
    try:
        return await Episode(calls, Script(list(texts)), EpisodeLimits(turns=len(texts))).run(task)
    finally:
        await calls.aclose()


async def test_env_remote_transcript_equals_the_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(AGENTS))
    async with served() as url:
        remote = await played(f"openenv+{url}", {"secret": 2}, "7", "hello", "2")
    local = await played("guess_game:Guess", {"secret": 2}, "7", "hello", "2")
    assert remote.messages == local.messages
    assert [step.result for step in remote.steps] == [step.result for step in local.steps]
    assert (remote.end, remote.episode_return) == ("done", 1.5)


async def matched(reference: str) -> MatchOutcome:
    """An episode of two players, each with a script's replies."""
    calls = await EnvironmentCalls.create(factory_of(reference, load))
    try:
        models = {role: Script([role, role]) for role in calls.roles}
        return await Match(calls, models, EpisodeLimits(turns=2)).run({"city": "oslo"})
    finally:
        await calls.aclose()


async def test_env_remote_match_equals_the_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(AGENTS))
    async with served("duel:Duel") as url:
        remote = await matched(f"openenv+{url}")
    local = await matched("duel:Duel")
    assert (remote.messages, remote.steps) == (local.messages, local.steps)
    assert (remote.end, remote.returns) == ("done", {"white": 1.0, "black": -1.0})


async def test_env_remote_seats_of_a_game_equal_the_roles_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(AGENTS))
    async with served("duel:Duel") as url:
        seats = {role: f"openenv+{url}?session_id=duel&role={role}" for role in ("white", "black")}
        players = await asyncio.gather(*(played(seat, {"city": "oslo"}, role) for role, seat in seats.items()))
    alone = await matched("duel:Duel")
    assert dict(zip(seats, (player.messages for player in players), strict=True)) == alone.messages
    assert dict(zip(seats, (player.episode_return for player in players), strict=True)) == alone.returns


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("?session_id=duel&role=red", "there is no role 'red'. Name one of white, black"),
        ("?role=white", "names no seat in a game. Give one URL with the game and the role"),
        ("?session_id=duel&role=white,openenv+http://127.0.0.1:9", "names no seat in a game"),
    ],
)
async def test_env_remote_seat_in_an_invalid_url_raises(query: str, sentence: str) -> None:
    async with served("duel:Duel") as url:
        with pytest.raises(EnvironmentsError, match=re.escape(sentence)):
            await EnvironmentCalls.create(factory_of(f"openenv+{url}{query}", load))


async def test_env_remote_reset_and_step_after_a_cut_connection_are_played_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with served() as url:
        environment = await asyncio.to_thread(OpenEnvServer, [url])
        connection = environment._connection
        received = connection.receive

        def cut() -> str | None:
            received()
            raise ConnectionResetError("the answer is lost")

        connection.receive = cut
        await asyncio.to_thread(environment.reset, {"secret": 9, "log": str(log)})
        async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as metrics:
            assert 'spangrad_sessions_resets_total{environment="game"} 1.0' in await metrics.text()
        connection = environment._connection
        connection.send(json.dumps({"type": "step", "data": {"text": "sleep"}, "step": 1}))
        connection._connection.shutdown(socket.SHUT_RDWR)
        result = await asyncio.to_thread(environment.step, "sleep")
        assert result == StepResult({"played": ["sleep"]}, 0.25)
        assert (await asyncio.to_thread(environment.step, "1")).observation == {"played": ["sleep", 1]}
        await asyncio.to_thread(environment.close)
        assert log.read_text().splitlines()[:2] == ["9 sleep", "9 1"]


async def test_env_remote_step_after_a_refused_action_is_played() -> None:
    async with served() as url:
        environment = await asyncio.to_thread(OpenEnvServer, [url])
        await asyncio.to_thread(environment.reset, {"secret": 2})
        for guess, reward in (("7", 0.25), ("2", 1.0)):
            for action, sentence in (("unreadable", "VALIDATION_ERROR"), (b"", "not JSON serializable")):
                with pytest.raises((RemoteStepError, TypeError), match=sentence):
                    await asyncio.to_thread(environment.step, action)
            assert (await asyncio.to_thread(environment.step, guess)).reward == reward
        await asyncio.to_thread(environment.close)


async def test_env_remote_without_a_description_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> object:
        raise EnvironmentsError("no description")

    monkeypatch.setattr(OpenEnvServer, "_get", refused)
    async with served() as url:
        before = dict(server_choice._open)
        with pytest.raises(EnvironmentsError, match="no description"):
            await asyncio.to_thread(OpenEnvServer, [url])
        async with aiohttp.ClientSession() as client, client.get(f"{url}/v1/load") as load:
            assert (await load.json())["sessions"] == 0
        assert server_choice._open == {**before, url: 0}


async def test_env_remote_crash_and_exception_are_errors_of_two_kinds() -> None:
    async with served() as url:
        environment = await asyncio.to_thread(OpenEnvServer, [url])
        await asyncio.to_thread(environment.reset, None)
        with pytest.raises(RemoteStepError, match="bad luck"):
            await asyncio.to_thread(environment.step, "raise")
        with pytest.raises(EnvironmentsError, match="has ended"):
            await asyncio.to_thread(environment.step, "crash")
        environment.close()


async def test_env_remote_sessions_go_to_the_least_loaded_server_and_wait_for_room() -> None:
    async with served(capacity=1) as first, served(capacity=1) as second:
        opened = [await asyncio.to_thread(OpenEnvServer, [first, second]) for _ in range(2)]
        assert {environment._url for environment in opened} == {first, second}
        with pytest.raises(EnvironmentsError, match="sessions are in use"):
            await asyncio.to_thread(OpenEnvServer, [first, second], None, 0.3)
        waiting = asyncio.create_task(asyncio.to_thread(OpenEnvServer, [first, second]))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(opened[0].close)
        assert (await waiting)._url == opened[0]._url
        for environment in (waiting.result(), opened[1]):
            await asyncio.to_thread(environment.close)


async def test_env_remote_spans_are_children_of_the_steps_and_count_no_reward_twice() -> None:
    with OtlpSink() as sink:
        async with served(OTEL_EXPORTER_OTLP_ENDPOINT=sink.url) as url:
            tracer = trace.get_tracer("test")
            parent = trace.NonRecordingSpan(trace.SpanContext(7, 9, False, trace.TraceFlags(1)))
            with trace.use_span(parent), tracer.start_as_current_span("rollout"):
                await played(f"openenv+{url}", {"secret": 2}, "2")
            await until(lambda: asyncio.sleep(0, len(sink.spans) >= 2))
        assert {(int(span.trace_id, 16), int(span.parent_id, 16), span.events) for span in sink.spans} == {(7, 9, ())}
        assert {span.name: span.attributes.get(EPISODE_STEP_REWARD) for span in sink.spans} == {"reset": None, "step": 1.0}


async def test_env_remote_own_loop_of_an_agent_has_each_step_and_reward_once() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def agent(url: str) -> None:
        with provider.get_tracer("agent").start_as_current_span("agent"):
            environment = OpenEnvServer([url])
            environment.reset({"secret": 2})
            for guess in "72":
                with provider.get_tracer("agent").start_as_current_span("execute_tool guess"):
                    result = environment.step(guess)
                    environment._connection._connection.close()  # the next request is made again
                    reward(result.reward or 0.0)
            environment.close()

    with OtlpSink() as sink:
        async with served(OTEL_EXPORTER_OTLP_ENDPOINT=sink.url) as url:
            await asyncio.to_thread(agent, url)
            await until(lambda: asyncio.sleep(0, len(sink.spans) >= 3))
    spans = exporter.get_finished_spans()
    agents = {f"{span.context.span_id:016x}": span for span in spans if span.context}
    assert [span.name for span in spans] == ["execute_tool guess", "execute_tool guess", "agent"]
    served_spans = sorted(sink.spans, key=lambda span: int(span.attributes.get(EPISODE_STEP, 0)))
    assert [(span.name, agents[span.parent_id].name) for span in served_spans] == [
        ("reset", "agent"), ("step", "execute_tool guess"), ("step", "execute_tool guess"),
    ]  # fmt: skip
    assert len({span.parent_id for span in served_spans}) == 3
    assert all(EPISODE_OBSERVATION in span.attributes for span in served_spans)
    copies = [span.attributes[EPISODE_STEP_REWARD] for span in served_spans[1:]]
    assert copies == [dict(event.attributes or {})[EVALUATION_SCORE] for span in spans for event in span.events]
    assert [event for span in sink.spans for event in span.events] == []


@asynccontextmanager
async def other_openenv_server() -> AsyncGenerator[str]:
    """A server of OpenEnv's protocol that knows nothing of ours, and accepts no field of ours."""

    async def session(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        count = 0
        async for message in connection:
            request_of = json.loads(message.data)
            assert request_of.keys() <= {"type", "data"}, request_of
            match request_of["type"]:
                case "close":
                    break
                case "state":
                    answer: dict[str, Any] = {"type": "state", "data": {"step_count": count}}
                case "reset":
                    observation: dict[str, Any] = {"board": "...", "metadata": {}}
                    answer = {"type": "observation", "data": {"observation": observation, "reward": None, "done": False}}
                case _ if not isinstance(request_of["data"]["move"], int):
                    answer = {"type": "error", "data": {"message": "move is no integer", "code": "VALIDATION_ERROR"}}
                case _:
                    count += 1
                    observation = {"board": request_of["data"], "metadata": {}}
                    data = {"observation": observation, "reward": 0.5, "done": count == 2, "metadata": {"n": count}}
                    answer = {"type": "observation", "data": data}
            await connection.send_json(answer)
        return connection

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"move": {"type": "integer"}, "metadata": {}}}})

    async def metadata(request: web.Request) -> web.Response:
        return web.json_response({"name": "board", "description": "A board."})

    application = web.Application()
    application.add_routes([web.get("/ws", session), web.get("/schema", schema), web.get("/metadata", metadata)])
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_env_remote_plays_a_server_of_another_making() -> None:
    async with other_openenv_server() as url:
        outcome = await played(f"openenv+{url}", {"seed": 1}, "4", "left", '{"move": "left"}', '{"move": 5}')
    remedy = "Reply with move: an integer. Only that."
    shown = [message["content"] for message in outcome.messages if message["role"] != "assistant"]
    assert shown == [f"A board.\n\n{remedy}", '{"board": "..."}', '{"board": {"move": 4}}', remedy, remedy, '{"board": {"move": 5}}']
    assert [step.result.reward for step in outcome.steps] == [0.5, None, None, 0.5]
    assert (outcome.end, outcome.steps[3].result.info) == ("done", {"n": 2})


class OrsFake(HttpServer):
    """A server of the Open Reward Standard with one tool."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        values = json.loads(body) if body else None
        self.seen.append((path, values))
        if path == "/create_session":
            return 200, {"content-type": "text/event-stream"}, b"event: task_id\r\ndata: s1\r\n\r\nevent: end\r\ndata: \r\n\r\n"
        if path == "/sums/call":
            output = {"blocks": [{"type": "text", "text": "right"}], "metadata": None, "reward": 1.0, "finished": True}
            ok = json.dumps({"ok": True, "output": output})
            bad = json.dumps({"ok": False, "error": "no such tool"})
            text = ok if values["name"] == "submit" else bad
            events = (("task_id", "t"), ("chunk", text[:9]), ("end", text[9:]))
            return 200, {}, (": ping\r\n\r\n" + "".join(f"event: {name}\r\ndata: {data}\r\n\r\n" for name, data in events)).encode()
        tool = {"name": "submit", "description": "Submits.", "input_schema": {"type": "object"}}
        tables: dict[str, Any] = {
            "/list_environments": ["sums"],
            "/sums/tools": {"tools": [tool]},
            "/sums/prompt": [{"type": "text", "text": "1 + 1?"}],
        }
        if path == "/sums/task_tools":
            return 404, {}, b'{"detail": "Not Found"}'
        assert headers.get("X-Session-Id") == "s1" or path == "/list_environments", headers
        return 200, {}, json.dumps(tables.get(path, {"sid": "s1"})).encode()


@pytest.mark.parametrize("task", ["1 + 1", 3, ["1 + 1"]])
def test_env_remote_ors_task_that_is_no_object_raises(task: object) -> None:
    with OrsFake() as server:
        environment = OrsServer([server.url])
        with pytest.raises(EnvironmentsError, match=r"no object\. Give \{\"split\", \"index\"\} or a specification"):
            environment.reset(task)
        assert "/create" not in [path for path, _ in server.seen]


async def test_env_remote_ors_server_gives_prompt_tools_and_rewards() -> None:
    with OrsFake() as server:
        calls = await EnvironmentCalls.create(factory_of(f"ors+{server.url}", load))
        assert await calls.reset({"split": "train", "index": 3}) == "1 + 1?"
        assert [tool["function"]["name"] for tool in calls.tools] == ["submit"]
        assert await calls.step("two") == StepResult("Call a tool.")
        assert await calls.step(ToolAction("guess", {})) == StepResult("error: no such tool")
        assert await calls.step(ToolAction("submit", {"answer": "2"})) == StepResult("right", 1.0, True)
        await calls.aclose()
        bodies = dict(server.seen)
        assert bodies["/create"] == {"env_name": "sums", "split": "train", "index": 3}
        assert bodies["/sums/call"] | {"task_id": ""} == {"name": "submit", "input": {"answer": "2"}, "task_id": ""}
        assert server.seen[-2:] == [("/delete", {}), ("/delete_session", {})]


class OpenTinkerFake(HttpServer):
    """A server of OpenTinker's environments; it fails once between a step and its answer."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        values = json.loads(body)
        self.seen.append((path, values))
        if path == "/reset":
            return 200, {}, json.dumps({"observation": f"board {values['size']}", "system_prompt": "Play.", "game_state": {}}).encode()
        if path == "/step" and values["action"] == "break":
            return 503, {}, b"{}"
        return 200, {}, json.dumps({"observation": "next", "reward": -1, "done": True, "info": {"win": False}}).encode()


async def test_env_remote_opentinker_server_gets_each_step_once() -> None:
    with OpenTinkerFake() as server:
        outcome = await played(f"opentinker+{server.url}", {"size": 9}, "4,4")
        assert [message["content"] for message in outcome.messages] == ["Play.", "board 9", "4,4", "next"]
        assert outcome.steps[0].result == StepResult("next", -1.0, True, {"win": False})
        assert [path for path, _ in server.seen] == ["/reset", "/step", "/finalize"]
        assert len({values["instance_id"] for _, values in server.seen}) == 1
        with pytest.raises(EnvironmentsError):
            await played(f"opentinker+{server.url}", {"size": 9}, "break")
        assert sum(values.get("action") == "break" for _, values in server.seen) == 1


def write_example(directory: Path) -> Path:
    """Write the environment of `openenv init`; return OpenEnv's programs."""
    programs = peer_environment("openenv")
    subprocess.run([programs / "openenv", "init", "echo_env", "--output-dir", directory], check=True, capture_output=True)
    return programs


@contextmanager
def openenv_example(directory: Path) -> Iterator[str]:
    """OpenEnv's own server of that environment, unmodified."""
    programs = write_example(directory)
    (port,) = free_ports(1)
    command = [str(programs / "python"), "-m", "uvicorn", "echo_env.server.app:app", "--port", str(port), "--app-dir", str(directory)]
    child = Child("openenv", command, directory / "openenv.log", {"PYTHONPATH": str(directory)})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health"), 120, "openenv", [child])
        yield url
    finally:
        child.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_env_remote_plays_openenvs_example_on_its_own_server(tmp_path: Path) -> None:
    with openenv_example(tmp_path) as url:
        outcome = await played(f"openenv+{url}", None, "hello", "hi")
    contents = [message["content"] for message in outcome.messages]
    assert "Reply with message: Message to echo back. Only that." in contents[0]
    assert json.loads(contents[1]) == {"echoed_message": "Echo Env environment ready!", "message_length": 0}
    assert json.loads(contents[3]) == {"echoed_message": "hello", "message_length": 5}
    assert [step.result.reward for step in outcome.steps] == [0.5, 0.2]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_env_remote_plays_openenvs_example_behind_our_server(tmp_path: Path) -> None:
    await asyncio.to_thread(write_example, tmp_path)
    command = ShardCommand("echo_env.server.echo_env_environment:EchoEnvironment", tmp_path, {"PYTHONPATH": str(peer_packages("openenv"))})
    async with running(environment_service_settings(), {"echo": command}, 1, 4) as url:
        outcome = await played(f"openenv+{url}", {"seed": 1}, "hello", "hi")
    assert [step.result.reward for step in outcome.steps] == [0.5, 0.2]
    assert json.loads(outcome.messages[3]["content"]) == {"echoed_message": "hello", "message_length": 5}
