"""Calls of a rollout that continue each other, as one sequence; each reply is trained in exactly one.

In: calls with what was asked and answered, as messages or as token ids. Out: sequences whose parts are marked as trained or not.
Invariant: every call's reply is marked in exactly one sequence, and what stands before it there is that call's prompt. Where a prompt does
not begin with an earlier call's prompt and reply, a new sequence begins with the whole prompt.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from transition_builder.export.messages import Message, Tool


@dataclass(slots=True)
class Conversation:
    """Messages of one or more calls."""

    messages: list[Message]
    trained: list[bool]
    """One a message: whether it is the reply of a call of this sequence."""
    tools: list[Tool]
    calls: list[int]
    """Places of the calls among those given, in order."""
    prompt: int
    """How many messages its first call asked with."""


@dataclass(slots=True)
class Tokens:
    """Token ids of one or more calls."""

    ids: list[int]
    mask: list[int]
    """1 on sampled tokens."""
    calls: list[int]
    prompt: int
    """How many tokens its first call's prompt has."""


def of_messages(calls: Sequence[tuple[list[Message], Message, list[Tool]]]) -> list[Conversation]:
    """Merge calls, given as prompt, reply and tools in order; a sequence's tools are the same throughout."""
    made: list[Conversation] = []
    ends: list[tuple[str, list[Hashable]]] = []
    for place in sorted(range(len(calls)), key=lambda one: (len(calls[one][0]), one)):
        prompt, reply, tools = calls[place]
        keys, offered = [message_key(one) for one in prompt], json.dumps(tools, sort_keys=True)
        fitting = [at for at, (under, end) in enumerate(ends) if under == offered and keys[: len(end)] == end]
        if fitting:
            at = max(fitting, key=lambda one: len(ends[one][1]))
        else:
            at = len(made)
            made.append(Conversation([], [], tools, [], len(prompt)))
            ends.append((offered, []))
        one, known = made[at], len(made[at].messages)
        one.messages += [*prompt[known:], reply]
        one.trained += [False] * (len(prompt) - known) + [True]
        one.calls.append(place)
        ends[at] = (offered, [*keys, message_key(reply)])
    return sorted(made, key=lambda one: one.calls[0])


def of_tokens(calls: Sequence[tuple[list[int], list[int]]]) -> list[Tokens]:
    """Merge calls, given as prompt and response ids in order."""
    made: list[Tokens] = []
    for place in sorted(range(len(calls)), key=lambda one: (len(calls[one][0]), one)):
        prompt, response = calls[place]
        fitting = [one for one in made if len(one.ids) <= len(prompt) and prompt[: len(one.ids)] == one.ids]
        if fitting:
            one = max(fitting, key=lambda one: len(one.ids))
        else:
            one = Tokens([], [], [], len(prompt))
            made.append(one)
        known = len(one.ids)
        one.ids += [*prompt[known:], *response]
        one.mask += [0] * (len(prompt) - known) + [1] * len(response)
        one.calls.append(place)
    return sorted(made, key=lambda one: one.calls[0])


def message_key(message: Message) -> Hashable:
    """What two messages that are the same have in common: arguments of tool calls count by their value, not by their spelling."""
    calls = [(call.get("id"), call["function"]["name"], _value(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
    content = message["content"]
    said = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return (message["role"], said, tuple(calls), message.get("tool_call_id"), message.get("name"), message.get("reasoning_content"))


def prompt_key(prompt: Iterable[Message]) -> Hashable:
    """What two prompts that are the same have in common."""
    return tuple(message_key(one) for one in prompt)


def _value(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
