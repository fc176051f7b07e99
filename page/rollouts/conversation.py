"""Conversations of a rollout as messages: of each call the messages that are new since an earlier call, and the reply.

In: calls with their messages, in order. Out: turns. Invariant: what a turn leaves out was, message by message, the beginning of its prompt
and the prompt and reply of the call that it names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

MESSAGE_CHARACTERS = 20_000
"""Characters of a message that are shown; the rest is counted."""
TURNS_MOST = 30
"""Largest number of calls of one request."""


@dataclass(frozen=True, slots=True)
class CallMessages:
    """Messages of a call, in the form of OpenAI's chat."""

    prompt: Sequence[Mapping[str, Any]] = ()
    reply: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: int = 0
    """Number of tools that were offered."""
    problem: str = ""
    """Reason why the messages are not known. Empty: they are."""


ReadMessages = Callable[["Client", Sequence[Mapping[str, Any]]], Sequence[CallMessages]]
"""Function from a client of the store and calls (TraceId, SpanId, ChoiceIndex, Timestamp) to their messages, in the same order."""


def turns(calls: Sequence[CallMessages], known: int) -> list[dict[str, Any]]:
    """Return a turn for each call, in order, after the first `known`, which others are only compared with."""
    ends: list[list[str]] = []
    result: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        keys = [_key(message) for message in call.prompt]
        before = max(range(index), key=lambda place: (shared_length(ends[place], keys), place), default=None)
        shared = 0 if before is None else shared_length(ends[before], keys)
        ends.append([*keys, _key(call.reply)])
        if index >= known:
            result.append(
                {
                    "problem": call.problem,
                    "tools": call.tools,
                    "repeated": shared,
                    "messages": [_shown(message) for message in call.prompt[shared:]],
                    "reply": _shown(call.reply) if call.reply else None,
                }
            )
    return result


def _key(message: Mapping[str, Any]) -> str:
    return json.dumps(message, sort_keys=True, default=str)


def shared_length(earlier: Sequence[object], later: Sequence[object]) -> int:
    """Return the number of items with which two sequences begin alike."""
    return next((at for at, (old, new) in enumerate(zip(earlier, later, strict=False)) if old != new), min(len(earlier), len(later)))


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return {
        "role": str(message.get("role", "")),
        "name": str(message.get("name") or ""),
        "text": _cut(text),
        "reasoning": _cut(str(message.get("reasoning_content") or "")),
        "toolCalls": [{"name": str(call.get("name", "")), "arguments": _cut(str(call.get("arguments", "")))} for call in calls],
    }


def _cut(text: str) -> dict[str, Any]:
    return {"text": text[:MESSAGE_CHARACTERS], "characters": len(text)}
