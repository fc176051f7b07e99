"""Reads the messages of a model call from the request and response that the gateway recorded.

In: a request and a response, as JSON. Out: roles and texts. Invariant: content in an unknown form is shown as it is, never left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from spangrad.errors import JSON_ERRORS


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
    items = cast("list[Any]", given) if isinstance(given, list) else [given] if given else []
    if items and all(isinstance(item, int) for item in items):
        items = [items]  # token ids of one prompt
    system = [("system", _text(request_body[name])) for name in ("system", "instructions") if request_body.get(name)]
    return Exchange((*system, *map(_message, items)), _reply(response_body) or response)


def _message(item: Any) -> tuple[str, str]:
    """Return the role and content of a message; an item of another kind is shown whole, by its type."""
    if not isinstance(item, dict):
        return "user", _text(item)
    message = cast("dict[str, Any]", item)
    content = message.get("content")
    is_message = bool(content or message.get("tool_calls")) or content == ""
    return str(message.get("role") or message.get("type") or ""), _content(message) if is_message else _text(message)


def _reply(response: dict[str, Any]) -> str:
    """Return the first choice's content; empty where it has none."""
    choices: Any = response.get("choices") or [response]
    first = cast("list[Any]", choices)[0] if isinstance(choices, list) else choices
    if not isinstance(first, dict):
        return ""
    choice = cast("dict[str, Any]", first)
    message: Any = choice.get("message") or choice.get("text") or choice.get("content") or choice.get("output")
    return _content(cast("dict[str, Any]", message) if isinstance(message, dict) else {"content": message})


def _object(text: str) -> dict[str, Any]:
    try:
        value: object = json.loads(text)
    except JSON_ERRORS:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _content(message: dict[str, Any]) -> str:
    parts = [_text(message[name]) for name in ("content", "tool_calls") if message.get(name)]
    return " ".join(parts).strip()


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
