"""An agent on bare httpx, without a framework and without instrumentation of its own, that knows nothing of being trained.

In: {"text": "tom has 12 coins . tom finds 7 . how many coins ?"}, and the address of an OpenAI-compatible endpoint. Out: what the model
said last. A reply `calc 12 + 7` is calculated and told to the model, three times at most; any other reply is the answer.

The endpoint is of this one task: whatever is asked there belongs to it, which is all that training needs to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx

from examples.calculator.arithmetic import CALLS, calculate

SECONDS = 120


@cache
def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=SECONDS, limits=httpx.Limits(max_connections=None))


async def _ask(endpoint: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "policy", "messages": messages, "max_tokens": 6, "temperature": 1.0}
    answer = await _client().post(f"{endpoint}/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"] or ""


def called(reply: str) -> str | None:
    """Return the calculator's answer to a reply: a number or "error"; None where the reply does not call it."""
    match reply.split():
        case ["calc", a, ("+" | "-" | "*" | "/") as operator, b] if a.isdigit() and b.isdigit():
            try:
                return str(calculate(int(a), operator, int(b)))
            except ValueError:
                return "error"
        case _:
            return None


async def agent(given: Mapping[str, Any], endpoint: str) -> str:
    """Answer one question."""
    messages = [{"role": "user", "content": given["text"]}]
    for turn in range(CALLS):
        reply = await _ask(endpoint, messages)
        result = called(reply)
        if result is None:
            return reply
        messages.append({"role": "assistant", "content": reply})
        # The model's calls are plain text, so the id that the wire format wants refers to nothing.
        messages.append({"role": "tool", "content": result, "tool_call_id": f"call-{turn}"})
    return await _ask(endpoint, messages)
