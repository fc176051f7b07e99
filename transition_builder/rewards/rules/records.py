"""Records of tools: exceptions, events of their spans, log records; a record of any span of a tool call is the tool call's, once."""

from __future__ import annotations

import polars as pl

from spangrad import semconv
from transition_builder.dialects.reading import attribute
from transition_builder.schemas import SPAN, TOOL_EVENTS, TOOL_LOGS, Schema

_EVENT = ["Name", "Attributes"]
_LOG = ["Severity", "Body", "Attributes"]

RECORDS: Schema = {
    "ExceptionTypes": pl.List(pl.String()),
    "Events": pl.List(pl.Struct({name: TOOL_EVENTS[name] for name in _EVENT})),
    "Logs": pl.List(pl.Struct({name: TOOL_LOGS[name] for name in _LOG})),
}
"""Records of a tool call; lists are empty where there are none. ExceptionTypes: each once, of `exception` events and of log records; where
neither names one, `error.type` of the tool's spans."""


def with_records(tools: pl.DataFrame, nodes: pl.DataFrame, events: pl.DataFrame, logs: pl.DataFrame) -> pl.DataFrame:
    """Add the columns of RECORDS to tool calls.

    Args:
        tools: rows of `causes`, with Tool and Nodes.
        nodes: the described spans that Nodes number.
        events: TOOL_EVENTS.
        logs: TOOL_LOGS.
    """
    spans = tools.select("Tool", Node="Nodes").explode("Node", empty_as_null=False)
    facts = nodes.select(*SPAN, ErrorType=attribute(semconv.ERROR_TYPE))[spans["Node"]]
    spans = spans.select("Tool").hstack(facts)
    of_events = spans.join(events, on=SPAN, maintain_order="left_right")
    of_logs = spans.join(logs, on=SPAN, maintain_order="left_right")
    recorded = pl.concat([rows.select("Tool", "ExceptionType") for rows in (of_events, of_logs)]).filter(pl.col("ExceptionType") != "")
    reported = spans.select("Tool", ExceptionType="ErrorType").filter(pl.col("ExceptionType").fill_null("") != "")
    types = pl.concat([recorded, reported.join(recorded, on="Tool", how="anti", maintain_order="left")])
    parts = (
        types.group_by("Tool", maintain_order=True).agg(ExceptionTypes=pl.col("ExceptionType").unique(maintain_order=True)),
        of_events.group_by("Tool", maintain_order=True).agg(Events=pl.struct(_EVENT)),
        of_logs.group_by("Tool", maintain_order=True).agg(Logs=pl.struct(_LOG)),
    )
    whole = tools
    for part in parts:
        whole = whole.join(part, on="Tool", how="left", maintain_order="left")
    return whole.with_columns(pl.col(name).fill_null([]).cast(dtype) for name, dtype in RECORDS.items())
