"""Text of a call, extracted from its span: the one reader of prompts and responses in every convention.

Invariant: the first source that holds both request and response is used alone; sources are never mixed. Every text is valid Unicode.

Sources, in this order: the gateway's request and response; the bodies that instrumentations of clients keep (`input.value`,
`output.value`); OpenInference's numbered messages; gen_ai's message attributes, on the span or its event; Traceloop's numbered prompts;
gen_ai's older events and log records; the attributes of the Vercel AI SDK, Langfuse and MLflow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from spangrad import semconv
from spangrad.errors import JSON_ERRORS
from transition_builder.dialects.answers import ANSWER_ATTRIBUTES
from transition_builder.dialects.conventions import langfuse, mlflow
from transition_builder.dialects.messages import (
    CUT,
    Dialogue,
    Message,
    Tool,
    UnreadableError,
    chat_message,
    choice_index,
    dialogue,
    message,
    part_messages,
    parted_messages,
    replies,
    tool,
)

ATTRIBUTES = (
    r"^(spangrad\.(request\.json|response\.json|redacted)|(input|output)\.value|llm\.(input_messages|output_messages|tools|request\.functions)\..*"
    r"|gen_ai\.(input\.messages|output\.messages|system_instructions|tool\.definitions|response\.finish_reasons|(prompt|completion)(\..*)?)"
    r"|llm\.finish_reason|ai\.(prompt(\.messages|\.tools)?|response\.(text|toolCalls|finishReason))|langfuse\.observation\.(input|output)"
    r"|mlflow\.span(Inputs|Outputs))$"
)
"""Regular expression of the attributes that may hold a text."""
EVENTS = r"^gen_ai\.((system|user|assistant|tool)\.message|choice|content\.(prompt|completion)|client\.inference\.operation\.details)$"
"""Regular expression of the events and log records that may hold a text."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Pattern of the escape of a surrogate."""
_FIRST_INDEX = re.compile(r"(\d+)\.(.*)")
_PAIRS = (
    (semconv.OPENINFERENCE_INPUT, semconv.OPENINFERENCE_OUTPUT),
    (langfuse.INPUT, langfuse.OUTPUT),
    (mlflow.INPUTS, mlflow.OUTPUTS),
    ("gen_ai.prompt", "gen_ai.completion"),
)
RESPONSES = (semconv.RESPONSE_JSON, *ANSWER_ATTRIBUTES, "gen_ai.output.messages")
"""Attributes that may hold a whole response, without its request."""
_GEN_AI_PARTS = frozenset({"text", "reasoning", "tool_call", "tool_call_response"})


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


def response(texts: Iterable[str]) -> dict[int, tuple[str, list[tuple[str, str]]]]:
    """Return the choices of a recorded response: by their indices the text, and name and arguments of each requested tool call.

    Of `texts`, the values of RESPONSES, the first of a known form is used. Reasoning is no part of the text.
    """
    for given in texts:
        try:
            choices = {choice: _text_and_tools(reply.messages) for choice, reply in replies(_json(given)).items()}
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            continue  # its fields have other types than those of the form, or are nested too deep
        if choices and all(name for _, calls in choices.values() for name, _ in calls):
            return choices
    return {}


def _text_and_tools(messages: Sequence[Message]) -> tuple[str, list[tuple[str, str]]]:
    contents = [message["content"] for message in messages]
    texts = (content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content) for content in contents)
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return "".join(texts), [(call["name"], call["arguments"]) for call in calls]


def _gateway(span: SpanText, choice: int) -> Dialogue | None:
    request, response = span.attributes.get(semconv.REQUEST_JSON), span.attributes.get(semconv.RESPONSE_JSON)
    if not request or not response:
        return None
    bodies = _bodies(_json(request), _json(response), choice)
    if bodies is None:
        raise UnreadableError("request and answer are the bodies of no interface")
    return bodies


def _client(span: SpanText, choice: int) -> Dialogue | None:
    request, response = (_json(span.attributes.get(name)) for name in _PAIRS[0])
    return _bodies(request, response, choice)


def _bodies(request: object, response: object, choice: int) -> Dialogue | None:
    """Read the bodies of an interface; None where they are none."""
    if (
        isinstance(request, dict)
        and isinstance(response, dict)
        and {"choices", "output", "content"} & cast("dict[str, Any]", response).keys()
    ):
        return dialogue(cast("dict[str, Any]", request), cast("dict[str, Any]", response), choice)
    return None


