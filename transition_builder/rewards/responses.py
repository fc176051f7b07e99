"""Responses of calls, as text: read from their spans, and only when a rule needs them.

In: the recorded responses of the calls' spans: `spangrad.response.json` of the gateway's spans, `output.value` or
`gen_ai.output.messages` of a client's. Out: RESPONSES. Invariant: a response that is not recorded, or that is of no known form, has no row;
it is never read as an empty one. Reasoning is no part of the text.

Forms: OpenAI's chat, completions and responses, Anthropic's messages, and OpenTelemetry's output messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import polars as pl

from spangrad import semconv
from spangrad.settings import BuilderSettings
from spangrad.store.clickhouse import LONG, store_errors
from transition_builder.dialects.conventions.gateway import IS_GATEWAY
from transition_builder.frames import empty
from transition_builder.rewards.rules import columns
from transition_builder.schemas import RESPONSES, SPAN
from transition_builder.source.queries import span_constants

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_SPANS_A_QUERY = 500
_PLACES = (semconv.RESPONSE_JSON, semconv.OPENINFERENCE_OUTPUT, "gen_ai.output.messages")
"""Attributes that may hold a whole response."""
_SQL = f"""
SELECT TraceId, SpanId, {", ".join(f"SpanAttributes['{place}'] AS place_{at}" for at, place in enumerate(_PLACES))}
FROM otel.otel_traces
WHERE ServiceName IN {{services}} AND SpanName IN {{names}} AND TraceId IN {{traces}} AND SpanId IN {{spans}}
    AND Timestamp BETWEEN fromUnixTimestamp64Nano({{first}}) AND fromUnixTimestamp64Nano({{last}})
LIMIT 1 BY TraceId, SpanId
"""

ToolCall = tuple[str, str]
"""Name and arguments of a tool call that a response requested."""
Response = tuple[int, str, list[ToolCall]]
"""Choice of a response: its number, its text, and the tool calls that it requested."""


def read(client: Client, url: str, spec: BuilderSettings, spans: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Read the responses of the calls among some spans.

    Args:
        client: of the store.
        url: the store's, for errors.
        spec: nothing is read where none of its rules needs it.
        spans: SPANS.
        answers: ANSWERS: the spans of calls that the gateway did not record.

    Returns:
        RESPONSES.

    Raises:
        StoreError: the store does not answer, or refuses.
    """
    if columns.ANSWERS.isdisjoint(columns.used(spec)):
        return empty(RESPONSES)
    call_spans = spans.filter((pl.col("RowKind") == "span") & (IS_GATEWAY | _among(answers))).unique(SPAN, maintain_order=True)
    rows = list[dict[str, Any]]()
    for batch in call_spans.sort("Timestamp").iter_slices(_SPANS_A_QUERY):
        with store_errors(url):
            rows_read = client.query(_SQL.format(**span_constants(batch)), settings=LONG).result_rows
        for trace, span, *texts in rows_read:
            response = next(filter(None, (parse(text) for text in texts if text)), [])
            rows += ({"TraceId": trace, "SpanId": span, **_row(choice)} for choice in response)
    return pl.DataFrame(rows, schema=dict(RESPONSES))


def parse(text: str) -> list[Response]:
    """Parse a recorded response: a row a choice. Empty where it is of no known form.

    Args:
        text: a response's JSON.
    """
    try:
        answer: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []
    try:
        return list(_choices(answer))
    except (TypeError, AttributeError, ValueError, KeyError):
        return []  # its fields have other types than those of the form


def _choices(answer: Any) -> Iterator[Response]:
    match answer:
        case {"choices": [*choices]}:
            for at, choice in enumerate(choices):
                message = choice.get("message") or {"content": choice.get("text")}
                calls = [call["function"] for call in message.get("tool_calls") or ()]
                calls += [message["function_call"]] if message.get("function_call") else []
                yield int(choice.get("index", at)), _text(message.get("content")), [_call(call, "arguments") for call in calls]
        case {"output": [*items]}:
            texts = [_text(item.get("content")) for item in items if item.get("type") == "message"]
            yield 0, "".join(texts), [_call(item, "arguments") for item in items if item.get("type") == "function_call"]
        case {"content": [*blocks]}:
            # The gateway keeps the unread input of a call that was cut.
            calls = [
                _call(block, "partial_json" if "partial_json" in block else "input") for block in blocks if block.get("type") == "tool_use"
            ]
            yield 0, _text(blocks), calls
        case [{"parts": [*_]}, *_]:
            for at, message in enumerate(answer):
                parts = message["parts"]
                yield at, _text(parts), [_call(part, "arguments") for part in parts if part.get("type") == "tool_call"]
        case _:
            return


def _text(content: object) -> str:
    """Return a message's content as text: a text, or the text among its parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(part.get("text") or part.get("content") or "" for part in parts if part.get("type") in ("text", "output_text"))


def _call(call: Mapping[str, Any], field: str) -> ToolCall:
    arguments = call.get(field)
    return str(call["name"]), arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _row(response: Response) -> dict[str, object]:
    choice, text, calls = response
    return {"Choice": choice, "Text": text, "ToolCalls": [{"Name": name, "Arguments": arguments} for name, arguments in calls]}


def _among(answers: pl.DataFrame) -> pl.Expr:
    return pl.struct(SPAN).is_in(answers.select(pl.struct(SPAN)).to_series().implode())
