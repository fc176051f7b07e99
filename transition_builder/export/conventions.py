"""The text of a call, out of what its span holds.

In: a span's attributes and events, as otel.otel_traces has them, and log records on it. Out: a `Dialogue`. Invariant: the first source that
holds both question and answer is taken whole; sources are never mixed.

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
"""Regular expression of the events, and log records, that may."""

_FIRST_INDEX = re.compile(r"(\d+)\.(.*)")
_CUT = frozenset({"length", "max_tokens", "incomplete"})
_PAIRS = (
    ("input.value", "output.value"),
    ("langfuse.observation.input", "langfuse.observation.output"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
)


class RedactedError(ValueError):
    """A rule of the gateway took something out of the text."""


class NoTextError(ValueError):
    """No source holds both question and answer."""


@dataclass(frozen=True, slots=True)
class SpanText:
    """What a span, its events and the log records on it hold."""

    attributes: Mapping[str, str]
    events: Sequence[tuple[str, Mapping[str, str]]] = ()
    """In order; a log record's body is its attribute `body`."""


def read(span: SpanText, choice: int) -> Dialogue:
    """The dialogue of one choice of a call.

    Raises:
        RedactedError: something was taken out of it.
        NoTextError: nothing holds it.
        UnreadableError: what holds it is in no form that is known here.
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
            found = source(SpanText(attributes, span.events), choice)
        except UnreadableError as error:
            unreadable = unreadable or error
        else:
            if found is not None and _says(found):
                return found
    if unreadable is not None:
        raise unreadable
    raise NoTextError("no text")


def _says(found: Dialogue) -> bool:
    """Whether there is a reply: a span of a stream that was cut may hold an empty one."""
    return bool(found.reply if isinstance(found.reply, str) else found.reply["content"] or found.reply.get("tool_calls"))


def _gateway(span: SpanText, choice: int) -> Dialogue | None:
    return _bodies(span.attributes.get(semconv.REQUEST_JSON), span.attributes.get(semconv.RESPONSE_JSON), choice)


def _client(span: SpanText, choice: int) -> Dialogue | None:
    asked, said = _json(span.attributes.get("input.value")), _json(span.attributes.get("output.value"))
    if isinstance(asked, dict) and isinstance(said, dict) and {"choices", "output", "content"} & cast("dict[str, Any]", said).keys():
        return dialogue(cast("dict[str, Any]", asked), cast("dict[str, Any]", said), choice)
    return None


def _bodies(request: str | None, answer: str | None, choice: int) -> Dialogue | None:
    if not request or not answer:
        return None
    asked, said = _json(request), _json(answer)
    if not isinstance(asked, dict) or not isinstance(said, dict):
        raise UnreadableError("request or answer is no JSON object")
    return dialogue(cast("dict[str, Any]", asked), cast("dict[str, Any]", said), choice)


def _openinference(span: SpanText, choice: int) -> Dialogue | None:
    asked = [_numbered(one) for _, one in _indexed(span.attributes, "llm.input_messages.")]
    said = dict(_indexed(span.attributes, "llm.output_messages."))
    if not asked or choice not in said:
        return None
    tools = [tool(_json(one.get("tool.json_schema", ""))) for _, one in _indexed(span.attributes, "llm.tools.")]
    return Dialogue(asked, {**_numbered(said[choice]), "role": "assistant"}, tools, _is_cut(span.attributes, choice))


def _numbered(fields: Mapping[str, str]) -> Message:
    """A message of `llm.input_messages.N.`."""
    parts = [
        one.get("message_content.text") if one.get("message_content.type", "text") == "text" else None
        for _, one in _indexed(fields, "message.contents.")
        if one.get("message_content.type") not in ("tool_use", "tool_call")
    ]
    if None in parts:
        raise UnreadableError("a content is no text")
    calls = [
        {
            "id": one.get("tool_call.id"),
            "function": {"name": one.get("tool_call.function.name"), "arguments": one.get("tool_call.function.arguments", "{}")},
        }
        for _, one in _indexed(fields, "message.tool_calls.")
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
    asked, said = (_json(span.attributes.get(f"gen_ai.{name}.messages")) for name in ("input", "output"))
    if not isinstance(asked, list) or not isinstance(said, list) or not 0 <= choice < len(cast("list[Any]", said)):
        return None
    instructions = _json(span.attributes.get("gen_ai.system_instructions"))
    prompt = [one for given in cast("list[Any]", asked) for one in _of_parts(given)]
    if isinstance(instructions, list):
        prompt = [*_of_parts({"role": "system", "parts": instructions}), *prompt]
    elif isinstance(instructions, str):
        prompt = [message("system", instructions), *prompt]
    answer = said[choice]
    tools = _json(span.attributes.get("gen_ai.tool.definitions"))
    cut = isinstance(answer, dict) and cast("dict[str, Any]", answer).get("finish_reason") in _CUT
    reply = _of_parts(answer)
    if len(reply) != 1:
        raise UnreadableError("an answer is several messages")
    return Dialogue(prompt, {**reply[0], "role": "assistant"}, [tool(one) for one in tools or []], cut or _is_cut(span.attributes, choice))


def _of_parts(given: object) -> list[Message]:
    """A message of gen_ai's: parts of text, reasoning, tool calls and their responses."""
    if not isinstance(given, dict):
        raise UnreadableError("a message is no object")
    one = cast("dict[str, Any]", given)
    if "parts" not in one:
        return [chat_message(one)]
    parts = cast("list[dict[str, Any]]", one["parts"])
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
    return [*answers, message(str(one.get("role", "user")), "\n".join(texts), calls, name=one.get("name"), reasoning_content=thoughts)]


