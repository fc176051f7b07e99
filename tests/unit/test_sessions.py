"""Sessions of served environments: requests, retries, errors and spans of one, and the leases of a table of them."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runner.sessions import step_spans
from runner.sessions.frames import Frame, FrameEvents, FrameKind, FrameReader
from runner.sessions.games import Games
from runner.sessions.instance import SessionInstance
from runner.sessions.messages import SessionError, SessionOpening, SessionRequest
from runner.sessions.metrics import SessionCounts, SessionMetrics
from runner.sessions.sessions import EnvironmentSession, SessionTable
from runner.sessions.shard import call_here, description_of
from runner.sessions.step_spans import PlayedSpans
from span_processors.export import RolloutSpanProcessor
from spangrad import semconv
from spangrad.episode.environment import StepResult, ToolAction, rendered
from spangrad.episode.openenv_fields import action_fields, action_of, is_text, observation_fields, observation_of
from spangrad.errors import EnvironmentsError
from spangrad.settings import EnvironmentServiceSettings
from tests.support.virtual_time import run_in_virtual_time

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Adder:
    """Adds actions to a sum; negative ones raise, after they have changed the sum."""

    def __init__(self) -> None:
        self.plays = 0

    def reset(self, task: Any) -> dict[str, Any]:
        self.sum, self.task = 0, task
        return {"task": task}

    def step(self, action: int) -> StepResult:
        self.plays += 1
        self.sum += action
        if action < 0:
            raise ValueError(f"{action} is negative")
        return StepResult({"sum": self.sum}, float(action), self.sum >= 100, {"plays": self.plays})


def instance(environment: object, **opening: Any) -> SessionInstance:
    return SessionInstance(environment, SessionOpening(**opening), PlayedSpans({}), call_here, 1)  # pyright: ignore[reportArgumentType]


def ask(session: SessionInstance, kind: str, data: object = None, **fields: object) -> dict[str, Any]:
    """A request and its response."""
    return json.loads(asyncio.run(session.answer(json.dumps({"type": kind, "data": data, **fields}).encode())).payload)


def code(response: dict[str, Any]) -> str:
    assert response["type"] == "error", response
    return response["data"]["code"]


@given(st.lists(st.tuples(st.integers(-2, 9), st.integers(1, 3)), max_size=12))
def test_session_retried_steps_are_played_once_and_answered_alike(steps: list[tuple[int, int]]) -> None:
    environment = Adder()
    session = instance(environment)
    ask(session, "reset")
    for number, (value, times) in enumerate(steps, 1):
        answers = [ask(session, "step", {"value": value}, step=number) for _ in range(times)]
        assert all(answer == answers[0] for answer in answers)
        assert (answers[0]["type"] == "error") == (value < 0)
        assert environment.plays == number
    assert environment.sum == sum(value for value, _ in steps)
    assert ask(session, "state")["data"]["step_count"] == len(steps)


def test_session_step_of_another_number_is_refused_and_not_played() -> None:
    environment = Adder()
    session = instance(environment)
    ask(session, "reset", {"episode_id": "e"})
    ask(session, "step", {"value": 1}, step=1)
    ask(session, "step", {"value": 1}, step=2)
    assert [code(ask(session, "step", {"value": 1}, step=number)) for number in (1, 4)] == ["VALIDATION_ERROR"] * 2
    assert environment.plays == 2


def test_session_request_id_names_a_step() -> None:
    environment = Adder()
    session = instance(environment)
    ask(session, "reset")
    first = ask(session, "step", {"value": 1}, request_id="a")
    assert ask(session, "step", {"value": 1}, request_id="a") == first
    assert ask(session, "step", {"value": 1}, request_id="b") != first
    assert environment.plays == 2


class Resets(Adder):
    """An environment that counts its resets; those of the task 0 raise."""

    resets = 0

    def reset(self, task: Any) -> dict[str, Any]:
        self.resets += 1
        if task == 0:
            raise ValueError("bad luck")
        return {**super().reset(task), "reset": self.resets}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 3)), max_size=8), st.sampled_from(["reset", "request_id"]))
def test_session_retried_resets_reset_once_and_are_answered_alike(episodes: list[tuple[int, int, int]], key: str) -> None:
    environment = Resets()
    session = instance(environment)
    for number, (task, steps, times) in enumerate(episodes, 1):
        name = {key: number if key == "reset" else f"r{number}"}
        first = ask(session, "reset", {"task": task}, **name)
        assert (first["type"] == "error") == (task == 0)
        for _ in range(steps):
            ask(session, "step", {"value": 1})
        state = ask(session, "state")
        assert all(ask(session, "reset", {"task": task}, **name) == first for _ in range(times))
        assert (environment.resets, ask(session, "state")) == (number, state)


def test_session_reset_of_an_earlier_number_is_refused_and_resets_nothing() -> None:
    environment = Resets()
    session = instance(environment)
    assert [ask(session, "reset", reset=number)["type"] for number in (1, 7)] == ["observation"] * 2
    assert code(ask(session, "reset", reset=6)) == "VALIDATION_ERROR"
    assert environment.resets == 2
    assert ask(session, "reset")["type"] == "observation"
    assert (code(ask(session, "reset", reset=7)), environment.resets) == ("VALIDATION_ERROR", 3)


def test_session_reset_begins_anew_and_names_the_episode() -> None:
    session = instance(Adder())
    assert ask(session, "reset", {"episode_id": "e", "seed": 3})["data"] == {
        "observation": {"task": {"seed": 3}},
        "reward": None,
        "done": False,
        "metadata": {"episode_id": "e"},
    }
    ask(session, "step", {"value": 7})
    assert ask(session, "state")["data"] == {"episode_id": "e", "step_count": 1}
    assert ask(session, "reset", {"task": [1]})["data"]["observation"] == {"task": [1]}
    assert ask(session, "step", {"value": 100})["data"] == {
        "observation": {"sum": 100},
        "reward": 100.0,
        "done": True,
        "metadata": {"plays": 2},
    }


def test_session_errors_have_the_protocols_codes() -> None:
    session = instance(Adder())
    assert code(json.loads(asyncio.run(session.answer(b"{")).payload)) == "INVALID_JSON"
    assert code(json.loads(asyncio.run(session.answer(b"\xff")).payload)) == "INVALID_JSON"
    assert code(json.loads(asyncio.run(session.answer(b'{"data": {"a": ' + b"[" * 100_000)).payload)) == "INVALID_JSON"
    assert code(json.loads(asyncio.run(session.answer(b'{"data": {}}')).payload)) == "VALIDATION_ERROR"
    assert code(ask(session, "dance")) == "UNKNOWN_TYPE"
    assert code(ask(session, "step", {"value": 1})) == "SESSION_ERROR"
    ask(session, "reset")
    assert code(ask(session, "step")) == "VALIDATION_ERROR"
    assert ask(session, "step", {"value": -1})["data"] == {"message": "ValueError: -1 is negative", "code": "EXECUTION_ERROR"}


def test_session_reset_that_raises_leaves_no_episode() -> None:
    class Broken(Adder):
        def reset(self, task: Any) -> dict[str, Any]:
            if task is not None:
                raise SystemExit(2)
            return super().reset(task)

    session = instance(Broken())
    ask(session, "reset")
    assert code(ask(session, "reset", {"seed": 1})) == "EXECUTION_ERROR"
    assert code(ask(session, "step", {"value": 1})) == "SESSION_ERROR"


def test_session_text_is_parsed_and_observations_are_rendered_by_the_environment() -> None:
    class Rendering(Adder):
        def parse(self, text: str) -> int:
            return int(text)

        def render(self, observation: object) -> str:
            return f"it is {observation}"

    session = instance(Rendering())
    assert ask(session, "reset")["data"]["metadata"]["content"] == "it is {'task': None}"
    answer = ask(session, "step", {"text": "4"})["data"]
    assert (answer["observation"], answer["metadata"]["content"]) == ({"sum": 4}, "it is {'sum': 4}")
    assert code(ask(session, "step", {"text": "four"})) == "VALIDATION_ERROR"


def test_session_info_named_as_the_content_is_not_shown_to_the_model() -> None:
    class Talkative(Adder):
        def step(self, action: int) -> StepResult:
            return StepResult("seen", info={"content": "hidden", "at": 2})

    class Rendering(Talkative):
        def render(self, observation: object) -> str:
            return f"it is {observation}"

    for environment, metadata in ((Talkative(), {"at": 2}), (Rendering(), {"at": 2, "content": "it is seen"})):
        session = instance(environment)
        ask(session, "reset")
        assert ask(session, "step", {"value": 1})["data"]["metadata"] == metadata


def test_session_state_that_is_not_json_is_an_error_and_ends_no_episode() -> None:
    class Stateful(Adder):
        state = {"board": object()}  # noqa: RUF012  # an environment of a user's

    session = instance(Stateful())
    ask(session, "reset")
    assert ask(session, "state")["data"] == {"message": "TypeError: object is not JSON", "code": "EXECUTION_ERROR"}
    assert ask(session, "step", {"value": 1})["data"]["observation"] == {"sum": 1}


def test_session_exception_with_half_a_surrogate_pair_is_an_error_response(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Adder):
        def step(self, action: int) -> StepResult:
            raise FileNotFoundError("no file \udc80")

    session = instance(Odd())
    ask(session, "reset")
    assert ask(session, "step", {"value": 1})["data"] == {"message": "FileNotFoundError: no file ?", "code": "EXECUTION_ERROR"}
    assert b"in step\n" in caplog.text.encode()


JSON = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(JSON | st.sampled_from([{"text": "a"}, {"value": 1}, {"text": 1}]))
def test_observation_fields_render_alike_on_both_sides(observation: object) -> None:
    assert rendered(observation_of(json.loads(json.dumps(observation_fields(observation))))) == rendered(observation)


def test_action_fields_lead_to_the_same_action() -> None:
    for action in ({"a": 1}, {"value": 1}, 3, None, [1], ToolAction("add", {"x": 1})):
        if action != {"value": 1}:
            assert action_of(Adder(), action_fields(action)) == action
    assert is_text(action_fields("hello"))


async def test_description_of_tools_has_their_schema() -> None:
    adder: Any = Adder()
    assert (await description_of(adder)).schema["action"]["required"] == ["text"]
    adder.tools = [{"type": "function"}]
    assert (await description_of(adder)).schema["action"]["required"] == ["type", "tool_name", "arguments"]


@pytest.mark.parametrize(
    ("members", "place"),
    [
        ({"tools": ["search"]}, r"tools\[0\]"),
        ({"system_prompt": 1}, r"system_prompt"),
        ({"roles": [1, 2]}, r"roles\[0\]"),
        ({"schemas": {"action": "text"}}, r"schema\[...\]"),
        ({"schemas": {"actions": {}}}, r"actions"),
    ],
)
async def test_description_of_members_of_another_type_is_refused(members: dict[str, Any], place: str) -> None:
    adder: Any = Adder()
    vars(adder).update(members)
    with pytest.raises(EnvironmentsError, match=place):
        await description_of(adder)


@pytest.mark.parametrize("name", ["roles", "tools"])
async def test_description_of_roles_or_tools_that_are_a_text_is_refused(name: str) -> None:
    adder: Any = Adder()
    setattr(adder, name, "add")
    with pytest.raises(EnvironmentsError, match=rf"^Adder\.{name} is 'add', not a list"):
        await description_of(adder)


@pytest.mark.parametrize("client_rewards", [False, True])
def test_step_spans_carry_the_reward_of_a_step_in_one_place(client_rewards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(RolloutSpanProcessor({}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(step_spans, "tracer_provider", lambda *_: provider)
    opening = SessionOpening(carrier={"traceparent": TRACEPARENT, "baggage": "spangrad.rollout.id=r1"}, client_rewards=client_rewards)
    spans = PlayedSpans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    session = SessionInstance(Adder(), opening, spans, call_here, 1)
    ask(session, "reset", {"episode_id": "e"})
    ask(session, "step", {"value": 2}, traceparent=TRACEPARENT.replace("b7ad6b7169203331", "00000000000000aa"))
    ask(session, "step", {"value": 2}, step=1)
    ask(session, "step", {"value": -2})
    reset, step, failed = exporter.get_finished_spans()
    assert [span.name for span in (reset, step)] == ["reset", "step" if client_rewards else "execute_tool step"]
    assert all(f"{span.context.trace_id:032x}" == TRACEPARENT[3:35] for span in (reset, step, failed) if span.context)
    assert [f"{span.parent.span_id:016x}" for span in (reset, step) if span.parent] == ["b7ad6b7169203331", "00000000000000aa"]
    attributes = dict(step.attributes or {})
    assert (attributes[semconv.ROLLOUT_ID], attributes[semconv.EPISODE_ID], attributes[semconv.EPISODE_STEP]) == ("r1", "e", 1)
    assert attributes.get(semconv.EPISODE_STEP_REWARD) == (2.0 if client_rewards else None)
    assert [dict(event.attributes or {})[semconv.EVALUATION_SCORE] for event in step.events] == ([] if client_rewards else [2.0])
    assert failed.status.description == "ValueError: -2 is negative"


def test_step_spans_without_a_trace_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_spans, "tracer_provider", lambda *_: pytest.fail("a provider was created"))
    spans = PlayedSpans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    session = SessionInstance(Adder(), SessionOpening(), spans, call_here, 1)
    assert ask(session, "reset")["type"] == "observation"


def test_step_spans_that_begin_in_several_threads_have_one_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    providers: list[TracerProvider] = []

    def slow_provider(*_: object) -> TracerProvider:
        time.sleep(0.1)
        providers.append(TracerProvider())
        return providers[-1]

    monkeypatch.setattr(step_spans, "tracer_provider", slow_provider)
    spans = PlayedSpans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(spans.begin, SessionRequest(type="reset", traceparent=TRACEPARENT), SessionOpening(), {})
    assert len(providers) == 1


@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(1, 40))
def test_frame_reader_yields_frames_however_they_arrive(payloads: list[bytes], portion: int) -> None:
    frames = [Frame(FrameKind.MESSAGE, n, payload, FrameEvents.STEP | FrameEvents.DONE, 0.5, -1.0) for n, payload in enumerate(payloads)]
    data, reader = b"".join(frame.encode() for frame in frames), FrameReader()
    assert [frame for at in range(0, len(data), portion) for frame in reader.feed(data[at : at + portion])] == frames


class FakeShard:
    """A process whose environments answer when they are asked to."""

    def __init__(self) -> None:
        self.counts = SessionCounts()
        self.users: dict[int, Any] = {}
        self.sent: list[Frame] = []
        self.is_slow = False
        """True if it creates no environment."""

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)
        if frame.kind is FrameKind.OPEN and not self.is_slow:
            asyncio.get_running_loop().call_soon(self.users[frame.session].receive, Frame(FrameKind.OPEN, frame.session))

    def least_loaded(self) -> FakeShard:
        return self

    def answer(self, number: int, events: FrameEvents = FrameEvents.STEP, reward: float = 0.0) -> None:
        self.users[number].receive(Frame(FrameKind.MESSAGE, number, b"{}", events, 0.1, reward))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table(shard: FakeShard, capacity: int = 2) -> tuple[SessionTable, Clock]:
    clock = Clock()
    settings = EnvironmentServiceSettings(lease_seconds=10, idle_seconds=100, operation_seconds=5)
    return SessionTable(shard, capacity, settings, clock), clock  # pyright: ignore[reportArgumentType]


def ended_by(sessions: SessionTable, how: str) -> float | None:
    """Return the number of sessions that ended so."""
    return sessions.counts.registry.get_sample_value("spangrad_sessions_ended_total", {"end": how})


def ignored(error: SessionError) -> None:
    """Nothing is to be done about it."""


async def test_session_table_refuses_beyond_its_capacity_until_a_session_ends() -> None:
    sessions, _ = table(FakeShard())
    first, _ = await sessions.open(None, SessionOpening()), await sessions.open("b", SessionOpening())
    with pytest.raises(SessionError) as refused:
        await sessions.open(None, SessionOpening())
    assert json.loads(refused.value.encode())["data"] == {
        "message": "all 2 sessions are in use. Try again in a moment",
        "code": "CAPACITY_REACHED",
        "active_sessions": 2,
        "max_sessions": 2,
    }
    first.attach(ignored)
    first.detach(ignored)
    assert len(sessions) == 1
    assert await sessions.open("b", SessionOpening()) is sessions.find("b")
    await sessions.open(None, SessionOpening())


async def test_session_table_ends_idle_sessions_but_none_at_work() -> None:
    shard = FakeShard()
    sessions, clock = table(shard)
    idle, busy = await sessions.open("idle", SessionOpening()), await sessions.open("busy", SessionOpening())
    ended: list[SessionError] = []
    idle.attach(ended.append)
    asking = asyncio.create_task(busy.ask(b""))
    await asyncio.sleep(0)
    clock.now = 101
    sessions.sweep()
    assert (len(sessions), ended[0].code, ended_by(sessions, "expired")) == (1, "SESSION_ERROR", 1)
    shard.answer(busy.number)
    assert (await asking).payload == b"{}"
    with pytest.raises(SessionError, match="not used in time"):
        await idle.ask(b"")


async def waiting_request(shard: FakeShard) -> tuple[SessionTable, EnvironmentSession, asyncio.Task[Frame]]:
    """Open a session and begin a request of it, which waits for the shard's answer."""
    sessions, _ = table(shard)
    session = await sessions.open("a", SessionOpening())
    asking = asyncio.create_task(session.ask(b""))
    await asyncio.sleep(0)
    return sessions, session, asking


