"""`/v1/chat/completions`: one prompt, n choices; ids in fields of vLLM's, asked for in the request.

In: choices of answers and chunks. Out: their ids, logprobs and finish reasons, and a stream's messages assembled.
Invariant: that of `gateway.dialects.choices`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.dialects.answer import Choice, EngineAnswer, Index, Logprob, TokenId
from gateway.dialects.base import NULL, ClientRequest, Fields
from gateway.dialects.choices import ChoicesDialect
from gateway.vllm_plugin.request_fields import CHAT_PATH

_TEXTS = frozenset({"role", "content", "refusal", "reasoning", "reasoning_content"})


class _Logprob(msgspec.Struct):
    logprob: Logprob


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    """A part of a tool call, with its index among the calls of the message."""

    index: int
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class ChatDialect(ChoicesDialect):
    """OpenAI's chat completions."""

    path = CHAT_PATH
    operation = "chat"
    conversation = frozenset({"messages"})

    def read_top(self, answer: EngineAnswer, top: Fields) -> None:
        """See `ChoicesDialect`."""
        super().read_top(answer, top)
        if "prompt_token_ids" in top and not answer.prompts:
            ids = msgspec.json.decode(top["prompt_token_ids"], type=list[TokenId] | None)
            answer.prompts = [ids] if ids else []

    def read_choice(self, answer: EngineAnswer, fields: Fields, request: ClientRequest) -> bool:
        """See `ChoicesDialect`."""
        # All of it is read before anything is kept: what is no choice leaves no trace.
        index = msgspec.json.decode(fields["index"], type=Index)
        token_ids = msgspec.json.decode(fields.get("token_ids", NULL), type=list[TokenId] | None)
        logprobs = msgspec.json.decode(fields.get("logprobs", NULL), type=_Logprobs | None)
        finish_reason = msgspec.json.decode(fields.get("finish_reason", NULL), type=str | None)
        delta = msgspec.json.decode(fields.get("delta", b"{}"), type=dict[str, Any])
        choice = answer.choices.get(index) or Choice()
        _merge(choice.message, delta)
        answer.choices[index] = choice
        choice.token_ids += token_ids or []
        choice.logprobs += [token.logprob for token in (logprobs.content if logprobs else None) or []]
        choice.finish_reason = finish_reason or choice.finish_reason
        # A chunk that has no ids came from an upstream that was not asked for any: nothing of it is ours to leave out.
        return bool(delta) or finish_reason is not None or "token_ids" not in fields

    def whole(self, answer: EngineAnswer) -> dict[str, Any]:
        """See `ChoicesDialect`."""
        choices = [
            {"index": index, "message": choice.message, "finish_reason": choice.finish_reason}
            for index, choice in sorted(answer.choices.items())
        ]
        return {"id": answer.id, "object": "chat.completion", "model": answer.model, "choices": choices, "usage": answer.usage}


def _merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message that it is part of.

    Raises:
        ValueError: it is no delta; the message is as it was.
    """
    parts = msgspec.convert(delta.get("tool_calls") or [], list[_ToolCall])
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if any(not 0 <= part.index <= len(calls) + index for index, part in enumerate(parts)):
        raise ValueError("a tool call stands beyond the next place")
    for name in _TEXTS & delta.keys():
        if not isinstance(delta[name], str | None):
            raise ValueError(f"{name} is no text")
    for name, value in delta.items():
        if name == "tool_calls":
            message.setdefault(name, calls if parts else value)
        elif isinstance(value, str) and name != "role":
            before = message.get(name)
            message[name] = before + value if isinstance(before, str) else value
        else:
            message[name] = value
    for part in parts:
        _add_call(calls, part)
    if parts:
        message["tool_calls"] = calls


def _add_call(calls: list[dict[str, Any]], part: _ToolCall) -> None:
    if part.index == len(calls):
        calls.append({"function": {"name": "", "arguments": ""}})
    call, function = calls[part.index], part.function or _Function()
    call.update({key: value for key, value in (("id", part.id), ("type", part.type)) if value is not None})
    call["function"]["name"] += function.name or ""
    call["function"]["arguments"] += function.arguments or ""