def _traceloop(span: SpanText, choice: int) -> Dialogue | None:
    asked = [_dotted(one) for _, one in _indexed(span.attributes, "gen_ai.prompt.")]
    said = dict(_indexed(span.attributes, "gen_ai.completion."))
    if not asked or choice not in said:
        return None
    tools = [
        tool({**one, "parameters": _json(one.get("parameters")) or {}}) for _, one in _indexed(span.attributes, "llm.request.functions.")
    ]
    cut = said[choice].get("finish_reason") in _CUT
    return Dialogue(asked, {**_dotted(said[choice]), "role": "assistant"}, tools, cut)


def _dotted(fields: Mapping[str, str]) -> Message:
    calls = [
        {"id": one.get("id"), "function": {"name": one.get("name"), "arguments": one.get("arguments", "{}")}}
        for _, one in _indexed(fields, "tool_calls.")
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
            said = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {"content": inner, "tool_calls": fields.get("tool_calls")}
            replies[int(fields.get("index") or 0)] = chat_message({**said, "role": "assistant"}), fields.get("finish_reason") in _CUT
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
    prompt = [one for part in cast("list[dict[str, Any]]", asked) for one in _vercel_messages(part)]
    made = [_vercel_call(call) for call in cast("list[dict[str, Any]]", calls or [])]
    return Dialogue(prompt, message("assistant", words, made), [], span.attributes.get("ai.response.finishReason") in _CUT)


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
    """What observability tools keep as input and output, in whatever form their integrations gave."""
    for first, second in (*_PAIRS, ("gen_ai.prompt", "gen_ai.completion")):
        if first not in span.attributes or second not in span.attributes:
            continue
        asked, said = _loose(span.attributes[first]), _loose(span.attributes[second])
        if isinstance(asked, dict) and isinstance(said, dict) and {"choices", "output", "content"} & cast("dict[str, Any]", said).keys():
            try:
                return dialogue(cast("dict[str, Any]", asked), cast("dict[str, Any]", said), choice)
            except UnreadableError:
                pass  # a message, say, which has a content too
        prompt, tools = _prompt(asked)
        reply = _reply(said, choice)
        if prompt and reply is not None:
            return Dialogue(prompt, reply, tools, _is_cut(span.attributes, choice))
    return None


def _prompt(asked: object) -> tuple[list[Message], list[Tool]]:
    if isinstance(asked, str):
        return [message("user", asked)], []
    if isinstance(asked, dict):
        fields = cast("dict[str, Any]", asked)
        return _prompt(fields.get("messages") or fields.get("prompt"))[0], [tool(one) for one in fields.get("tools") or []]
    if isinstance(asked, list):
        return [chat_message(one) for one in cast("list[object]", asked)], []
    return [], []


def _reply(said: object, choice: int) -> Message | None:
    if isinstance(said, str):
        return message("assistant", said) if choice == 0 else None
    if isinstance(said, list):
        several = cast("list[object]", said)
        return _reply(several[choice], 0) if choice < len(several) else None
    if not isinstance(said, dict):
        return None
    fields = cast("dict[str, Any]", said)
    if isinstance(fields.get("choices"), list):
        found = [one for place, one in enumerate(fields["choices"]) if one.get("index", place) == choice]
        return chat_message({**found[0]["message"], "role": "assistant"}) if found and "message" in found[0] else None
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
    """Attributes `PREFIX N.REST`, by N, in its order."""
    found: dict[int, dict[str, str]] = {}
    for key, value in attributes.items():
        if key.startswith(prefix) and (match := _FIRST_INDEX.fullmatch(key, len(prefix))):
            found.setdefault(int(match[1]), {})[match[2]] = value
    return sorted(found.items())


def _is_cut(attributes: Mapping[str, str], choice: int) -> bool:
    reasons = _loose(attributes.get("gen_ai.response.finish_reasons", ""))
    if isinstance(reasons, list) and choice < len(cast("list[Any]", reasons)):
        return reasons[choice] in _CUT
    return attributes.get("llm.finish_reason") in _CUT


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(written: str | None) -> Any:
    """The value of a JSON text; None where it is none."""
    if not written:
        return None
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _loose(written: str) -> Any:
    """The value of a JSON object, list or text; of anything else, the text itself."""
    value = _json(written) if written[:1] in ("{", "[", '"') else None
    return written if value is None else value
