"""Answers of the dialects, made comparable: without ids and times, and however many tokens came at a time.

In: the body of an answer, whole or a stream of events. Out: plain values, equal if a client could not tell the answers
apart but by that. Invariant: of a stream, every value of every event is in there, in its order; only texts and lists that
go on where the last ones ended are joined to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

VOLATILE = {"id", "item_id", "call_id", "created", "created_at", "signature", "sequence_number"}
"""Fields that are drawn, counted or read from a clock for each answer."""
_LENGTHENED = ("delta", "content", "text", "thinking", "partial_json", "arguments", "reasoning")
_ENDS = (".finish_reason", ".stop_reason", ".system_fingerprint")
_END = "<|im_end|>"
_MIXED = ("choices", "tool_calls")
"""Lists of one part each, or of several that vLLM mixes as they come."""


def comparable(body: bytes) -> Any:
    """What an answer says, of whatever dialect."""
    return _Stream(body).told() if body.startswith((b"data:", b"event:")) else _steady(json.loads(body))


class _Stream:
    """What a stream's events say, a list for each choice, and the fields that there were."""

    def __init__(self, body: bytes) -> None:
        self.fields: set[str] = set()
        self.said: dict[str, list[Any]] = {}
        """Changes of fields as (path, value), and between two of them the texts and lists that went on meanwhile, by path."""
        self._state: dict[tuple[str, str], Any] = {}
        *events, end = body.split(b"\n\n")
        assert end == b""
        for event in events:
            name, _, data = event.decode().partition("data: ")
            values: dict[str, Any] = {"data": data} if data == "[DONE]" else json.loads(data)
            if str(values.get("type")).startswith("response."):
                values = _without_end(values)
            choices = values.get("choices") or [{}]
            for path, value in sorted(_leaves("", {"event": name, **values}), key=_place):
                self.fields.add(path)
                self._say(f"choice {choices[0].get('index')}", path, value)

    def told(self) -> dict[str, Any]:
        return {"said": self.said, "fields": sorted(self.fields)}

    def _say(self, choice: str, path: str, value: Any) -> None:
        said = self.said.setdefault(choice, [])
        if isinstance(value, list) or path.endswith(_LENGTHENED):
            if value:
                if not said or not isinstance(said[-1], dict):
                    said.append({})
                said[-1][path] = said[-1][path] + value if path in said[-1] else value
        elif value is not None and self._state.get((choice, path)) != value:
            self._state[choice, path] = value
            if path.endswith(_ENDS):
                self.said.setdefault(f"end of {choice}", []).append((path, value))
            else:
                said.append((path, value))


def _place(leaf: tuple[str, Any]) -> int:
    """What an event is of comes first, then what it goes on with; a choice's end comes with its last tokens, or after them."""
    path, value = leaf
    return 2 if path.endswith(_ENDS) else int(isinstance(value, list) or path.endswith(_LENGTHENED))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of an event, each with its path."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(f"{path}.{name}", "…" if name in VOLATILE and one else one)
    elif isinstance(value, list) and path.endswith(_MIXED):
        for one in value:
            yield from _leaves(f"{path}[]", one)
    else:
        yield path, _steady(value)


def _without_end(value: Any) -> Any:
    """Without logprobs of the token that ends an answer: vLLM's Responses tell them when it came together with a token that has text."""
    if isinstance(value, dict):
        return {key: _without_end(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_end(one) for one in value if not (isinstance(one, dict) and "logprob" in one and one.get("token") == _END)]
    return value


def _steady(value: Any) -> Any:
    """Without what is drawn or read from a clock, and numbers as exact as two processes agree on."""
    if isinstance(value, dict):
        return {key: "…" if key in VOLATILE and one else _steady(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_steady(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value
