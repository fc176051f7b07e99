"""The agent of the loop's benchmark: one call, and a reward that tells apart the rollouts of half of the groups."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from openai import AsyncOpenAI


@cache
def _client() -> AsyncOpenAI:
    return AsyncOpenAI()


async def answer(given: dict[str, Any]) -> float:
    """Ask the policy once; the reward is random in tasks that are informative, and 1 in the others, whose groups are filtered."""
    await _client().chat.completions.create(model="policy", messages=[{"role": "user", "content": given["question"]}])
    return random.random() if given["informative"] else 1.0
