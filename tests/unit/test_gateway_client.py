"""The runner's client of the gateway, at the real gateway."""

from __future__ import annotations

import asyncio

import pytest

from runner.workers.gateway_client import CallCount, GatewayClient
from spangrad.http.announcements import AnnouncedAttempt, StartedStage
from spangrad.types import Mode, RolloutKey, Stage
from tests.support.gateways import ASKED, staged

TOO_LONG = "This model's maximum context length is 64 tokens. However, your prompt contains 65 input tokens."
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def announced(key: RolloutKey) -> AnnouncedAttempt:
    return AnnouncedAttempt(rollout_id=key.rollout_id, attempt=key.attempt, run_id=key.run_id, mode=Mode.TRAIN, traceparent=TRACEPARENT)


@pytest.mark.parametrize("name", ["r", "nightly/12", "what?", "n#1", "50%25", "a b", "é"])
async def test_gateway_client_rollout_of_any_name_has_own_endpoint_and_count(name: str) -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        key = RolloutKey("run", name, 0)
        try:
            await client.announce(announced(key))
            assert await client.calls(key) == CallCount(0, overflowed=False, closed="")
            async with stage.client.post(f"{client.endpoint(key)}/chat/completions", json=ASKED) as answer:
                assert answer.status == 200
            assert await client.calls(key) == CallCount(1, overflowed=False, closed="")
            (span,) = await stage.spans()
            assert span.attributes["spangrad.rollout.id"] == name
        finally:
            await client.close()


async def test_gateway_client_calls_reports_overflowed_last_call() -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        key = RolloutKey("run", "r", 0)

        async def call(status: int, refusal: str) -> CallCount | None:
            stage.engine.status, stage.engine.refusal = status, refusal
            async with stage.client.post(f"{client.endpoint(key)}/chat/completions", json=ASKED) as answer:
                assert answer.status == status
            return await client.calls(key)

        try:
            await client.announce(announced(key))
            assert await call(400, "temperature must be non-negative") == CallCount(1, overflowed=False, closed="")
            assert await call(400, TOO_LONG) == CallCount(2, overflowed=True, closed="")
            assert await call(200, "") == CallCount(3, overflowed=False, closed=""), "the agent made its prompt shorter"
            assert await call(500, TOO_LONG) == CallCount(4, overflowed=False, closed="")
        finally:
            await client.close()


async def test_gateway_client_calls_in_flight_delays_no_other_attempt() -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        busy, idle = RolloutKey("run", "busy", 0), RolloutKey("run", "idle", 0)
        try:
            await asyncio.gather(*(client.announce(announced(key)) for key in (busy, idle)))
            stage.engine.go_on.clear()
            call = asyncio.create_task(stage.chat("/rollout/busy/attempt/0"))
            await stage.engine.arrived.wait()
            waiting = asyncio.create_task(client.calls(busy))
            assert await asyncio.wait_for(client.calls(idle), 2) == CallCount(0, overflowed=False, closed="")
            assert not waiting.done()
            stage.engine.go_on.set()
            assert (await call)[0] == 200
            assert await waiting == CallCount(1, overflowed=False, closed="")
        finally:
            await client.close()


async def test_gateway_client_stage_limits_calls_and_is_the_reason_with_their_count() -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        key = RolloutKey("run", "r", 0)
        try:
            await client.announce(announced(key))
            await client.start_stage(StartedStage(rollout_id="r", attempt=0, stage=Stage.RUN, seconds=0.1))
            stage.engine.go_on.clear()
            status, _ = await asyncio.wait_for(stage.chat("/rollout/r/attempt/0"), 30)
            counted = await client.calls(key)
            assert status == 410
            assert counted is not None
            assert counted.closed == "run_timeout"
        finally:
            await client.close()


async def test_gateway_client_unknown_attempt_has_no_count() -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        try:
            assert await client.calls(RolloutKey("run", "r", 0)) is None
        finally:
            await client.close()
