"""An agent that thinks, queries and answers between tags, and knows nothing of being trained.

In: {"question": ...}. Out: the conversation's replies, joined; the last holds `<answer>...</answer>` if it keeps to the form. A query is
answered by the retrieval service at RETRIEVAL_URL; four queries are allowed. Address and key of the model come from OPENAI_BASE_URL and
OPENAI_API_KEY.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx
from openai import AsyncOpenAI

SYSTEM = (
    "Answer the question . First think : <think> ... </think> Then either search : <query> ... </query> or answer in a few words :"
    " <answer> ... </answer> What is found stands between <information> and </information> ."
)
QUERIES = 4
PARAGRAPHS = 3
"""Number of paragraphs that a query gets."""
LONGEST = 384
"""Tokens of a reply."""
_QUERY = re.compile(r"<query>(.*?)</query>", re.S)


@cache
def _clients() -> tuple[AsyncOpenAI, httpx.AsyncClient]:
    return AsyncOpenAI(), httpx.AsyncClient(base_url=os.environ["RETRIEVAL_URL"], timeout=60)


async def agent(given: Mapping[str, Any]) -> str:
    """Answer one question."""
    policy, retrieval = _clients()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": given["question"]}]
    for _ in range(QUERIES + 1):
        # A reply ends with its tag, which stays in it: the next prompt goes on where the engine stopped.
        answer = await policy.chat.completions.create(
            model="policy",
            messages=messages,
            max_completion_tokens=LONGEST,
            temperature=1.0,
            stop=["</query>", "</answer>"],
            extra_body={"include_stop_str_in_output": True},
        )
        reply = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        queries = _QUERY.findall(reply)
        if not queries or "<answer>" in reply:
            break
        response = await retrieval.post("/search", json={"query": queries[-1].strip(), "count": PARAGRAPHS})
        response.raise_for_status()
        messages.append({"role": "user", "content": f"<information> {' '.join(response.json()['documents'])} </information>"})
    return "\n".join(message["content"] for message in messages if message["role"] == "assistant")
