"""Span events and log records of tools: read from the store, and only when a rule needs them.

Invariant: a span or a log record that was delivered twice counts once; only records of tools' spans are read.

A log record belongs to a tool when it names one of the tool's spans, and was written at most `_SLACK` before or after any of the
requested ones. Nothing waits for log records: those that have not arrived when a rollout is built are ignored.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import polars as pl

from spangrad.settings import BuilderSettings
from spangrad.store.clickhouse import KEYS_A_STATEMENT
from transition_builder import dialects
from transition_builder.frames import concat, empty
from transition_builder.rewards.rules import columns
from transition_builder.schemas import SPAN, TOOL_EVENTS, TOOL_LOGS
from transition_builder.source.queries import span_constants

if TYPE_CHECKING:
    from transition_builder.source.queries import StoreReader

CHARACTERS = 4096
"""Characters of a value or a body that are read, at most."""
RECORDS = 1000
"""Events, or log records, of a span that are read, at most: the first ones."""
_SLACK = timedelta(minutes=5)
_CUT = f"substringUTF8(value, 1, {CHARACTERS})"
_ATTRIBUTES = f"arrayMap((key, value) -> CAST((key, {_CUT}), 'Tuple(Key String, Value String)'), mapKeys({{map}}), mapValues({{map}}))"
_EVENTS = f"""
SELECT TraceId, SpanId, toString(name) AS Name, if(Name = 'exception', event_map['exception.type'], '') AS ExceptionType,
    {_ATTRIBUTES.format(map="event_map")} AS Attributes
FROM (
    SELECT TraceId, SpanId, arraySlice(Events.Name, 1, {RECORDS}) AS names, arraySlice(Events.Attributes, 1, {RECORDS}) AS maps
    FROM otel.otel_traces
    WHERE ServiceName IN {{services}} AND SpanName IN {{names}} AND TraceId IN {{traces}} AND SpanId IN {{spans}}
        AND Timestamp BETWEEN fromUnixTimestamp64Nano({{first}}) AND fromUnixTimestamp64Nano({{last}}) AND notEmpty(Events.Name)
    LIMIT 1 BY TraceId, SpanId
)
ARRAY JOIN names AS name, maps AS event_map
SETTINGS max_threads = 1
"""
_LOGS = f"""
SELECT TraceId, SpanId, toInt64(SeverityNumber) AS Severity, substringUTF8(Body, 1, {CHARACTERS}) AS Body,
    LogAttributes['exception.type'] AS ExceptionType, {_ATTRIBUTES.format(map="LogAttributes")} AS Attributes
FROM (
    SELECT TraceId, SpanId, Timestamp, SeverityNumber, Body, LogAttributes FROM otel.otel_logs
    WHERE TraceId IN {{traces}} AND SpanId IN {{spans}}
        AND Timestamp BETWEEN fromUnixTimestamp64Nano({{first}}) AND fromUnixTimestamp64Nano({{last}})
    LIMIT 1 BY TraceId, SpanId, Timestamp, SeverityNumber, Body, mapKeys(LogAttributes), mapValues(LogAttributes)
)
ORDER BY TraceId, SpanId, Timestamp
LIMIT {RECORDS} BY TraceId, SpanId
SETTINGS max_threads = 1
"""


def read(reader: StoreReader, spec: BuilderSettings, spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read TOOL_EVENTS and TOOL_LOGS of the tools among SPANS, as far as the rules of a specification need them.

    Raises:
        StoreError: the store does not answer, or refuses.
    """
    used = columns.used(spec)
    events, logs = not columns.EVENTS.isdisjoint(used), not columns.LOGS.isdisjoint(used)
    if not (events or logs):
        return empty(TOOL_EVENTS), empty(TOOL_LOGS)
    statements = list(_tools(spans).iter_slices(KEYS_A_STATEMENT))
    return (
        concat((reader.frame(_EVENTS.format(**span_constants(batch))) for batch in statements) if events else (), TOOL_EVENTS),
        concat((reader.frame(_LOGS.format(**_log_constants(batch))) for batch in statements) if logs else (), TOOL_LOGS),
    )


def _tools(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans of tools, of any convention, each once."""
    once = spans.filter(pl.col("RowKind") == "span").unique(SPAN, keep="first", maintain_order=True)
    return dialects.describe(once).filter("IsTool")[[*SPAN, "Timestamp", "Duration", "ServiceName", "SpanName"]].sort("Timestamp")


def _log_constants(tools: pl.DataFrame) -> dict[str, object]:
    ends = tools.select((pl.col("Timestamp").dt.epoch("ns") + pl.col("Duration").cast(pl.Int64)).max()).item()
    slack = int(_SLACK.total_seconds()) * 10**9
    constants = dict(span_constants(tools))
    return constants | {"first": max(0, constants["first"] - slack), "last": ends + slack}  # type: ignore[operator]
