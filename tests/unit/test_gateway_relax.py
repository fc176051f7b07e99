"""Requests of train rollouts reach the engine without what would keep their calls from being trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import DIALECTS
from gateway.proxy.relax import relax
from spangrad.sampling import is_constrained
from spangrad.settings.gateway import GatewaySettings, Relaxation
from tests.support.fake_engine import FakeEngine, Recorded, event
from tests.support.gateways import ASKED, staged

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"
TRAIN = {"baggage": "spangrad.rollout.id=r1,spangrad.rollout.attempt=0,spangrad.rollout.mode=train"}
ALL: tuple[Relaxation, ...] = ("strict_tools", "schemas", "top_p", "penalties", "tool_choice")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = {"name": "search", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
RELAXED_CHAT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": False}}
FLAT_TOOL = {"type": "function", **FUNCTION}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}


def relaxed(path: str, names: tuple[Relaxation, ...] = ALL, **fields: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the request for the engine and the names of what was relaxed."""
    request, applied = relax(DIALECTS[path].parse(json.dumps(fields).encode()), names)
    return json.loads(request.raw), applied


@pytest.mark.parametrize(
    ("path", "asked", "for_engine", "names"),
    [
        (CHAT, {"tools": [CHAT_TOOL]}, {"tools": [RELAXED_CHAT_TOOL]}, ("strict_tools",)),
        (RESPONSES, {"tools": [{**FLAT_TOOL, "strict": True}]}, {"tools": [{**FLAT_TOOL, "strict": False}]}, ("strict_tools",)),
        (MESSAGES, {"tools": [{"name": "search", "strict": True}]}, {"tools": [{"name": "search", "strict": False}]}, ("strict_tools",)),
        (CHAT, {"response_format": SCHEMA}, {"response_format": {"type": "text"}}, ("schemas",)),
        (CHAT, {"response_format": {"type": "json_object"}}, {"response_format": {"type": "text"}}, ("schemas",)),
        ("/v1/completions", {"response_format": SCHEMA}, {"response_format": {"type": "text"}}, ("schemas",)),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "a"}, "verbosity": "low"}},
            {"text": {"format": {"type": "text"}, "verbosity": "low"}},
            ("schemas",),
        ),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema"}, "effort": "low"}},
            {"output_config": {"effort": "low"}},
            ("schemas",),
        ),
        (CHAT, {"top_p": 0.9, "top_k": 20, "min_p": 0.1}, {"top_p": 1.0, "top_k": 0, "min_p": 0.0}, ("top_p",)),
        (MESSAGES, {"top_p": "0.5", "top_k": "3"}, {"top_p": 1.0, "top_k": 0}, ("top_p",)),
        (
            CHAT,
            {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
            {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
            ("penalties",),
        ),
        (CHAT, {"tool_choice": "required"}, {"tool_choice": "auto"}, ("tool_choice",)),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "search"}}}, {"tool_choice": "auto"}, ("tool_choice",)),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "search"}}, {"tool_choice": "auto"}, ("tool_choice",)),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "search"}}, {"tool_choice": {"type": "auto"}}, ("tool_choice",)),
        (
            MESSAGES,
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("tool_choice",),
        ),
        (
            CHAT,
            {"top_p": 0.9, "tools": [CHAT_TOOL], "tool_choice": "required"},
            {"top_p": 1.0, "tools": [RELAXED_CHAT_TOOL], "tool_choice": "auto"},
            ("strict_tools", "top_p", "tool_choice"),
        ),
    ],
)
def test_relax_in_each_dialect_removes_reshaping_fields_and_names_them(
    path: str, asked: dict[str, Any], for_engine: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert is_constrained(asked) or "top_p" in names or "penalties" in names
    assert relaxed(path, model="policy", messages=[], **asked) == ({"model": "policy", "messages": [], **for_engine}, names)
    assert not is_constrained(for_engine)
    assert relaxed(path, tuple(name for name in ALL if name not in names), **asked) == (asked, ()), "others leave it alone"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [RELAXED_CHAT_TOOL], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": None, "repetition_penalty": 1.0},
        {"top_p": 7, "top_k": 1.5, "min_p": "much", "presence_penalty": 3, "repetition_penalty": -1},  # vLLM refuses these in its own words
        {"tools": "search", "tool_choice": "whatever", "response_format": "json_object", "text": 3, "output_config": [1]},
        {"tools": [3, {"function": "search"}], "tool_choice": {"type": "allowed_tools"}, "response_format": {"type": ["json_schema"]}},
        {"structured_outputs": {"choice": ["a"]}, "logit_bias": {"3": 1}, "guided_regex": "a+", "min_tokens": 3},  # asked for by name
    ],
    ids=str,
)
def test_relax_of_neutral_invalid_or_explicit_constraints_returns_same_object(fields: dict[str, Any]) -> None:
    request = DIALECTS[CHAT].parse(json.dumps(fields).encode())
    again, applied = relax(request, ALL)
    assert again is request
    assert applied == ()


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)
_NAMED = st.sampled_from(
    ["tools", "tool_choice", "top_p", "top_k", "min_p", "response_format", "text", "output_config", "presence_penalty"]
)
_OBJECTS = st.dictionaries(st.sampled_from(["type", "strict", "function", "format", "name"]), _JSON, max_size=3)