@pytest.mark.parametrize("answers", [False, True])
def test_session_request_of_a_client_that_left_keeps_its_time_limit(answers: bool) -> None:
    async def scenario() -> None:
        shard = FakeShard()
        sessions, session, asking = await waiting_request(shard)
        asking.cancel()
        await asyncio.wait([asking])
        if answers:
            shard.answer(session.number)
        await asyncio.sleep(sessions.operation_seconds + 1)
        assert (len(sessions), ended_by(sessions, "lost")) == ((1, 0) if answers else (0, 1))

    run_in_virtual_time(scenario())


async def test_session_table_keeps_a_named_session_over_a_reconnect() -> None:
    sessions, clock = table(FakeShard())
    session = await sessions.open("a", SessionOpening())
    session.attach(ignored)
    session.detach(ignored)
    clock.now = 9
    sessions.sweep()
    assert await sessions.open("a", SessionOpening()) is session
    session.attach(ignored)
    clock.now = 60
    sessions.sweep()
    session.detach(ignored)
    clock.now = 71
    sessions.sweep()
    assert len(sessions) == 0


async def test_session_table_client_that_left_while_it_opens_is_away() -> None:
    shard = FakeShard()
    shard.is_slow = True
    sessions, clock = table(shard)
    opening = [asyncio.create_task(sessions.open("a", SessionOpening())) for _ in range(2)]
    for opens, now in zip(opening, (0, 50), strict=True):
        clock.now = now
        await asyncio.sleep(0)
        sessions.sweep()
        assert len(sessions) == 1, "the second one waits"
        opens.cancel()
        await asyncio.wait([opens])
    clock.now = 61
    sessions.sweep()
    assert (len(sessions), ended_by(sessions, "expired")) == (0, 1)


