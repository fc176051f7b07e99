"""Text of a call, extracted from its span.

In: a span's attributes and events, as otel.otel_traces has them, and log records on it. Out: a `Dialogue`. Invariant: the first source that
holds both request and response is used alone; sources are never mixed.

Sources, in this order: the gateway's request and response; the bodies that instrumentations of clients keep (`input.value`,
`output.value`); OpenInference's numbered messages; gen_ai's message attributes, on the span or its event; Traceloop's numbered prompts;
gen_ai's older events and log records; the attributes of the Vercel AI SDK, Langfuse and MLflow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from spangrad import semconv
from transition_builder.export.messages import Dialogue, Message, Tool, UnreadableError, chat_message, dialogue, message, tool

ATTRIBUTES = (
    r"^(spangrad\.(request\.json|response\.json|redacted)|(input|output)\.value|llm\.(input_messages|output_messages|tools|request\.functions)\..*"
    r"|gen_ai\.(input\.messages|output\.messages|system_instructions|tool\.definitions|response\.finish_reasons|(prompt|completion)(\..*)?)"
    r"|llm\.finish_reason|ai\.(prompt(\.messages|\.tools)?|response\.(text|toolCalls|finishReason))|langfuse\.observation\.(input|output)"
    r"|mlflow\.span(Inputs|Outputs))$"
)
"""Regular expression of the attributes that may hold a text."""
EVENTS = r"^gen_ai\.((system|user|assistant|tool)\.message|choice|content\.(prompt|completion)|client\.inference\.operation\.details)$"
"""Regular expression of the events and log records that may hold a text."""

_FIRST_INDEX = re.compile(r"(\d+)\.(.*)")
_CUT = frozenset({"length", "max_tokens", "incomplete"})
_PAIRS = (
    ("input.value", "output.value"),
    ("langfuse.observation.input", "langfuse.observation.output"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
)


class RedactedError(ValueError):
    """A redaction rule of the gateway removed part of the text."""


class NoTextError(ValueError):
    """No source holds both request and response."""


@dataclass(frozen=True, slots=True)
class SpanText:
    """Contents of a span, its events and the log records on it."""

    attributes: Mapping[str, str]
    events: Sequence[tuple[str, Mapping[str, str]]] = ()
    """Events in order; a log record's body is its attribute `body`."""


def read(span: SpanText, choice: int) -> Dialogue:
    """Return the dialogue of one choice of a call.

    Raises:
        RedactedError: part of it was removed.
        NoTextError: no source holds it.
        UnreadableError: its source has no known form.
    """
    attributes = dict(span.attributes)
    if attributes.get(semconv.REDACTED) == "true":
        raise RedactedError("redacted")
    for name, more in span.events:
        if name.startswith(("gen_ai.client.inference", "gen_ai.content.")):
            attributes.update({key: value for key, value in more.items() if key.startswith("gen_ai.")})
    unreadable: UnreadableError | None = None
    for source in _SOURCES:
        try:
            result = source(SpanText(attributes, span.events), choice)
        except UnreadableError as error:
            unreadable = unreadable or error
        else:
            if result is not None and _has_reply(result):
                return result
    if unreadable is not None:
        raise unreadable
    raise NoTextError("no text")


def _has_reply(result: Dialogue) -> bool:
    """Return whether there is a reply: a span of an interrupted stream may hold an empty one."""
    return bool(result.reply if isinstance(result.reply, str) else result.reply["content"] or result.reply.get("tool_calls"))


def _gateway(span: SpanText, choice: int) -> Dialogue | None:
    return _bodies(span.attributes.get(semconv.REQUEST_JSON), span.attributes.get(semconv.RESPONSE_JSON), choice)


def _client(span: SpanText, choice: int) -> Dialogue | None:
    request, response = _json(span.attributes.get("input.value")), _json(span.attributes.get("output.value"))
    if (
        isinstance(request, dict)
        and isinstance(response, dict)
        and {"choices", "output", "content"} & cast("dict[str, Any]", response).keys()
    ):
        return dialogue(cast("dict[str, Any]", request), cast("dict[str, Any]", response), choice)
    return None


