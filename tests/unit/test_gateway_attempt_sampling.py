"""Sampling parameters of an attempt: the gateway sets them in calls to engines, whatever the agent asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import DIALECTS
from spangrad.http.announcements import OWN_SAMPLING, SamplingParameters
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import staged

ATTEMPT = "/rollout/r/attempt/0"


async def test_sampling_of_an_attempt_is_forced_and_recorded() -> None:
    async with staged() as stage:
        await stage.announce(ATTEMPT, mode="validate", sampling={"temperature": 0.25, "top_p": 0.5, "max_tokens": 2})
        await stage.chat(ATTEMPT, temperature=0.9, max_completion_tokens=7)
        await stage.chat("/rollout/r/attempt/1", temperature=0.9)
        (span, _) = await stage.spans(2)
    first, second = stage.engine.requests
    assert (first["temperature"], first["top_p"], first["max_completion_tokens"]) == (0.25, 0.5, 2)
    assert (second["temperature"], "top_p" in second) == (0.9, False), "other attempts sample as their agents ask"
    assert (span.attributes["gen_ai.request.temperature"], span.attributes["gen_ai.request.top_p"]) == (0.25, 0.5)


async def test_sampling_of_a_greedy_attempt_stays_greedy() -> None:
    async with staged() as stage:
        await stage.announce(ATTEMPT, mode="greedy", sampling={"temperature": 0.7})
        await stage.chat(ATTEMPT)
    assert stage.engine.requests[0]["temperature"] == 0


async def test_sampling_leaves_calls_to_other_models_alone() -> None:
    engine = FakeEngine(policy="judge")
    backend = {"url": f"http://127.0.0.1:{engine.port}", "policy": "judge", "kind": "openai"}
    async with staged(engine, engine_url="", backends=[backend]) as stage:
        await stage.announce(ATTEMPT, sampling={"temperature": 0.25})
        await stage.chat(ATTEMPT, model="judge")
    assert engine.requests[0]["temperature"] == 0.5


@pytest.mark.parametrize(
    ("dialect", "asked", "sampled"),
    [
        ("/v1/chat/completions", {"top_k": 3, "n": 4, "max_tokens": 9}, {"top_k": 8, "n": 4, "max_tokens": 5}),
        ("/v1/completions", {"max_tokens": 2}, {"max_tokens": 2, "top_k": 8}),
        ("/v1/messages", {"max_tokens": 6}, {"max_tokens": 5, "top_k": 8}),
        ("/v1/responses", {}, {"max_output_tokens": 5, "top_k": 8}),
    ],
)
def test_sampled_request_in_each_dialect_has_the_parameters(dialect: str, asked: dict[str, Any], sampled: dict[str, Any]) -> None:
    request = DIALECTS[dialect].parse(json.dumps(asked).encode())
    forced = request.sampled(SamplingParameters(top_k=8, max_tokens=5))
    assert (forced.fields, json.loads(forced.raw)) == (sampled, sampled)
    assert request.sampled(OWN_SAMPLING) is request