async def test_games_role_that_is_none_opens_no_session() -> None:
    sessions, _ = table(FakeShard())
    games = Games(sessions, EnvironmentServiceSettings(), PlayedSpans({}))
    for roles, sentence in (((), r"'c'\. The environment has none: leave it out"), (("a", "b"), r"'c'\. Name one of a, b")):
        with pytest.raises(SessionError, match=sentence):
            await games.join("game", roles, "c")
    assert len(sessions) == 0


async def test_games_player_that_leaves_a_displaced_game_ends_no_session() -> None:
    sessions, _ = table(FakeShard())
    game = await Games(sessions, EnvironmentServiceSettings(), PlayedSpans({})).join("game", ("a",), "a")
    session = await sessions.open("game", SessionOpening())
    session.attach(ignored)
    game.detach("a", returns=False)
    await asyncio.sleep(0.01)
    assert (len(sessions), game.is_empty) == (1, True)


async def test_session_table_second_connection_displaces_the_first() -> None:
    sessions, _ = table(FakeShard())
    session = await sessions.open("a", SessionOpening())
    displaced: list[SessionError] = []
    session.attach(displaced.append)
    session.attach(ignored)
    assert "another connection" in str(displaced[0])
    session.detach(displaced.append)
    assert len(sessions) == 1