@given(st.dictionaries(_NAMED, _JSON | _OBJECTS | st.lists(_OBJECTS, max_size=2)))
def test_relax_of_any_request_is_idempotent_and_never_fails(fields: dict[str, Any]) -> None:
    request = DIALECTS[CHAT].parse(msgspec.json.encode(fields))
    once, applied = relax(request, ALL)
    assert relax(once, ALL) == (once, ())
    assert (once.client_raw is None) == (applied == ())
    assert once.client_raw in (None, request.raw)


@pytest.mark.parametrize("stream", [False, True])
async def test_train_call_with_strict_tools_is_relaxed_by_default(stream: bool) -> None:
    async with staged() as stage:
        status, body = await stage.chat(headers=TRAIN, tools=[CHAT_TOOL], stream=stream)
        (span,) = await stage.spans()
        (asked,) = stage.engine.requests
    assert (status, asked["tools"]) == (200, [RELAXED_CHAT_TOOL])
    assert span.attributes["spangrad.request.relaxed"] == ["strict_tools"]
    assert span.attributes["spangrad.sampling.constrained"] is False
    assert json.loads(str(span.attributes["spangrad.request.json"]))["tools"] == [CHAT_TOOL], "as the client asked"
    if stream:
        chunks = stage.engine.chunks({**ASKED, "tools": [RELAXED_CHAT_TOOL]})
        assert body == b"".join(map(event, chunks)) + b"data: [DONE]\n\n", "event by event the engine's"


@pytest.mark.parametrize("mode", ["validate", "probe", "greedy", "trial", "production", ""])
async def test_calls_of_other_modes_are_not_relaxed(mode: str) -> None:
    baggage = TRAIN["baggage"].replace("mode=train", f"mode={mode}") if mode else "spangrad.rollout.id=r1"
    async with staged(relax=list(ALL)) as stage:
        await stage.chat(headers={"baggage": baggage}, tools=[CHAT_TOOL], top_p=0.5)
        (span,) = await stage.spans()
        (asked,) = stage.engine.requests
    assert (asked["tools"], asked["top_p"]) == ([CHAT_TOOL], 0.5)
    assert "spangrad.request.relaxed" not in span.attributes
    assert span.attributes["spangrad.sampling.constrained"] is True


@pytest.mark.parametrize("name", ["chat-stream", "completions-stream", "messages-stream", "responses-stream"])
async def test_relaxed_call_in_each_dialect_records_parameters_in_effect(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    engine = FakeEngine()
    engine.answers[golden["path"]] = Recorded(golden["plugged"]["body"].encode(), golden["plugged"]["type"])
    request = {**golden["request"], "top_p": 0.5}
    async with staged(engine, relax=["top_p"]) as stage, stage.client.post(golden["path"], json=request, headers=TRAIN) as answer:
        await answer.read()
        (span,) = await stage.spans()
    asked = engine.requests or [json.loads(body) for body in engine.bodies]
    assert [sent["top_p"] for sent in asked] == [1.0]
    assert span.attributes["gen_ai.request.top_p"] == 1.0
    assert span.attributes["spangrad.request.relaxed"] == ["top_p"]
    assert json.loads(str(span.attributes["spangrad.request.json"])) == request


async def test_train_call_to_frozen_upstream_is_not_relaxed() -> None:
    engine = FakeEngine(policy="judge")
    backend = {"url": f"http://127.0.0.1:{engine.port}", "policy": "judge", "kind": "openai"}
    async with staged(engine, engine_url="", backends=[backend], relax=list(ALL)) as stage:
        await stage.chat(headers=TRAIN, model="judge", tools=[CHAT_TOOL], top_p=0.5)
        assert [(asked["tools"], asked["top_p"]) for asked in engine.requests] == [([CHAT_TOOL], 0.5)]


async def test_relax_setting_empty_relaxes_nothing() -> None:
    assert GatewaySettings().relax == ("strict_tools",)
    async with staged(relax=[]) as stage:
        await stage.chat(headers=TRAIN, tools=[CHAT_TOOL])
        assert [asked["tools"] for asked in stage.engine.requests] == [[CHAT_TOOL]]
