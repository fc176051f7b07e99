"""Texts of calls, read from their spans: a span that was delivered twice is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from spangrad.store.clickhouse import constant, store_errors
from transition_builder.dialects.messages import Dialogue, UnreadableError
from transition_builder.dialects.texts import ATTRIBUTES, EVENTS, NoTextError, RedactedError, SpanText, read
from transition_builder.export.tally import LeftOut

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_SPANS_A_QUERY = 100
_SLACK_NS = 1_000_000_000
_LOG_SLACK_NS = 3_600_000_000_000
"""Longest time between the start of a span and a log record on it, in nanoseconds."""

_QUERY = """
WITH {traces} AS traces, {spans} AS spans
SELECT TraceId, SpanId, mapFilter((k, v) -> match(k, {attributes}), SpanAttributes) AS Attributes,
    arrayFilter(name -> match(name, {events}), Events.Name) AS Names,
    arrayFilter((one, name) -> match(name, {events}), Events.Attributes, Events.Name) AS Bodies
FROM otel.otel_traces
PREWHERE Timestamp BETWEEN fromUnixTimestamp64Nano({first}) AND fromUnixTimestamp64Nano({last}) AND TraceId IN traces AND SpanId IN spans
LIMIT 1 BY TraceId, SpanId
"""
_LOGS = """
WITH {traces} AS traces, {spans} AS spans
SELECT TraceId, SpanId, if(EventName != '', EventName, LogAttributes['event.name']) AS Name, LogAttributes, Body
FROM otel.otel_logs
PREWHERE Timestamp BETWEEN fromUnixTimestamp64Nano({first}) AND fromUnixTimestamp64Nano({last}) AND TraceId IN traces AND SpanId IN spans
WHERE match(Name, {events})
ORDER BY Timestamp, Name != 'gen_ai.system.message', Name = 'gen_ai.choice'
"""

_Key = tuple[str, str]


def read_dialogues(client: Client, url: str, calls: Sequence[Mapping[str, Any]]) -> list[Dialogue | LeftOut]:
    """Return the dialogue of each call, in their order."""
    ordered = sorted({(_time(call), call["TraceId"], call["SpanId"]) for call in calls})
    contents: dict[_Key, SpanText] = {}
    for start in range(0, len(ordered), _SPANS_A_QUERY):
        contents |= _read(client, url, ordered[start : start + _SPANS_A_QUERY])
    return [_dialogue(contents.get((call["TraceId"], call["SpanId"])), call["Choice"]) for call in calls]


def _dialogue(span: SpanText | None, choice: int) -> Dialogue | LeftOut:
    if span is None:
        return LeftOut.NO_TEXT
    try:
        return read(span, choice)
    except RedactedError:
        return LeftOut.REDACTED_TEXT
    except NoTextError:
        return LeftOut.NO_TEXT
    except UnreadableError:
        return LeftOut.UNREADABLE_TEXT
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        # Spans of other senders may hold anything.
        return LeftOut.UNREADABLE_TEXT


def _read(client: Client, url: str, spans: Sequence[tuple[int, str, str]]) -> dict[_Key, SpanText]:
    def filled(query: str, among: Sequence[tuple[int, str, str]], slack: int) -> str:
        return query.format(
            traces=constant(dict.fromkeys(trace for _, trace, _ in among)),
            spans=constant(dict.fromkeys(span for _, _, span in among)),
            attributes=_regular(ATTRIBUTES),
            events=_regular(EVENTS),
            first=among[0][0] - _SLACK_NS,
            last=among[-1][0] + slack,
        )

    with store_errors(url):
        rows = client.query(filled(_QUERY, spans, _SLACK_NS)).result_rows
    contents = {(row[0], row[1]): SpanText(row[2], list(zip(row[3], row[4], strict=True))) for row in rows}
    # Texts that no attribute holds may be in log records.
    silent = [
        (start, trace, span)
        for start, trace, span in spans
        if (trace, span) in contents and not contents[trace, span].attributes and not contents[trace, span].events
    ]
    if silent:
        with store_errors(url):
            logs = client.query(filled(_LOGS, silent, _LOG_SLACK_NS)).result_rows
        events: dict[_Key, list[tuple[str, Mapping[str, str]]]] = {}
        for trace, span, name, attributes, body in logs:
            events.setdefault((trace, span), []).append((name, {**attributes, "body": body}))
        contents |= {key: SpanText({}, span_events) for key, span_events in events.items() if key in contents}
    return contents


def _time(call: Mapping[str, Any]) -> int:
    """Return the start of the call's span: nanoseconds since 1970, to a microsecond."""
    time: datetime = call["Timestamp"]
    return int(time.timestamp() * 1_000_000) * 1000


def _regular(expression: str) -> str:
    """Return a regular expression as a SQL literal."""
    return "unhex('" + expression.encode().hex() + "')"
