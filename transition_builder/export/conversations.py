"""Calls of a rollout that continue each other, as one sequence of messages or of token ids.

Invariant: every call's reply is trained in exactly one sequence, and what stands before it there is that call's prompt. Where a prompt does
not begin with an earlier call's prompt and reply, a new sequence begins with the whole prompt.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from spangrad.errors import JSON_ERRORS
from transition_builder.dialects.messages import Message, Tool


@dataclass(slots=True)
class Conversation:
    """Messages of one or more calls."""

    messages: list[Message]
    trained: list[bool]
    """One flag a message: it is the reply of a call of this sequence."""
    tools: list[Tool]
    calls: list[int]
    """Places of the calls among the given ones, in order."""
    prompt: int
    """Number of messages in the prompt of its first call."""


@dataclass(slots=True)
class CallTokens:
    """Token ids of one or more calls."""

    ids: list[int]
    mask: list[int]
    """Loss mask: 1 on sampled tokens."""
    calls: list[int]
    prompt: int
    """Number of tokens in the prompt of its first call."""


def of_messages(calls: Sequence[tuple[list[Message], Message, list[Tool]]]) -> list[Conversation]:
    """Merge calls, given as prompt, reply and tools in order; a sequence's tools are the same throughout."""
    merged: list[Conversation] = []
    ends: list[tuple[str, list[Hashable]]] = []
    for index in sorted(range(len(calls)), key=lambda number: (len(calls[number][0]), number)):
        prompt, reply, tools = calls[index]
        keys, offered = [message_key(message) for message in prompt], json.dumps(tools, sort_keys=True)
        matches = [at for at, (offered_tools, end) in enumerate(ends) if offered_tools == offered and keys[: len(end)] == end]
        if matches:
            at = max(matches, key=lambda number: len(ends[number][1]))
        else:
            at = len(merged)
            merged.append(Conversation([], [], tools, [], len(prompt)))
            ends.append((offered, []))
        conversation, known = merged[at], len(merged[at].messages)
        conversation.messages += [*prompt[known:], reply]
        conversation.trained += [False] * (len(prompt) - known) + [True]
        conversation.calls.append(index)
        ends[at] = (offered, [*keys, message_key(reply)])
    return sorted(merged, key=lambda conversation: conversation.calls[0])


def of_tokens(calls: Sequence[tuple[list[int], list[int]]]) -> list[CallTokens]:
    """Merge calls, given as prompt and response ids in order."""
    sequences: list[CallTokens] = []
    for index in sorted(range(len(calls)), key=lambda number: (len(calls[number][0]), number)):
        prompt, response = calls[index]
        matches = [tokens for tokens in sequences if _begins_with(prompt, tokens.ids)]
        if matches:
            sequence = max(matches, key=lambda tokens: len(tokens.ids))
        else:
            sequence = CallTokens([], [], [], len(prompt))
            sequences.append(sequence)
        known = len(sequence.ids)
        sequence.ids += [*prompt[known:], *response]
        sequence.mask += [0] * (len(prompt) - known) + [1] * len(response)
        sequence.calls.append(index)
    return sorted(sequences, key=lambda sequence: sequence.calls[0])


def _begins_with(prompt: list[int], ids: list[int]) -> bool:
    size = len(ids)
    # The last id first: it differs in most sequences, and the comparison of all would copy the prompt for each.
    return size <= len(prompt) and prompt[size - 1 : size] == ids[-1:] and prompt[:size] == ids


def message_key(message: Message) -> Hashable:
    """Return a key that is equal for equal messages: arguments of tool calls are compared by value, not by spelling."""
    calls = [(call.get("id"), call["function"]["name"], _value(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
    content = message["content"]
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return (message["role"], text, tuple(calls), message.get("tool_call_id"), message.get("name"), message.get("reasoning_content"))


def prompt_key(prompt: Iterable[Message]) -> Hashable:
    """Return a key that is equal for equal prompts."""
    return tuple(message_key(message) for message in prompt)


def _value(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except JSON_ERRORS:
        return arguments
