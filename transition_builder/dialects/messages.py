"""Messages of a call in one form, that of OpenAI's chat, from the bodies of every interface.

The bodies are those of /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages. Invariant: texts are those of the call,
letter by letter; an unclear form is an error and never a guess.

A message has role and content, and where there are any name, tool_calls, tool_call_id and reasoning_content. Content is a text, but for
messages with images or other parts, where it is the list of parts. Several text parts are joined by line breaks, as vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

Message = dict[str, Any]
Tool = dict[str, Any]

CUT = frozenset({"length", "max_tokens", "max_output_tokens", "incomplete"})
"""Finish reasons of a response that its token limit ended."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_ITEMS = frozenset({"message", "function_call", "function_call_output", "reasoning"})
"""Items of OpenAI's responses that are messages or parts of some."""
_LARGEST_INDEX = 2**16 - 1


class UnreadableError(ValueError):
    """A request or a response has no known form; the message names what it lacks."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Prompt, reply and tools of one call."""

    prompt: list[Message] | str
    """Prompt as messages; the text itself where there were none (/v1/completions)."""
    reply: Message | str
    tools: list[Tool]
    """Tools in the form of OpenAI's chat: {"type": "function", "function": {...}}."""
    cut: bool = False
    """True if the response ended at its token limit."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice of a response."""

    messages: list[Message]
    cut: bool = False
    """True if the response ended at its token limit."""
    whole: bool = True
    """False if it holds items that are no messages, such as a search by the server."""