def _openinference(span: SpanText, choice: int) -> Dialogue | None:
    prompt = [_numbered(fields) for fields in _indexed(span.attributes, "llm.input_messages.").values()]
    answers = _indexed(span.attributes, "llm.output_messages.")
    if not prompt or choice not in answers:
        return None
    tools = [tool(_json(fields.get("tool.json_schema", ""))) for fields in _indexed(span.attributes, "llm.tools.").values()]
    return Dialogue(prompt, _reply(_numbered(answers[choice])), tools, _is_cut(span.attributes, choice))


def _numbered(fields: Mapping[str, str]) -> Message:
    """Return a message from `llm.input_messages.N.`."""
    parts = [_last_names(item) for item in _indexed(fields, "message.contents.").values()]
    parts = [part for part in parts if part.get("type") not in ("tool_use", "tool_call")]
    if any(part.get("type", "text") != "text" or "text" not in part for part in parts):
        raise UnreadableError("a content is no text")
    return message(
        fields.get("message.role", "user"),
        fields.get("message.content") or "\n".join(part["text"] for part in parts),
        map(_last_names, _indexed(fields, "message.tool_calls.").values()),
        name=fields.get("message.name"),
        tool_call_id=fields.get("message.tool_call_id"),
    )


def _last_names(fields: Mapping[str, str]) -> dict[str, str]:
    """Return fields by the last parts of their names: `tool_call.function.name` is `name`."""
    return {name.rpartition(".")[2]: value for name, value in fields.items()}


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
    answer, tools = outputs[choice], _json(span.attributes.get("gen_ai.tool.definitions"))
    (reply, *others) = _of_parts(answer)
    if others:
        raise UnreadableError("an answer is several messages")
    cut = answer.get("finish_reason") in CUT or _is_cut(span.attributes, choice)
    return Dialogue(prompt, _reply(reply), [tool(item) for item in tools or []], cut)


def _of_parts(given: object) -> list[Message]:
    """Return the messages of a gen_ai message: parts of text, reasoning, tool calls and their responses."""
    if not isinstance(given, dict) or "parts" not in given:
        return [chat_message(given)]
    fields = cast("dict[str, Any]", given)
    if any(part.get("type") not in _GEN_AI_PARTS for part in fields["parts"]):
        raise UnreadableError("a part of a message is no text")
    return part_messages(str(fields.get("role", "user")), fields["parts"], fields.get("name"))


def _traceloop(span: SpanText, choice: int) -> Dialogue | None:
    prompt = [_dotted(item) for item in _indexed(span.attributes, "gen_ai.prompt.").values()]
    answers = _indexed(span.attributes, "gen_ai.completion.")
    if not prompt or choice not in answers:
        return None
    functions = _indexed(span.attributes, "llm.request.functions.").values()
    tools = [tool({**item, "parameters": _json(item.get("parameters")) or {}}) for item in functions]
    return Dialogue(prompt, _reply(_dotted(answers[choice])), tools, answers[choice].get("finish_reason") in CUT)


def _dotted(fields: Mapping[str, str]) -> Message:
    """Return a message from `gen_ai.prompt.N.`."""
    content, calls = fields.get("content", ""), _indexed(fields, "tool_calls.").values()
    parts = _json(content) if content.startswith("[{") else None
    role, answers = fields.get("role", "user"), fields.get("tool_call_id")
    return message(role, parts if isinstance(parts, list) else content, calls, tool_call_id=answers)


def _events(span: SpanText, choice: int) -> Dialogue | None:
    prompt: list[Message] = []
    answers: dict[int, tuple[Message, bool]] = {}
    for name, attributes in span.events:
        kind = name.removeprefix("gen_ai.").removesuffix(".message")
        if kind not in ("system", "user", "assistant", "tool", "choice"):
            continue
        body = _json(attributes.get("body") or attributes.get("gen_ai.event.content"))
        fields = {key: _parsed_json(value) for key, value in attributes.items()}
        fields |= cast("dict[str, Any]", body) if isinstance(body, dict) else {"content": body} if isinstance(body, str) else {}
        if kind == "choice":
            inner = fields.get("message")
            reply = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {"content": inner, "tool_calls": fields.get("tool_calls")}
            answers[choice_index(fields.get("index") or 0)] = chat_message(_reply(reply)), fields.get("finish_reason") in CUT
        else:
            prompt.append(chat_message({**fields, "role": kind, "tool_call_id": fields.get("id") if kind == "tool" else None}))
    return Dialogue(prompt, answers[choice][0], [], answers[choice][1]) if prompt and choice in answers else None


