"""Calls of a greedy rollout are greedy, whatever the agent asks for: it is not told that it is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine, Recorded
from tests.support.gateways import ASKED, staged

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"
BAGGAGE = "spangrad.rollout.id=r1,spangrad.rollout.attempt=0,spangrad.rollout.mode=greedy"


@pytest.mark.parametrize("asked", [{"temperature": 0.7}, {"temperature": None}, {}])
@pytest.mark.parametrize("by", ["baggage", "endpoint"])
async def test_greedy_rollout_call_reaches_engine_at_temperature_0(by: str, asked: dict[str, object]) -> None:
    body = {name: value for name, value in {**ASKED, **asked, "top_p": 0.5}.items() if name in asked or name != "temperature"}
    async with staged() as stage:
        path, headers = "", {"baggage": BAGGAGE}
        if by == "endpoint":
            path, headers = "/rollout/r1/attempt/0", {}
            await stage.announce(path, mode="greedy")
        async with stage.client.post(f"{path}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        (asked_engine,) = stage.engine.requests
        assert {**body, "temperature": 0}.items() <= asked_engine.items()
        (span,) = await stage.spans()
    recorded = {name: span.attributes[name] for name in ("spangrad.rollout.mode", "gen_ai.request.temperature")}
    assert recorded == {"spangrad.rollout.mode": "greedy", "gen_ai.request.temperature": 0.0}
    assert json.loads(str(span.attributes["spangrad.request.json"])) == {**body, "temperature": 0}, "as it was answered"


@pytest.mark.parametrize("name", ["chat-stream", "completions-stream", "messages-stream", "responses-stream"])
async def test_greedy_rollout_call_in_each_dialect_reaches_engine_at_temperature_0(name: str) -> None:
    given = json.loads((GOLDEN / f"{name}.json").read_text())
    engine = FakeEngine()
    engine.answers[given["path"]] = Recorded(given["plugged"]["body"].encode(), given["plugged"]["type"])
    request = {**given["request"], "temperature": 0.9}
    async with staged(engine) as stage, stage.client.post(given["path"], json=request, headers={"baggage": BAGGAGE}) as answer:
        await answer.read()
        (span,) = await stage.spans()
    asked = engine.requests or [json.loads(body) for body in engine.bodies]
    assert [request["temperature"] for request in asked] == [0]
    assert span.attributes["gen_ai.request.temperature"] == 0.0


@pytest.mark.parametrize("mode", ["train", "validate"])
async def test_calls_of_other_modes_keep_their_temperature(mode: str) -> None:
    async with staged() as stage:
        await stage.chat(headers={"baggage": BAGGAGE.replace("greedy", mode)})
        assert [request["temperature"] for request in stage.engine.requests] == [0.5]


async def test_greedy_rollout_call_to_frozen_upstream_is_unchanged() -> None:
    """A judge elsewhere is part of the task, not of the policy; some providers refuse temperature 0."""
    engine = FakeEngine(policy="judge")
    backend = {"url": f"http://127.0.0.1:{engine.port}", "policy": "judge", "kind": "openai"}
    async with staged(engine, engine_url="", backends=[backend]) as stage:
        await stage.chat(headers={"baggage": BAGGAGE}, model="judge")
        assert [request["temperature"] for request in engine.requests] == [0.5]
