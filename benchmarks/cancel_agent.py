"""The agent of the cancellation benchmark: one call after the other, until it is stopped."""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI


@cache
def _client() -> AsyncOpenAI:
    return AsyncOpenAI(max_retries=0, timeout=600)


async def call_forever(given: dict[str, Any]) -> float:
    """Call the policy for as long as it answers."""
    while True:
        await _client().chat.completions.create(model="policy", messages=[{"role": "user", "content": given["rollout"]}])