def _bodies(request: str | None, response: str | None, choice: int) -> Dialogue | None:
    if not request or not response:
        return None
    request_body, response_body = _json(request), _json(response)
    if not isinstance(request_body, dict) or not isinstance(response_body, dict):
        raise UnreadableError("request or answer is no JSON object")
    return dialogue(cast("dict[str, Any]", request_body), cast("dict[str, Any]", response_body), choice)


def _openinference(span: SpanText, choice: int) -> Dialogue | None:
    prompt = [_numbered(fields) for _, fields in _indexed(span.attributes, "llm.input_messages.")]
    replies = dict(_indexed(span.attributes, "llm.output_messages."))
    if not prompt or choice not in replies:
        return None
    tools = [tool(_json(fields.get("tool.json_schema", ""))) for _, fields in _indexed(span.attributes, "llm.tools.")]
    return Dialogue(prompt, {**_numbered(replies[choice]), "role": "assistant"}, tools, _is_cut(span.attributes, choice))


def _numbered(fields: Mapping[str, str]) -> Message:
    """Return a message from `llm.input_messages.N.`."""
    parts = [
        item.get("message_content.text") if item.get("message_content.type", "text") == "text" else None
        for _, item in _indexed(fields, "message.contents.")
        if item.get("message_content.type") not in ("tool_use", "tool_call")
    ]
    if None in parts:
        raise UnreadableError("a content is no text")
    calls = [
        {
            "id": item.get("tool_call.id"),
            "function": {"name": item.get("tool_call.function.name"), "arguments": item.get("tool_call.function.arguments", "{}")},
        }
        for _, item in _indexed(fields, "message.tool_calls.")
    ]
    content = fields.get("message.content") or "\n".join(part or "" for part in parts)
    return message(
        fields.get("message.role", "user"),
        content,
        calls,
        name=fields.get("message.name"),
        tool_call_id=fields.get("message.tool_call_id"),
    )


def _gen_ai(span: SpanText, choice: int) -> Dialogue | None:
    inputs, outputs = (_json(span.attributes.get(f"gen_ai.{name}.messages")) for name in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 <= choice < len(cast("list[Any]", outputs)):
        return None
    instructions = _json(span.attributes.get("gen_ai.system_instructions"))
    prompt = [item for given in cast("list[Any]", inputs) for item in _of_parts(given)]
    if isinstance(instructions, list):
        prompt = [*_of_parts({"role": "system", "parts": instructions}), *prompt]
    elif isinstance(instructions, str):
        prompt = [message("system", instructions), *prompt]
    answer = outputs[choice]
    tools = _json(span.attributes.get("gen_ai.tool.definitions"))
    cut = isinstance(answer, dict) and cast("dict[str, Any]", answer).get("finish_reason") in _CUT
    reply = _of_parts(answer)
    if len(reply) != 1:
        raise UnreadableError("an answer is several messages")
    return Dialogue(
        prompt, {**reply[0], "role": "assistant"}, [tool(item) for item in tools or []], cut or _is_cut(span.attributes, choice)
    )


def _of_parts(given: object) -> list[Message]:
    """Return the messages of a gen_ai message: parts of text, reasoning, tool calls and their responses."""
    if not isinstance(given, dict):
        raise UnreadableError("a message is no object")
    fields = cast("dict[str, Any]", given)
    if "parts" not in fields:
        return [chat_message(fields)]
    parts = cast("list[dict[str, Any]]", fields["parts"])
    answers = [
        message("tool", _as_text(part.get("response", part.get("result"))), tool_call_id=part.get("id"))
        for part in parts
        if part.get("type") == "tool_call_response"
    ]
    calls = [
        {"id": part.get("id"), "function": {"name": part.get("name"), "arguments": part.get("arguments")}}
        for part in parts
        if part.get("type") == "tool_call"
    ]
    known = ("text", "reasoning", "tool_call", "tool_call_response")
    if any(part.get("type") not in known for part in parts):
        raise UnreadableError("a part of a message is no text")
    texts = [str(part.get("content", "")) for part in parts if part.get("type") == "text"]
    thoughts = "\n".join(str(part.get("content", "")) for part in parts if part.get("type") == "reasoning")
    if answers and not texts and not calls:
        return answers
    return [
        *answers,
        message(str(fields.get("role", "user")), "\n".join(texts), calls, name=fields.get("name"), reasoning_content=thoughts),
    ]


def _traceloop(span: SpanText, choice: int) -> Dialogue | None:
    prompt = [_dotted(item) for _, item in _indexed(span.attributes, "gen_ai.prompt.")]
    replies = dict(_indexed(span.attributes, "gen_ai.completion."))
    if not prompt or choice not in replies:
        return None
    tools = [
        tool({**item, "parameters": _json(item.get("parameters")) or {}}) for _, item in _indexed(span.attributes, "llm.request.functions.")
    ]
    cut = replies[choice].get("finish_reason") in _CUT
    return Dialogue(prompt, {**_dotted(replies[choice]), "role": "assistant"}, tools, cut)


def _dotted(fields: Mapping[str, str]) -> Message:
    calls = [
        {"id": item.get("id"), "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")}}
        for _, item in _indexed(fields, "tool_calls.")
    ]
    content = fields.get("content", "")
    parts = _json(content) if content.startswith("[{") else None
    return message(
        fields.get("role", "user"), parts if isinstance(parts, list) else content, calls, tool_call_id=fields.get("tool_call_id")
    )