async def test_session_table_lost_process_answers_requests_with_an_error() -> None:
    sessions, session, asking = await waiting_request(FakeShard())
    session.lose("the process has ended")
    with pytest.raises(SessionError, match="the process has ended"):
        await asking
    assert (ended_by(sessions, "lost"), len(sessions)) == (1, 0)


async def test_session_counts_have_lengths_and_returns_of_done_episodes() -> None:
    shard = FakeShard()
    sessions, _ = table(shard)
    session = await sessions.open("a", SessionOpening())
    step = FrameEvents.STEP | FrameEvents.REWARD
    for events, reward in ((FrameEvents.RESET, 0.0), (step, 0.5), (step | FrameEvents.DONE, 1.0), (FrameEvents.RESET, 0.0)):
        asking = asyncio.create_task(session.ask(b""))
        await asyncio.sleep(0)
        shard.answer(session.number, events, reward)
        await asking
    sessions.end(session, "closed")
    metrics = SessionMetrics({"Adder": sessions.counts}).collect()
    samples = {(sample.name, *sample.labels.values()): sample.value for metric in metrics for sample in metric.samples}
    assert samples["spangrad_sessions_episode_steps_sum", "Adder"] == 2
    assert samples["spangrad_sessions_episode_returns", "Adder"] == 1.5
    assert samples["spangrad_sessions_episode_return_bucket", "Adder", "1.0"] == 0
    assert [samples["spangrad_sessions_episodes_total", "Adder", end] for end in ("done", "abandoned")] == [1, 1]
    assert [samples[f"spangrad_sessions_{name}", "Adder"] for name in ("resets_total", "steps_total", "open", "capacity")] == [2, 2, 0, 2]


def test_session_opening_ignores_fields_of_later_versions() -> None:
    assert msgspec.json.decode(b'{"carrier": {}, "later": 1}', type=SessionOpening) == SessionOpening()
