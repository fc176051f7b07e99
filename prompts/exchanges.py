"""Reads the messages of a model call from the request and response that the gateway recorded.

In: a request and a response, as JSON. Out: roles and texts. Invariant: content in an unknown form is shown as it is, never left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages and reply of one model call."""

    messages: tuple[tuple[str, str], ...]
    """Role and content of each message."""
    reply: str


def read_exchange(request: str, response: str) -> Exchange:
    """Read a call in any of the gateway's dialects."""
    request_body, response_body = _object(request), _object(response)
    given = request_body.get("messages") or request_body.get("input") or request_body.get("prompt") or ()
    listed = cast("list[Any]", given) if isinstance(given, list) else [{"role": "user", "content": given}] if given else []
    messages = [(str(one.get("role", "")), _content(one)) for one in listed if isinstance(one, dict)]
    if request_body.get("system"):
        messages.insert(0, ("system", _content({"content": request_body["system"]})))
    choices = response_body.get("choices") or [response_body]
    first: dict[str, Any] = choices[0]
    message = first.get("message") or {"content": first.get("text") or first.get("content") or first.get("output")}
    return Exchange(tuple(messages), _content(message) or response)


def _object(text: str) -> dict[str, Any]:
    try:
        value: object = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return " ".join([text, json.dumps(calls, ensure_ascii=False)] if calls else [text]).strip()
