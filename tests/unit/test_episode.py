"""The state machine of an episode: contexts, limits, tool calls and rewards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad import semconv
from spangrad.episode import endpoint_model
from spangrad.episode.environment import EnvironmentCalls, StepResult, ToolAction, checked_turn, is_environment_class, rendered
from spangrad.episode.episode import Episode, EpisodeOutcome, EpisodeState
from spangrad.episode.player import EpisodeEnd, EpisodeLimits, ModelReply, ReplyRequest
from spangrad.errors import EngineError, EnvironmentsError

UNLIMITED = EpisodeLimits()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Countdown:
    """Ends when the action is `stop`, or after as many steps as its task says; rewards each step by its number."""

    system_prompt = "count"

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools
        self.threads = {threading.get_ident()}
        self.closed = False

    def reset(self, task: int) -> object:
        self.threads.add(threading.get_ident())
        self.left, self.number = task, 0
        return {"left": task}

    async def step(self, action: object) -> StepResult:
        self.left, self.number = self.left - 1, self.number + 1
        return StepResult(f"after {action}", float(self.number), self.left <= 0 or action == "stop")

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed = True


@dataclass
class Script:
    """Model whose replies are written down."""

    replies: Iterator[ModelReply]
    contexts: list[tuple[Mapping[str, Any], ...]] = field(default_factory=list[tuple[Mapping[str, Any], ...]])
    most: list[int | None] = field(default_factory=list[int | None])

    async def reply(self, request: ReplyRequest) -> ModelReply:
        self.contexts.append(tuple(request.messages))
        self.most.append(request.max_tokens)
        reply = next(self.replies)
        if reply.finish_reason == "too long":
            raise EngineError("400: This model's maximum context length is 64 tokens.")
        return reply


def texts(*words: str, tokens: int = 2) -> Iterator[ModelReply]:
    return (ModelReply({"role": "assistant", "content": word}, "stop", f"r{n}", tokens) for n, word in enumerate(words))


async def play(environment: object, script: Script, limits: EpisodeLimits = UNLIMITED, task: object = 3) -> EpisodeOutcome:
    return await Episode(EnvironmentCalls(environment), script, limits).run(task)  # pyright: ignore[reportArgumentType]


async def test_episode_appends_each_reply_and_observation_until_done() -> None:
    script = Script(texts("a", "b", "c", "d"))
    outcome = await play(Countdown(), script)
    expected = [("system", "count"), ("user", '{"left": 3}')]
    expected += [turn for word in "abc" for turn in (("assistant", word), ("user", f"after {word}"))]
    assert [(message["role"], message["content"]) for message in outcome.messages] == expected
    assert outcome.end is EpisodeEnd.DONE
    assert outcome.episode_return == 6.0
    assert [len(context) for context in script.contexts] == [2, 4, 6]


async def test_episode_state_is_generating_for_model_interacting_for_environment() -> None:
    seen: list[EpisodeState] = []

    class Watched(Countdown):
        def reset(self, task: int) -> object:
            seen.append(episode.state)
            return super().reset(task)

        async def step(self, action: object) -> StepResult:
            seen.append(episode.state)
            return await super().step(action)

    class Watching(Script):
        async def reply(self, request: ReplyRequest) -> ModelReply:
            seen.append(episode.state)
            return await super().reply(request)

    episode = Episode(EnvironmentCalls(Watched()), Watching(texts("a", "b")), UNLIMITED)
    await episode.run(2)
    turn = [EpisodeState.GENERATING, EpisodeState.INTERACTING]
    assert [*seen, episode.state] == [EpisodeState.PENDING, *turn, *turn, EpisodeState.TERMINATED]


@pytest.mark.parametrize(
    ("limits", "replies", "end", "most"),
    [
        (EpisodeLimits(turns=2), 2, EpisodeEnd.TURNS, [None, None]),
        (EpisodeLimits(tokens=4), 2, EpisodeEnd.TOKENS, [4, 2]),
        (EpisodeLimits(tokens=3, turn_tokens=2), 2, EpisodeEnd.TOKENS, [2, 1]),
        (EpisodeLimits(seconds=1e-9), 0, EpisodeEnd.TIME, []),
        (EpisodeLimits(turn_tokens=7), 3, EpisodeEnd.DONE, [7, 7, 7]),
    ],
)
async def test_episode_ends_at_a_limit(limits: EpisodeLimits, replies: int, end: EpisodeEnd, most: list[int | None]) -> None:
    script = Script(texts("a", "b", "c"))
    outcome = await play(Countdown(), script, limits)
    assert (len(outcome.replies), outcome.end, script.most) == (replies, end, most)


async def test_episode_whose_context_outgrows_the_model_keeps_earlier_turns() -> None:
    outcome = await play(Countdown(), Script(iter([*texts("a"), ModelReply({}, "too long")])))
    assert (outcome.end, outcome.episode_return, len(outcome.replies)) == (EpisodeEnd.CONTEXT, 1.0, 1)


@given(words=st.lists(st.text(max_size=3), min_size=1, max_size=8), steps=st.integers(1, 8), turns=st.integers(1, 8))
@settings(max_examples=50)
async def test_context_of_each_reply_begins_with_the_whole_one_before(words: list[str], steps: int, turns: int) -> None:
    script = Script(texts(*words, *"z" * 8))
    outcome = await play(Countdown(), script, EpisodeLimits(turns=turns), task=steps)
    for before, reply, context in zip(script.contexts, outcome.replies, [*script.contexts[1:], outcome.messages], strict=True):
        assert context[: len(before) + 1] == (*before, reply.message)
    assert len(outcome.replies) == len(outcome.steps) <= min(steps, turns)


async def test_tool_calls_are_steps_with_a_response_each() -> None:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": arguments}}
        for n, arguments in enumerate(['{"x": 1}', "[" * 100_000, '{"x": 2}', '{"x": 3}'])
    ]
    reply = ModelReply({"role": "assistant", "content": "", "tool_calls": calls}, "tool_calls", "r0", 9)
    outcome = await play(Countdown(TOOLS), Script(iter([reply])), task=2)
    assert [step.action for step in outcome.steps] == [ToolAction("add", {"x": 1}), ToolAction("add", {"x": 2})]
    assert [(message.get("tool_call_id"), message["content"]) for message in outcome.messages[3:]] == [
        ("c0", "after ToolAction(name='add', arguments={'x': 1})"),
        ("c1", "The arguments of add are no JSON object."),
        ("c2", "after ToolAction(name='add', arguments={'x': 2})"),
        ("c3", "The episode has ended."),
    ]


async def test_each_step_is_a_tool_span_whose_reward_names_the_reply(episode_spans: InMemorySpanExporter) -> None:
    await play(Countdown(), Script(texts("a", "b")), EpisodeLimits(turns=2))
    by_name = {span.name: span for span in episode_spans.get_finished_spans()}
    assert list(by_name) == ["reset", "execute_tool step", "episode"]
    assert dict(by_name["episode"].attributes or {}) == {semconv.EPISODE_END: "turns", semconv.EPISODE_TURNS: 2}
    step = by_name["execute_tool step"]
    assert dict(step.attributes or {}) == {
        semconv.GEN_AI_OPERATION: "execute_tool",
        semconv.GEN_AI_TOOL_NAME: "step",
        semconv.GEN_AI_TOOL_ARGUMENTS: "b",
        semconv.GEN_AI_TOOL_RESULT: "after b",
        semconv.EPISODE_TURN: 1,
        semconv.EPISODE_DONE: False,
    }
    (event,) = step.events
    assert dict(event.attributes or {}) == {
        semconv.EVALUATION_NAME: "reward",
        semconv.EVALUATION_SCORE: 2.0,
        semconv.GEN_AI_RESPONSE_ID: "r1",
    }


async def test_step_whose_observation_is_no_utf8_keeps_its_span_and_reward(episode_spans: InMemorySpanExporter) -> None:
    class Lister(Countdown):
        async def step(self, action: object) -> StepResult:
            return StepResult(["caf\udce9"] if action == "list" else "caf\udce9", 1.0, action == "stop")

    await play(Lister(), Script(texts("list", "stop")))
    spans = episode_spans.get_finished_spans()
    results = [dict(span.attributes or {}).get(semconv.GEN_AI_TOOL_RESULT) for span in spans if span.name == "execute_tool step"]
    assert results == ['["caf?"]', "caf?"]
    assert encode_spans(spans).SerializeToString()


async def test_plain_methods_run_in_the_thread_that_created_the_object() -> None:
    assert is_environment_class(Countdown)
    assert not is_environment_class(Countdown())
    created: list[Countdown] = []

    def create() -> Countdown:
        created.append(Countdown())
        return created[0]

    calls = await EnvironmentCalls.create(create)
    await calls.reset(1)
    await calls.aclose()
    assert created[0].closed
    assert len(created[0].threads) == 1
    assert threading.get_ident() not in created[0].threads


async def test_wrong_environments_are_refused_with_a_remedy() -> None:
    class Odd(Countdown):
        async def step(self, action: object) -> Any:
            if action == "done":
                return StepResult("", done="false")  # pyright: ignore[reportArgumentType]
            rewards = {"nan": float("nan"), "large": 10**400, "text": "1.0"}
            return StepResult("", rewards[action]) if action in rewards else ("observation", 1.0)  # pyright: ignore[reportArgumentType]

    with pytest.raises(EnvironmentsError, match=r"^object is no environment: it lacks reset and step\. Write reset\(task\) and step"):
        EnvironmentCalls(object())  # pyright: ignore[reportArgumentType]
    odd = EnvironmentCalls(Odd())
    with pytest.raises(EnvironmentsError, match=r"^Odd\.step returned tuple, not a StepResult\. Return StepResult"):
        await odd.step("x")
    with pytest.raises(EnvironmentsError, match=r"^Odd\.step returned the reward nan\. Return a finite number, or None\.$"):
        await odd.step("nan")
    with pytest.raises(EnvironmentsError, match=r"^Odd\.step returned the reward 10{199}\. Return a finite number, or None\.$"):
        await odd.step("large")
    with pytest.raises(EnvironmentsError, match=r"^Odd\.step returned the reward '1\.0'\. Return a finite number, or None\.$"):
        await odd.step("text")
    with pytest.raises(EnvironmentsError, match=r"^Odd\.step returned done='false'\. Return True or False\.$"):
        await odd.step("done")


@pytest.mark.parametrize("name", ["roles", "tools"])
@pytest.mark.parametrize("value", ["first", 2, {}])
def test_environment_whose_roles_or_tools_are_no_list_is_refused(name: str, value: object) -> None:
    environment = Countdown()
    setattr(environment, name, value)
    with pytest.raises(EnvironmentsError, match=rf"^Countdown\.{name} is {value!r}, not a list\. Write {name} = \[\.\.\.\]\.$"):
        _ = getattr(EnvironmentCalls(environment), name)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("collection", [tuple, np.array])
def test_environment_roles_and_acting_may_be_any_collection(collection: Callable[[list[str]], Any]) -> None:
    environment = Countdown()
    setattr(environment, "roles", collection(["first", "second"]))  # noqa: B010 - environments have it as an optional member
    roles = EnvironmentCalls(environment).roles  # pyright: ignore[reportArgumentType]
    assert (*roles,) == ("first", "second")
    assert (*checked_turn("Countdown", collection(["second", "first"]), roles),) == ("second", "first")


def test_rendered_observation_is_text_parts_or_json() -> None:
    parts = [{"type": "text", "text": "x"}]
    assert rendered("as it is") == "as it is"
    assert rendered(parts) == parts
    assert rendered({"b": [1], "a": "é"}) == '{"a": "é", "b": [1]}'
    assert rendered([1, 2]) == "[1, 2]"
    with pytest.raises(EnvironmentsError, match=r"^an observation is no JSON \(Object of type bytes .*\)\. Return .* or write render\("):
        rendered({"image": b"x"})


@pytest.mark.parametrize("calls", [[], None])
async def test_endpoint_reply_without_tool_calls_is_appended_without_them(calls: object, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {"message": {"role": "assistant", "content": "so", "tool_calls": calls}, "finish_reason": "stop"}
    monkeypatch.setattr(endpoint_model, "ask", lambda *_, **__: {"id": "r", "choices": [choice]})
    reply = await endpoint_model.EndpointModel("http://127.0.0.1:1/v1", "key").reply(ReplyRequest([{"role": "user", "content": "why"}]))
    assert reply.message == {"role": "assistant", "content": "so"}