def _events(span: SpanText, choice: int) -> Dialogue | None:
    prompt: list[Message] = []
    replies: dict[int, tuple[Message, bool]] = {}
    for name, attributes in span.events:
        kind = name.removeprefix("gen_ai.").removesuffix(".message")
        if kind not in ("system", "user", "assistant", "tool", "choice"):
            continue
        body = _json(attributes.get("body") or attributes.get("gen_ai.event.content"))
        fields = {key: _loose(value) for key, value in attributes.items()} | (
            cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        )
        if isinstance(body, str):
            fields["content"] = body
        if kind == "choice":
            inner = fields.get("message")
            reply = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {"content": inner, "tool_calls": fields.get("tool_calls")}
            replies[int(fields.get("index") or 0)] = chat_message({**reply, "role": "assistant"}), fields.get("finish_reason") in _CUT
        else:
            prompt.append(chat_message({**fields, "role": kind, "tool_call_id": fields.get("id") if kind == "tool" else None}))
    if not prompt or choice not in replies:
        return None
    return Dialogue(prompt, replies[choice][0], [], replies[choice][1])


def _vercel(span: SpanText, choice: int) -> Dialogue | None:
    asked = _json(span.attributes.get("ai.prompt.messages") or span.attributes.get("ai.prompt"))
    words, calls = span.attributes.get("ai.response.text"), _json(span.attributes.get("ai.response.toolCalls"))
    if asked is None or (words is None and calls is None) or choice:
        return None
    if isinstance(asked, dict):
        fields = cast("dict[str, Any]", asked)
        given = fields.get("messages") or [{"role": "user", "content": fields.get("prompt")}]
        asked = [*([{"role": "system", "content": fields["system"]}] if fields.get("system") else []), *given]
    prompt = [item for part in cast("list[dict[str, Any]]", asked) for item in _vercel_messages(part)]
    tool_calls = [_vercel_call(call) for call in cast("list[dict[str, Any]]", calls or [])]
    return Dialogue(prompt, message("assistant", words, tool_calls), [], span.attributes.get("ai.response.finishReason") in _CUT)


