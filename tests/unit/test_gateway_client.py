"""The runner's client of the gateway, at the real gateway."""

from __future__ import annotations

import pytest
from unit_gateway import ASKED, staged

from runner.gateway_client import GatewayClient
from spangrad.types import Mode, RolloutKey

TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.mark.parametrize("name", ["r", "nightly/12", "what?", "n#1", "50%25", "a b", "é"])
async def test_a_rollout_of_any_name_has_its_own_endpoint_and_count(name: str) -> None:
    async with staged() as stage:
        client = GatewayClient(str(stage.client._base_url), None)
        key = RolloutKey("run", name, 0)
        try:
            await client.announce(key, Mode.TRAIN, TRACEPARENT)
            assert await client.calls(key) == 0
            async with stage.client.post(f"{client.endpoint(key)}/chat/completions", json=ASKED) as answer:
                assert answer.status == 200
            assert await client.calls(key) == 1
            (span,) = await stage.spans()
            assert span.attributes["spangrad.rollout.id"] == name
        finally:
            await client.close()
