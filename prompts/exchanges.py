"""What was said in a call to a model, out of what the gateway has kept of it.

In: a request and a response, as JSON. Out: roles and words. Invariant: what is in no form that is known is shown as it is, never left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call to a model: what it was given, and what it said."""

    messages: tuple[tuple[str, str], ...]
    """Role and content of each."""
    reply: str


def read_exchange(request: str, response: str) -> Exchange:
    """A call of any of the gateway's dialects."""
    asked, said = _object(request), _object(response)
    given = asked.get("messages") or asked.get("input") or asked.get("prompt") or ()
    listed = cast("list[Any]", given) if isinstance(given, list) else [{"role": "user", "content": given}] if given else []
    messages = [(str(one.get("role", "")), _content(one)) for one in listed if isinstance(one, dict)]
    if asked.get("system"):
        messages.insert(0, ("system", _content({"content": asked["system"]})))
    choices = said.get("choices") or [said]
    first: dict[str, Any] = choices[0]
    message = first.get("message") or {"content": first.get("text") or first.get("content") or first.get("output")}
    return Exchange(tuple(messages), _content(message) or response)


def _object(text: str) -> dict[str, Any]:
    try:
        found: object = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return " ".join([text, json.dumps(calls, ensure_ascii=False)] if calls else [text]).strip()
