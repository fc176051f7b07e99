"""Agents for tests, as users write them: the openai client, urllib, and nothing of ours."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from functools import cache
from typing import Any

from openai import AsyncOpenAI, BadRequestError


@cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI()


async def ask(given: dict[str, Any]) -> float:
    """One call, at the temperature that the task names; the reward is 1 for an answer that begins with "clock"."""
    answer = await client().chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": f"say {given['city']}"}],
        max_tokens=3,
        temperature=given.get("temperature", 1.0),
    )
    return float((answer.choices[0].message.content or "").startswith("clock"))


async def ask_row(row: dict[str, Any]) -> float:
    """One call with the messages of a row of verl's data set; the reward is 1 for an answer that begins with the row's truth."""
    answer = await client().chat.completions.create(model="policy", messages=row["messages"])
    return float((answer.choices[0].message.content or "").startswith(row["reward_model"]["ground_truth"]))


async def stumble(given: dict[str, Any]) -> float:
    """One call that the engine answers, then one that it refuses."""
    reward = await ask(given)
    try:
        await client().chat.completions.create(model="policy", messages=[{"role": "user", "content": "say oslo"}], max_tokens=-1)
    except BadRequestError:
        return reward
    raise AssertionError("the engine took max_tokens = -1")


def raw_http() -> None:
    """A program without any instrumentation: the task on standard input, the reward as the last line of output."""
    given = json.load(sys.stdin)
    body = {"model": "policy", "messages": [{"role": "user", "content": f"say {given['city']}"}], "max_tokens": 3}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        print("model said", json.load(answer)["choices"][0]["message"]["content"])
    print(0.5)


if __name__ == "__main__":
    raw_http()