def _vercel_messages(given: Mapping[str, Any]) -> list[Message]:
    content = given.get("content")
    if not isinstance(content, list):
        return [chat_message(given)]
    parts = cast("list[dict[str, Any]]", content)
    answers = [
        message("tool", _as_text(part.get("output", part.get("result"))), tool_call_id=part.get("toolCallId"))
        for part in parts
        if part.get("type") == "tool-result"
    ]
    texts = [part for part in parts if part.get("type") not in ("tool-call", "tool-result", "reasoning")]
    calls = [_vercel_call(part) for part in parts if part.get("type") == "tool-call"]
    return answers or [message(str(given.get("role")), texts, calls)]


def _vercel_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call.get("toolCallId"), "function": {"name": call.get("toolName"), "arguments": call.get("input", call.get("args"))}}


def _pairs(span: SpanText, choice: int) -> Dialogue | None:
    """Read the inputs and outputs of observability tools, in the form of any of their integrations."""
    for first, second in (*_PAIRS, ("gen_ai.prompt", "gen_ai.completion")):
        if first not in span.attributes or second not in span.attributes:
            continue
        request, response = _loose(span.attributes[first]), _loose(span.attributes[second])
        if (
            isinstance(request, dict)
            and isinstance(response, dict)
            and {"choices", "output", "content"} & cast("dict[str, Any]", response).keys()
        ):
            try:
                return dialogue(cast("dict[str, Any]", request), cast("dict[str, Any]", response), choice)
            except UnreadableError:
                pass  # a message, say, which has a content too
        prompt, tools = _prompt(request)
        reply = _reply(response, choice)
        if prompt and reply is not None:
            return Dialogue(prompt, reply, tools, _is_cut(span.attributes, choice))
    return None


def _prompt(request: object) -> tuple[list[Message], list[Tool]]:
    if isinstance(request, str):
        return [message("user", request)], []
    if isinstance(request, dict):
        fields = cast("dict[str, Any]", request)
        return _prompt(fields.get("messages") or fields.get("prompt"))[0], [tool(item) for item in fields.get("tools") or []]
    if isinstance(request, list):
        return [chat_message(item) for item in cast("list[object]", request)], []
    return [], []


def _reply(response: object, choice: int) -> Message | None:
    if isinstance(response, str):
        return message("assistant", response) if choice == 0 else None
    if isinstance(response, list):
        several = cast("list[object]", response)
        return _reply(several[choice], 0) if choice < len(several) else None
    if not isinstance(response, dict):
        return None
    fields = cast("dict[str, Any]", response)
    if isinstance(fields.get("choices"), list):
        matches = [item for place, item in enumerate(fields["choices"]) if item.get("index", place) == choice]
        return chat_message({**matches[0]["message"], "role": "assistant"}) if matches and "message" in matches[0] else None
    return chat_message({**fields, "role": "assistant"}) if choice == 0 and {"content", "tool_calls"} & fields.keys() else None


_SOURCES: tuple[Callable[[SpanText, int], Dialogue | None], ...] = (
    _gateway,
    _client,
    _openinference,
    _gen_ai,
    _traceloop,
    _events,
    _vercel,
    _pairs,
)


def _indexed(attributes: Mapping[str, str], prefix: str) -> list[tuple[int, dict[str, str]]]:
    """Return the attributes `PREFIX N.REST`, by N, in its order."""
    by_index: dict[int, dict[str, str]] = {}
    for key, value in attributes.items():
        if key.startswith(prefix) and (match := _FIRST_INDEX.fullmatch(key, len(prefix))):
            by_index.setdefault(int(match[1]), {})[match[2]] = value
    return sorted(by_index.items())


def _is_cut(attributes: Mapping[str, str], choice: int) -> bool:
    reasons = _loose(attributes.get("gen_ai.response.finish_reasons", ""))
    if isinstance(reasons, list) and choice < len(cast("list[Any]", reasons)):
        return reasons[choice] in _CUT
    return attributes.get("llm.finish_reason") in _CUT


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(written: str | None) -> Any:
    """Return the value of a JSON text; None where it is none."""
    if not written:
        return None
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _loose(written: str) -> Any:
    """Return the value of a JSON object, list or text; of anything else, the text itself."""
    value = _json(written) if written[:1] in ("{", "[", '"') else None
    return written if value is None else value
