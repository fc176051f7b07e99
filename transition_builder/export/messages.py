"""A call's conversation in one form, whichever interface it was asked through.

In: the JSON of a request and of its answer, in the forms of /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages. Out:
`Dialogue`: OpenAI's chat messages. Invariant: texts are those of the call, letter by letter; what cannot be told is an error and never a
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
"""Finish reasons of an answer that its limit ended."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})


class UnreadableError(ValueError):
    """What should be a request or an answer is none that is known here; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What was asked in one call, and what was answered."""

    prompt: list[Message] | str
    """Messages; the text itself where there were none (/v1/completions)."""
    reply: Message | str
    tools: list[Tool]
    """As OpenAI's chat wants them: {"type": "function", "function": {...}}."""
    cut: bool = False
    """Whether the answer ended at its token limit."""

    @property
    def is_text(self) -> bool:
        """Whether every content is a text."""
        if isinstance(self.prompt, str) or isinstance(self.reply, str):
            return True
        return all(isinstance(message["content"], str) for message in (*self.prompt, self.reply))


def dialogue(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> Dialogue:
    """Read a call, told by the shapes of its request and answer.

    Args:
        request: the body that was sent.
        answer: the body that came.
        choice: which of the answer's choices.

    Raises:
        UnreadableError: it is none of the four interfaces', or not whole.
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
    """Content in one form: a text, or parts where not all of them are texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnreadableError(f"a content is {type(content).__name__}")
    parts = [{"type": "text", "text": one} if isinstance(one, str) else _dict(one) for one in cast("list[object]", content)]
    if all(part.get("type") in _TEXT_PARTS for part in parts):
        return "\n".join(str(part.get("text", "")) for part in parts)
    return parts


def message(role: str, content: object, calls: Iterable[Mapping[str, Any]] = (), **more: object) -> Message:
    """A message; `more` holds what is left away where it is empty: name, tool_call_id, reasoning_content."""
    made: Message = {"role": "system" if role == "developer" else role, "content": text(content)}
    if asked := [tool_call(one) for one in calls]:
        made["tool_calls"] = asked
    return made | {name: value for name, value in more.items() if value not in (None, "")}


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call as OpenAI's chat has it: its arguments are JSON in a text."""
    function = _dict(call.get("function") or call)
    arguments = function.get("arguments", function.get("args"))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    made = {"type": "function", "function": {"name": str(function.get("name") or ""), "arguments": written}}
    return ({"id": str(call["id"])} if call.get("id") else {}) | made


def tool(given: object) -> Tool:
    """A tool as OpenAI's chat has it, from any of the three forms."""
    one = _dict(given)
    if "function" in one:
        function = _dict(one["function"])
    elif "input_schema" in one:
        function = {"name": one.get("name"), "description": one.get("description"), "parameters": one["input_schema"]}
    else:
        function = {name: one.get(name) for name in ("name", "description", "parameters", "strict")}
    if not function.get("name"):
        raise UnreadableError("a tool has no name")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def chat_message(given: object) -> Message:
    """A message of OpenAI's chat, without what says nothing."""
    one = _dict(given)
    if "role" not in one:
        raise UnreadableError("a message has no role")
    calls = one.get("tool_calls") or ([{"function": one["function_call"]}] if one.get("function_call") else [])
    return message(
        str(one["role"]),
        one.get("content") or one.get("refusal"),
        [_dict(call) for call in calls],
        name=one.get("name"),
        tool_call_id=one.get("tool_call_id"),
        reasoning_content=one.get("reasoning_content") or one.get("reasoning"),
    )


def anthropic_messages(given: object) -> list[Message]:
    """One message of Anthropic's, which is several of OpenAI's when it answers tool calls."""
    one = _dict(given)
    role, content = str(one.get("role", "assistant")), one.get("content")
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
    """Items of OpenAI's responses; what a model says in one turn is one message."""
    made: list[Message] = []
    thoughts = ""
    for item in items:
        one = _dict(item)
        match one.get("type", "message"):
            case "message":
                _say(made, message(str(one.get("role", "assistant")), one.get("content"), reasoning_content=thoughts))
            case "function_call":
                call = {"id": one.get("call_id") or one.get("id"), "function": {"name": one.get("name"), "arguments": one.get("arguments")}}
                _say(made, message("assistant", "", [call], reasoning_content=thoughts))
            case "function_call_output":
                made.append(message("tool", one.get("output"), tool_call_id=one.get("call_id")))
            case "reasoning":
                told = text(one.get("content") or one.get("summary") or "")
                thoughts = told if isinstance(told, str) else ""
                continue
            case kind:
                raise UnreadableError(f"an item is of type {kind}")
        thoughts = ""
    return made


def _say(made: list[Message], said: Message) -> None:
    """Add a message; to the model's last one, when that goes on."""
    last = made[-1] if made else None
    if said["role"] != "assistant" or last is None or last["role"] != "assistant" or (last["content"] and said["content"]):
        made.append(said)
        return
    last["content"] = last["content"] or said["content"]
    last["tool_calls"] = [*last.get("tool_calls", ()), *said.get("tool_calls", ())]
    if not last["tool_calls"]:
        del last["tool_calls"]


def _chat(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> Dialogue:
    said = _choice(answer, choice)
    reply = chat_message({"role": "assistant"} | _dict(said.get("message")))
    prompt = [chat_message(one) for one in _list(request["messages"])]
    return Dialogue(prompt, reply, _tools(request), said.get("finish_reason") in _CUT)


def _completion(request: Mapping[str, Any], answer: Mapping[str, Any], choice: int) -> Dialogue:
    said, prompts = _choice(answer, choice), request["prompt"]
    if isinstance(prompts, list):
        each = len(_list(answer["choices"])) // max(len(cast("list[Any]", prompts)), 1) or 1
        prompts = cast("list[Any]", prompts)[choice // each] if choice // each < len(cast("list[Any]", prompts)) else None
    if not isinstance(prompts, str):
        raise UnreadableError("the prompt is token ids")
    return Dialogue(prompts, str(said.get("text") or ""), [], said.get("finish_reason") in _CUT)


def _response(request: Mapping[str, Any], answer: Mapping[str, Any]) -> Dialogue:
    if request.get("previous_response_id") or request.get("conversation"):
        raise UnreadableError("earlier turns stand in another call")
    asked = request["input"]
    prompt = [message("user", asked)] if isinstance(asked, str) else response_messages(_list(asked))
    if request.get("instructions"):
        prompt = [message("system", request["instructions"]), *prompt]
    said = response_messages(_list(answer["output"]))
    if len(said) != 1:
        raise UnreadableError(f"the answer has {len(said)} messages")
    return Dialogue(prompt, said[0], _tools(request), answer.get("status") in _CUT)


def _message(request: Mapping[str, Any], answer: Mapping[str, Any]) -> Dialogue:
    prompt = [one for given in _list(request["messages"]) for one in anthropic_messages(given)]
    if request.get("system"):
        prompt = [message("system", request["system"]), *prompt]
    said = anthropic_messages({"role": "assistant", "content": answer["content"]})
    return Dialogue(prompt, said[-1], _tools(request), answer.get("stop_reason") in _CUT)


def _tools(request: Mapping[str, Any]) -> list[Tool]:
    return [tool(one) for one in _list(request.get("tools") or [])]


def _choice(answer: Mapping[str, Any], choice: int) -> dict[str, Any]:
    choices = [_dict(one) for one in _list(answer["choices"])]
    found = [one for place, one in enumerate(choices) if one.get("index", place) == choice]
    if not found:
        raise UnreadableError(f"the answer has no choice {choice}")
    return found[0]


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableError(f"an object is {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UnreadableError(f"a list is {type(value).__name__}")
    return cast("list[object]", value)