def _vercel(span: SpanText, choice: int) -> Dialogue | None:
    asked = _json(span.attributes.get("ai.prompt.messages") or span.attributes.get("ai.prompt"))
    words, calls = span.attributes.get("ai.response.text"), _json(span.attributes.get("ai.response.toolCalls"))
    if asked is None or (words is None and calls is None) or choice:
        return None
    if isinstance(asked, dict):
        fields = cast("dict[str, Any]", asked)
        given = fields.get("messages") or [{"role": "user", "content": fields.get("prompt")}]
        asked = [*([{"role": "system", "content": fields["system"]}] if fields.get("system") else []), *given]
    prompt = [item for given in cast("list[dict[str, Any]]", asked) for item in parted_messages(given)]
    offered = _json(span.attributes.get("ai.prompt.tools")) or []
    tools = [tool(_json(item) if isinstance(item, str) else item) for item in offered]
    return Dialogue(prompt, message("assistant", words, calls or []), tools, span.attributes.get("ai.response.finishReason") in CUT)


def _pairs(span: SpanText, choice: int) -> Dialogue | None:
    """Read the inputs and outputs of observability tools, in the form of any of their integrations."""
    for names in _PAIRS:
        if not all(name in span.attributes for name in names):
            continue
        request, response = (_parsed_json(span.attributes[name]) for name in names)
        try:
            if (bodies := _bodies(request, response, choice)) is not None:
                return bodies
        except UnreadableError:
            pass  # a message, say, which has a content too
        prompt, tools = _loose_prompt(request)
        reply = _loose_reply(response, choice)
        if prompt and reply is not None:
            return Dialogue(prompt, reply, tools, _is_cut(span.attributes, choice))
    return None


def _loose_prompt(request: object) -> tuple[list[Message], list[Tool]]:
    if isinstance(request, str):
        return [message("user", request)], []
    if isinstance(request, dict):
        fields = cast("dict[str, Any]", request)
        return _loose_prompt(fields.get("messages") or fields.get("prompt"))[0], [tool(item) for item in fields.get("tools") or []]
    if isinstance(request, list):
        return [chat_message(item) for item in cast("list[object]", request)], []
    return [], []


def _loose_reply(response: object, choice: int) -> Message | None:
    match response:
        case str():
            return message("assistant", response) if choice == 0 else None
        case [*several]:
            return _loose_reply(several[choice], 0) if choice < len(several) else None
        case {"choices": [*_]}:
            reply = replies(response).get(choice)
            return reply.messages[0] if reply else None
        case {"content": _} | {"tool_calls": _}:
            return chat_message(_reply(cast("dict[str, Any]", response))) if choice == 0 else None
        case _:
            return None


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


def _indexed(attributes: Mapping[str, str], prefix: str) -> dict[int, dict[str, str]]:
    """Return the attributes `PREFIX N.REST`, by N, in its order."""
    by_index: dict[int, dict[str, str]] = {}
    for key, value in attributes.items():
        if key.startswith(prefix) and (match := _FIRST_INDEX.fullmatch(key, len(prefix))):
            by_index.setdefault(int(match[1]), {})[match[2]] = value
    return dict(sorted(by_index.items()))


def _reply(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "role": "assistant"}


def _is_cut(attributes: Mapping[str, str], choice: int) -> bool:
    reasons = _parsed_json(attributes.get("gen_ai.response.finish_reasons", ""))
    if isinstance(reasons, list) and choice < len(cast("list[Any]", reasons)):
        return reasons[choice] in CUT
    return attributes.get("llm.finish_reason") in CUT


def _json(written: str | None) -> Any:
    """Return the value of a JSON text, with U+FFFD for each surrogate without its other half; None where it is none."""
    try:
        value = json.loads(written) if written else None
        if written and _SURROGATE.search(written):
            # Agents cut texts inside a pair: JSON holds a half of one as an escape, and UTF-8 has no place for it.
            plain = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            value = json.loads(plain)
        return value
    except JSON_ERRORS:
        return None


def _parsed_json(written: str) -> Any:
    """Return the value of a JSON object, list or text; of anything else, the text itself."""
    value = _json(written) if written[:1] in ("{", "[", '"') else None
    return written if value is None else value