def dialogue(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> Dialogue:
    """Read a call, by the shapes of the bodies that were sent and received; `choice` is the index of the response's choice.

    Raises:
        UnreadableError: the bodies are of none of the four interfaces, or incomplete.
    """
    prompt = _prompt(request, answer, choice)
    reply = replies(answer).get(choice)
    if reply is None:
        raise UnreadableError(f"the answer has no choice {choice}")
    if len(reply.messages) != 1 or not reply.whole:
        raise UnreadableError(f"the answer has {len(reply.messages)} messages{'' if reply.whole else ' and other items'}")
    (message,) = reply.messages
    tools = [tool(item) for item in _list(request.get("tools") or [])]
    return Dialogue(prompt, message["content"] if isinstance(prompt, str) else message, tools, reply.cut)


def replies(answer: object) -> dict[int, Reply]:
    """Return the choices of a response by their indices; empty where it is of none of the four interfaces, nor gen_ai's messages.

    Raises:
        UnreadableError: it is, and incomplete.
    """
    match answer:
        case {"choices": [*choices]}:
            items = [_dict(item) for item in choices]
            return {
                choice_index(item.get("index", index)): Reply([_of_choice(item)], item.get("finish_reason") in CUT)
                for index, item in enumerate(items)
            }
        case {"output": [*items]}:
            known = [item for item in map(_dict, items) if item.get("type", "message") in _ITEMS]
            status = cast("dict[str, Any]", answer).get("status")
            return {0: Reply(response_messages(known), status in CUT, len(known) == len(items))}
        case {"content": [*_]} | {"role": str(), "content": _}:
            fields = {"role": "assistant"} | cast("dict[str, Any]", answer)
            return {0: Reply(parted_messages(fields), fields.get("stop_reason") in CUT)}
        case [{"parts": [*_]}, *_]:
            given = [_dict(item) for item in cast("list[object]", answer)]
            parts = [part_messages("assistant", _list(item.get("parts"))) for item in given]
            return {
                index: Reply(reply, item.get("finish_reason") in CUT) for index, (item, reply) in enumerate(zip(given, parts, strict=True))
            }
        case _:
            return {}


def choice_index(given: object) -> int:
    """Return the index of a choice.

    Raises:
        UnreadableError: it is no number from 0 to 65535, which the store holds.
    """
    try:
        index = int(cast("Any", given))
    except (TypeError, ValueError, OverflowError):
        index = -1
    if not 0 <= index <= _LARGEST_INDEX:
        raise UnreadableError(f"a choice has the index {given!r}")
    return index


def _of_choice(choice: Mapping[str, Any]) -> Message:
    return chat_message({"role": "assistant"} | _dict(choice.get("message") or {"content": str(choice.get("text") or "")}))


def _prompt(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> list[Message] | str:
    if "choices" in answer and "messages" in request:
        return [chat_message(item) for item in _list(request["messages"])]
    if "choices" in answer and "prompt" in request:
        return _text_prompt(request["prompt"], len(_list(answer["choices"])), choice)
    if "output" in answer and "input" in request:
        if request.get("previous_response_id") or request.get("conversation"):
            raise UnreadableError("earlier turns stand in another call")
        inputs, instructions = request["input"], request.get("instructions")
        prompt = [message("user", inputs)] if isinstance(inputs, str) else response_messages(_list(inputs))
    elif "content" in answer and "messages" in request:
        prompt, instructions = [part for item in _list(request["messages"]) for part in parted_messages(item)], request.get("system")
    else:
        raise UnreadableError("request and answer have the fields of no interface")
    return [message("system", instructions), *prompt] if instructions else prompt


def _text_prompt(prompt: object, choices: int, choice: int) -> str:
    if isinstance(prompt, list):
        prompts = cast("list[object]", prompt)
        at = choice // (choices // max(len(prompts), 1) or 1)
        prompt = prompts[at] if at < len(prompts) else None
    if not isinstance(prompt, str):
        raise UnreadableError("the prompt is token ids")
    return prompt


def text(content: object) -> str | list[dict[str, Any]]:
    """Return content in one form: a text, or parts where not all of them are texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnreadableError(f"a content is {type(content).__name__}")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else _dict(part) for part in cast("list[object]", content)]
    if all(part.get("type") in _TEXT_PARTS for part in parts):
        return "\n".join(str(part.get("text", "")) for part in parts)
    return parts


def message(role: str, content: object, calls: Iterable[object] = (), **more: object) -> Message:
    """Make a message; `more` holds fields that are omitted where empty: name, tool_call_id, reasoning_content."""
    result: Message = {"role": "system" if role == "developer" else role, "content": text(content)}
    if tool_calls := [tool_call(call) for call in calls]:
        result["tool_calls"] = tool_calls
    return result | {name: as_text(value) for name, value in more.items() if value not in (None, "")}


def tool_call(call: object) -> dict[str, Any]:
    """Return a tool call of any form in that of OpenAI's chat: its arguments are JSON in a text."""
    fields = _dict(call)
    function = _dict(fields.get("function") or fields)
    # The gateway keeps the unread input of a call that was cut.
    arguments = next((function[name] for name in ("partial_json", "arguments", "args", "input") if name in function), None)
    written = as_text(arguments if arguments is not None else {})
    result = {"type": "function", "function": {"name": str(function.get("name") or function.get("toolName") or ""), "arguments": written}}
    names = (fields.get(name) for name in ("call_id", "toolCallId", "id"))
    return next(({"id": str(name)} for name in names if name), {}) | result


def as_text(value: object) -> str:
    """Return a text unchanged, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tool(given: object) -> Tool:
    """Return a tool in the form of OpenAI's chat, from that of any interface, or of Vercel's AI SDK."""
    fields = _dict(given)
    if "function" in fields:
        function = _dict(fields["function"])
    elif schema := [fields[name] for name in ("input_schema", "inputSchema") if name in fields]:
        function = {"name": fields.get("name"), "description": fields.get("description"), "parameters": schema[0]}
    else:
        function = {name: fields.get(name) for name in ("name", "description", "parameters", "strict")}
    if not function.get("name"):
        raise UnreadableError("a tool has no name")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def chat_message(given: object) -> Message:
    """Return a message of OpenAI's chat, without empty fields."""
    fields = _dict(given)
    if "role" not in fields:
        raise UnreadableError("a message has no role")
    return message(
        str(fields["role"]),
        fields.get("content") or fields.get("refusal"),
        fields.get("tool_calls") or ([{"function": fields["function_call"]}] if fields.get("function_call") else []),
        name=fields.get("name"),
        tool_call_id=fields.get("tool_call_id"),
        reasoning_content=fields.get("reasoning_content") or fields.get("reasoning"),
    )


def parted_messages(given: object) -> list[Message]:
    """Convert one message of Anthropic's or Vercel's, which is several of OpenAI's when it answers tool calls."""
    fields = _dict(given)
    content = fields.get("content")
    return part_messages(str(fields.get("role")), cast("list[object]", content)) if isinstance(content, list) else [chat_message(fields)]


def part_messages(role: str, parts: Iterable[object], name: object = None) -> list[Message]:
    """Convert a message whose tool calls and tool results are parts: Anthropic's, gen_ai's and Vercel's. Each result is a message."""
    results, calls, reasoning, rest = list[Message](), list[object](), list[str](), list[object]()
    for part in map(_dict, parts):
        match part.get("type"):
            case "tool_result":
                results.append(message("tool", part.get("content"), tool_call_id=part.get("tool_use_id")))
            case "tool_call_response":
                results.append(message("tool", as_text(part.get("response", part.get("result"))), tool_call_id=part.get("id")))
            case "tool-result":
                output = part.get("output", part.get("result"))
                if isinstance(part.get("output"), dict) and "value" in part["output"]:
                    output = part["output"]["value"]  # since version 5 of the AI SDK: {"type": "text", "value": ...}
                results.append(message("tool", as_text(output), tool_call_id=part.get("toolCallId")))
            case "tool_use" | "tool_call" | "tool-call":
                calls.append(part)
            case "thinking" | "reasoning":
                reasoning += [str(part[name]) for name in ("thinking", "content", "text") if part.get(name)][:1]
            case "redacted_thinking":
                pass
            case "text" if "text" not in part:
                rest.append({"type": "text", "text": part.get("content", "")})
            case _:
                rest.append(part)
    if results and not rest and not calls:
        return results
    return [*results, message(role, rest, calls, name=name, reasoning_content="\n".join(reasoning))]


def response_messages(items: Iterable[object]) -> list[Message]:
    """Convert items of OpenAI's responses; the output of a model in one turn is one message."""
    messages: list[Message] = []
    reasoning = ""
    for fields in map(_dict, items):
        match fields.get("type", "message"):
            case "message":
                _append(messages, message(str(fields.get("role", "assistant")), fields.get("content"), reasoning_content=reasoning))
            case "function_call":
                _append(messages, message("assistant", "", [fields], reasoning_content=reasoning))
            case "function_call_output":
                messages.append(message("tool", fields.get("output"), tool_call_id=fields.get("call_id")))
            case "reasoning":
                reasoning_text = text(fields.get("content") or fields.get("summary") or "")
                reasoning = _lines(reasoning, reasoning_text if isinstance(reasoning_text, str) else "")
                continue
            case kind:
                raise UnreadableError(f"an item is of type {kind}")
        reasoning = ""
    return messages


def _append(messages: list[Message], addition: Message) -> None:
    """Append a message, or merge it into the model's last one where it continues that."""
    last = messages[-1] if messages else None
    if addition["role"] != "assistant" or last is None or last["role"] != "assistant" or (last["content"] and addition["content"]):
        messages.append(addition)
        return
    last["content"] = last["content"] or addition["content"]
    if reasoning := _lines(last.get("reasoning_content", ""), addition.get("reasoning_content", "")):
        last["reasoning_content"] = reasoning
    last["tool_calls"] = [*last.get("tool_calls", ()), *addition.get("tool_calls", ())]
    if not last["tool_calls"]:
        del last["tool_calls"]


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableError(f"an object is {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UnreadableError(f"a list is {type(value).__name__}")
    return cast("list[object]", value)
