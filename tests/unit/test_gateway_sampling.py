"""Sampling parameters that the gateway records of a call, in every form in which a client writes them."""

from __future__ import annotations

from typing import Any

import pytest

from spangrad import semconv
from tests.support.fake_engine import SAMPLING, FakeEngine
from tests.support.gateways import staged

NEUTRAL = {
    semconv.GEN_AI_REQUEST_TEMPERATURE: 1.0,
    semconv.GEN_AI_REQUEST_TOP_P: 1.0,
    semconv.GEN_AI_REQUEST_TOP_K: 0,
    semconv.SAMPLING_MIN_P: 0.0,
    semconv.GEN_AI_REQUEST_PRESENCE_PENALTY: 0.0,
    semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY: 0.0,
    semconv.SAMPLING_REPETITION_PENALTY: 1.0,
    semconv.SAMPLING_CONSTRAINED: False,
}
UNREAD: dict[str, Any] = {semconv.SAMPLING_CONSTRAINED: True}


async def test_sampling_reported_by_engine_overrides_request() -> None:
    """An engine with --generation-config auto takes from the model's directory the sampling parameters that the client leaves out."""
    reported = {**SAMPLING, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    async with staged(FakeEngine(sampling=reported)) as stage:
        await stage.chat(temperature=None)
        await stage.chat(tool_choice="required")
        first, second = await stage.spans(2)
    in_effect = {semconv.GEN_AI_REQUEST_TEMPERATURE: 0.6, semconv.GEN_AI_REQUEST_TOP_P: 0.95, semconv.GEN_AI_REQUEST_TOP_K: 20}
    assert {key: first.attributes.get(key) for key in NEUTRAL} == {**NEUTRAL, **in_effect}
    assert second.attributes[semconv.SAMPLING_CONSTRAINED] is True


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({}, {}),
        ({"top_p": "0.01"}, {semconv.GEN_AI_REQUEST_TOP_P: 0.01}),
        ({"top_k": "1"}, {semconv.GEN_AI_REQUEST_TOP_K: 1}),
        ({"top_k": 5.0, "min_p": True}, {semconv.GEN_AI_REQUEST_TOP_K: 5, semconv.SAMPLING_MIN_P: 1.0}),
        ({"temperature": " 0.001 "}, {semconv.GEN_AI_REQUEST_TEMPERATURE: 0.01}),
        ({"top_k": 1.5}, {semconv.GEN_AI_REQUEST_TOP_K: None, **UNREAD}),
        ({"min_p": [0.5]}, {semconv.SAMPLING_MIN_P: None, **UNREAD}),
        ({"temperature": 10**400}, {semconv.GEN_AI_REQUEST_TEMPERATURE: None, **UNREAD}),
        ({"thinking_token_budget": 2}, {semconv.SAMPLING_CONSTRAINED: True}),
    ],
    ids=str,
)
async def test_sampling_is_recorded_as_vllm_reads_request(asked: dict[str, Any], recorded: dict[str, Any]) -> None:
    async with staged() as stage:
        status, _ = await stage.chat(**{"temperature": 1.0, **asked})
        (span,) = await stage.spans()
    assert status == 200
    assert {key: span.attributes.get(key) for key in NEUTRAL} == {**NEUTRAL, **recorded}
