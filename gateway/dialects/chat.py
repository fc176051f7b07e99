"""`/v1/chat/completions`: one prompt, n choices; ids in fields of vLLM's, asked for in the request.

In: choices of answers and chunks. Out: their ids, logprobs and finish reasons, and a stream's messages assembled.
Invariant: that of `gateway.dialects.choices`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.answer import Choice, EngineAnswer, Logprob, TokenAlternatives
from gateway.dialects.base import ClientRequest, append_text
from gateway.dialects.choices import ChoicesDialect, KnownAnswer, ReadAnswer, ReadChoice
from gateway.vllm_plugin.request_fields import CHAT_PATH

_TEXTS = frozenset({"role", "content", "refusal", "reasoning", "reasoning_content"})


class _Logprob(msgspec.Struct, gc=False):
    logprob: Logprob


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _LogprobsWithAlternatives(msgspec.Struct, gc=False):
    content: list[TokenAlternatives] | None = None


class _Choice(ReadChoice, gc=False):
    """A choice; of a chunk, with a delta."""

    logprobs: _Logprobs | UnsetType | None = UNSET
    delta: dict[str, Any] | UnsetType = UNSET


class _ChoiceWithAlternatives(ReadChoice, gc=False):
    """A choice of an answer to a client that asked for alternatives."""

    logprobs: _LogprobsWithAlternatives | UnsetType | None = UNSET
    delta: dict[str, Any] | UnsetType = UNSET


class _KnownChoice(_Choice, forbid_unknown_fields=True, gc=False):
    message: Raw | UnsetType = UNSET
    stop_reason: Raw | UnsetType = UNSET
    routed_experts: Raw | UnsetType = UNSET


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    """A part of a tool call, with its index among the calls of the message."""

    index: int
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class ChatDialect(ChoicesDialect[_Choice | _ChoiceWithAlternatives]):
    """OpenAI's chat completions."""

    path = CHAT_PATH
    operation = "chat"
    object_type = "chat.completion"
    length_fields = ("max_completion_tokens", "max_tokens")
    conversation = frozenset({"messages"})

    read_answer: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ReadAnswer[_Choice])
    read_alternatives = msgspec.json.Decoder(ReadAnswer[_ChoiceWithAlternatives])
    known_answer = msgspec.json.Decoder(KnownAnswer[_KnownChoice])
    choice_in_order = ("index", "message", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")

    def read_top(self, answer: EngineAnswer, top: ReadAnswer[_Choice | _ChoiceWithAlternatives]) -> None:
        """See `ChoicesDialect`."""
        super().read_top(answer, top)
        if top.prompt_token_ids and not answer.prompts:
            answer.prompts = [top.prompt_token_ids]

    def read_choice(self, answer: EngineAnswer, choice: _Choice | _ChoiceWithAlternatives, request: ClientRequest) -> bool:
        """See `ChoicesDialect`."""
        kept = answer.choices.get(choice.index) or Choice()
        delta = choice.delta or {}
        _merge(kept.message, delta)
        answer.choices[choice.index] = kept
        kept.token_ids += choice.token_ids or []
        if isinstance(choice, _ChoiceWithAlternatives):
            answer.add_alternatives(kept, (choice.logprobs and choice.logprobs.content) or [])
        kept.logprobs += [token.logprob for token in (choice.logprobs and choice.logprobs.content) or []]
        kept.finish_reason = choice.finish_reason or kept.finish_reason
        # A chunk that has no ids came from an upstream that was not asked for any: nothing of it is ours to leave out.
        return bool(delta) or choice.finish_reason not in (None, UNSET) or choice.token_ids is UNSET

    def content(self, choice: Choice) -> dict[str, Any]:
        """See `ChoicesDialect`."""
        return {"message": choice.message}


def _merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message that it is part of.

    Raises:
        ValueError: it is no delta; the message is as it was.
    """
    added = delta.get("tool_calls")
    parts = msgspec.convert(added, list[_ToolCall]) if added else list[_ToolCall]()
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
            append_text(message, name, value)
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
    append_text(call["function"], "name", function.name or "")
    append_text(call["function"], "arguments", function.arguments or "")
