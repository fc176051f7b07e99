"""The runner's client of the gateway, at the real gateway."""

from __future__ import annotations

import asyncio

import pytest

from gateway.proxy.admin import COUNT_WAIT_SECONDS
from runner.workers.gateway_client import GatewayClient
from spangrad.http.announcements import AnnouncedAttempt, CountedAttempt, StartedStage
from spangrad.types import Mode, RolloutKey, Stage
from tests.support.gateways import ASKED, staged

TOO_LONG = "This model's maximum context length is 64 tokens. However, your prompt contains 65 input tokens."
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def announced(key: RolloutKey) -> AnnouncedAttempt:
    return AnnouncedAttempt(rollout_id=key.rollout_id, attempt=key.attempt, run_id=key.run_id, mode=Mode.TRAIN, traceparent=TRACEPARENT)


def counted(calls: int, *, overflowed: bool = False) -> CountedAttempt:
    return CountedAttempt(calls, overflowed=overflowed, in_flight=0, closed="")


@pytest.mark.parametrize("name", ["r", "nightly/12", "what?", "n#1", "50%25", "a b", "é"])
async def test_gateway_client_rollout_of_any_name_has_own_endpoint_and_count(name: str) -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        key = RolloutKey("run", name, 0)
        try:
            await client.announce(announced(key))
            assert await client.calls(key) == counted(0)
            async with stage.client.post(f"{client.endpoint(key)}/chat/completions", json=ASKED) as answer:
                assert answer.status == 200
            assert await client.calls(key) == counted(1)
            (span,) = await stage.spans()
            assert span.attributes["spangrad.rollout.id"] == name
        finally:
            await client.close()


async def test_gateway_client_calls_reports_overflowed_last_call() -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        key = RolloutKey("run", "r", 0)

        async def call(status: int, refusal: str) -> CountedAttempt | None:
            stage.engine.status, stage.engine.refusal = status, refusal
            async with stage.client.post(f"{client.endpoint(key)}/chat/completions", json=ASKED) as answer:
                assert answer.status == status
            return await client.calls(key)

        try:
            await client.announce(announced(key))
            assert await call(400, "temperature must be non-negative") == counted(1)
            assert await call(400, TOO_LONG) == counted(2, overflowed=True)
            assert await call(200, "") == counted(3), "the agent made its prompt shorter"
            assert await call(500, TOO_LONG) == counted(4)
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
            assert await asyncio.wait_for(client.calls(idle), COUNT_WAIT_SECONDS - 1) == counted(0)
            assert not waiting.done()
            stage.engine.go_on.set()
            assert (await call)[0] == 200
            assert await waiting == counted(1)
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
            count = await client.calls(key)
            assert status == 410
            assert count is not None
            assert count.closed == "run_timeout"
        finally:
            await client.close()


async def test_gateway_client_unknown_attempt_has_no_count() -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        try:
            assert await client.calls(RolloutKey("run", "r", 0)) is None
        finally:
            await client.close()
