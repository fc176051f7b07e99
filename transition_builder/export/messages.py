"""Conversation of a call in one form, for every interface.

In: the JSON of a request and of its response, in the forms of /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages. Out:
`Dialogue`: OpenAI's chat messages. Invariant: texts are those of the call, letter by letter; an unclear form is an error and never a
guess.

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

_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "incomplete"})
"""Finish reasons of a response that its token limit ended."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})


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

    @property
    def is_text(self) -> bool:
        """True if every content is a text."""
        if isinstance(self.prompt, str) or isinstance(self.reply, str):
            return True
        return all(isinstance(message["content"], str) for message in (*self.prompt, self.reply))


def dialogue(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> Dialogue:
    """Read a call, by the shapes of its request and response.

    Args:
        request: the body that was sent.
        answer: the body that was received.
        choice: index of the response's choice.

    Raises:
        UnreadableError: the bodies are of none of the four interfaces, or incomplete.
    """
    if "choices" in answer and "messages" in request:
        return _chat(request, answer, choice)
    if "choices" in answer and "prompt" in request:
        return _completion(request, answer, choice)
    if "output" in answer and "input" in request:
        return _response(request, answer)
    if "content" in answer and "messages" in request:
        return _message(request, answer)
    raise UnreadableError("request and answer have the fields of no interface")


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


def message(role: str, content: object, calls: Iterable[Mapping[str, Any]] = (), **more: object) -> Message:
    """Make a message; `more` holds fields that are omitted where empty: name, tool_call_id, reasoning_content."""
    result: Message = {"role": "system" if role == "developer" else role, "content": text(content)}
    if tool_calls := [tool_call(call) for call in calls]:
        result["tool_calls"] = tool_calls
    return result | {name: value for name, value in more.items() if value not in (None, "")}


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call in the form of OpenAI's chat: its arguments are JSON in a text."""
    function = _dict(call.get("function") or call)
    arguments = function.get("arguments", function.get("args"))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    result = {"type": "function", "function": {"name": str(function.get("name") or ""), "arguments": written}}
    return ({"id": str(call["id"])} if call.get("id") else {}) | result


def tool(given: object) -> Tool:
    """Return a tool in the form of OpenAI's chat, from any of the three forms."""
    fields = _dict(given)
    if "function" in fields:
        function = _dict(fields["function"])
    elif "input_schema" in fields:
        function = {"name": fields.get("name"), "description": fields.get("description"), "parameters": fields["input_schema"]}
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
    calls = fields.get("tool_calls") or ([{"function": fields["function_call"]}] if fields.get("function_call") else [])
    return message(
        str(fields["role"]),
        fields.get("content") or fields.get("refusal"),
        [_dict(call) for call in calls],
        name=fields.get("name"),
        tool_call_id=fields.get("tool_call_id"),
        reasoning_content=fields.get("reasoning_content") or fields.get("reasoning"),
    )


def anthropic_messages(given: object) -> list[Message]:
    """Convert one message of Anthropic's, which is several of OpenAI's when it answers tool calls."""
    fields = _dict(given)
    role, content = str(fields.get("role", "assistant")), fields.get("content")
    if not isinstance(content, list):
        return [message(role, content)]
    blocks = [_dict(block) for block in cast("list[object]", content)]
    answers = [
        message("tool", block.get("content"), tool_call_id=block.get("tool_use_id"))
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    thoughts = "\n".join(str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking")
    rest = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    if answers and not rest:
        return answers
    return [*answers, message(role, rest, calls, reasoning_content=thoughts)]


def response_messages(items: Iterable[object]) -> list[Message]:
    """Convert items of OpenAI's responses; the output of a model in one turn is one message."""
    messages: list[Message] = []
    thoughts = ""
    for item in items:
        fields = _dict(item)
        match fields.get("type", "message"):
            case "message":
                _append(messages, message(str(fields.get("role", "assistant")), fields.get("content"), reasoning_content=thoughts))
            case "function_call":
                call = {
                    "id": fields.get("call_id") or fields.get("id"),
                    "function": {"name": fields.get("name"), "arguments": fields.get("arguments")},
                }
                _append(messages, message("assistant", "", [call], reasoning_content=thoughts))
            case "function_call_output":
                messages.append(message("tool", fields.get("output"), tool_call_id=fields.get("call_id")))
            case "reasoning":
                thought = text(fields.get("content") or fields.get("summary") or "")
                thoughts = thought if isinstance(thought, str) else ""
                continue
            case kind:
                raise UnreadableError(f"an item is of type {kind}")
        thoughts = ""
    return messages


def _append(messages: list[Message], addition: Message) -> None:
    """Append a message, or merge it into the model's last one where it continues that."""
    last = messages[-1] if messages else None
    if addition["role"] != "assistant" or last is None or last["role"] != "assistant" or (last["content"] and addition["content"]):
        messages.append(addition)
        return
    last["content"] = last["content"] or addition["content"]
    last["tool_calls"] = [*last.get("tool_calls", ()), *addition.get("tool_calls", ())]
    if not last["tool_calls"]:
        del last["tool_calls"]


def _chat(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> Dialogue:
    chosen = _choice(answer, choice)
    reply = chat_message({"role": "assistant"} | _dict(chosen.get("message")))
    prompt = [chat_message(item) for item in _list(request["messages"])]
    return Dialogue(prompt, reply, _tools(request), chosen.get("finish_reason") in _CUT)


def _completion(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> Dialogue:
    chosen, prompts = _choice(answer, choice), request["prompt"]
    if isinstance(prompts, list):
        each = len(_list(answer["choices"])) // max(len(cast("list[Any]", prompts)), 1) or 1
        prompts = cast("list[Any]", prompts)[choice // each] if choice // each < len(cast("list[Any]", prompts)) else None
    if not isinstance(prompts, str):
        raise UnreadableError("the prompt is token ids")
    return Dialogue(prompts, str(chosen.get("text") or ""), [], chosen.get("finish_reason") in _CUT)


def _response(request: Mapping[str, Any], answer: Mapping[str, Any]) -> Dialogue:
    if request.get("previous_response_id") or request.get("conversation"):
        raise UnreadableError("earlier turns stand in another call")
    inputs = request["input"]
    prompt = [message("user", inputs)] if isinstance(inputs, str) else response_messages(_list(inputs))
    if request.get("instructions"):
        prompt = [message("system", request["instructions"]), *prompt]
    replies = response_messages(_list(answer["output"]))
    if len(replies) != 1:
        raise UnreadableError(f"the answer has {len(replies)} messages")
    return Dialogue(prompt, replies[0], _tools(request), answer.get("status") in _CUT)


def _message(request: Mapping[str, Any], answer: Mapping[str, Any]) -> Dialogue:
    prompt = [item for given in _list(request["messages"]) for item in anthropic_messages(given)]
    if request.get("system"):
        prompt = [message("system", request["system"]), *prompt]
    replies = anthropic_messages({"role": "assistant", "content": answer["content"]})
    return Dialogue(prompt, replies[-1], _tools(request), answer.get("stop_reason") in _CUT)


def _tools(request: Mapping[str, Any]) -> list[Tool]:
    return [tool(item) for item in _list(request.get("tools") or [])]


def _choice(answer: Mapping[str, Any], choice: int) -> dict[str, Any]:
    choices = [_dict(item) for item in _list(answer["choices"])]
    matches = [item for place, item in enumerate(choices) if item.get("index", place) == choice]
    if not matches:
        raise UnreadableError(f"the answer has no choice {choice}")
    return matches[0]


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableError(f"an object is {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UnreadableError(f"a list is {type(value).__name__}")
    return cast("list[object]", value)
