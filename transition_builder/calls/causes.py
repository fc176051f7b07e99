"""Tool calls, and the model calls that asked for them by id: a row a tool call, however many spans record it.

Spans of one name or id directly inside each other (AutoGen's OpenInference span over its native one) are one tool call, which failed where
any of them did.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from transition_builder import dialects
from transition_builder.calls.forest import Indices, Mask, SpanForest, follow, nodes_of
from transition_builder.calls.preceding import NO_CALL
from transition_builder.schemas import ATTEMPT, SPAN

_FIRST = ["ToolCallId", "ToolArguments", "ToolResult"]


def tool_calls(nodes: pl.DataFrame, forest: SpanForest, is_call: Mask) -> pl.DataFrame:
    """Return a row a tool call, in the order of nodes: ATTEMPT, SPAN, its name, outcome and texts, Duration, Tool and Nodes."""
    is_tool = nodes["IsTool"].to_numpy()
    spans = np.flatnonzero(is_tool)
    above = forest.enclosing(is_tool | is_call | nodes["AgentName"].is_not_null().to_numpy())[spans]
    nested = np.append(is_tool, False)[above]
    about = nodes[[*ATTEMPT, *SPAN, "ToolName", "ToolFailed", *_FIRST, "Duration"]][spans]
    if not nested.any():
        return about.with_columns(Tool=spans, Nodes=pl.Series(spans[:, None], dtype=pl.List(pl.Int64)))
    inner, outer = (nodes[["ToolName", "ToolCallId"]][at[nested]] for at in (spans, above))
    same = (inner["ToolName"] == outer["ToolName"]).fill_null(False) | (inner["ToolCallId"] == outer["ToolCallId"]).fill_null(False)
    jump = np.arange(forest.size + 1)
    jump[spans[nested][same.to_numpy()]] = above[nested][same.to_numpy()]
    return (
        about.with_columns(Tool=follow(jump)[spans], Nodes=spans)
        .group_by("Tool", maintain_order=True)
        .agg(
            *(pl.col(name).filter(pl.col("Tool") == pl.col("Nodes")).first() for name in (*ATTEMPT, *SPAN, "ToolName", "Duration")),
            pl.col("ToolFailed").any(),
            *(pl.col(name).drop_nulls().first() for name in _FIRST),
            "Nodes",
        )
        .sort("Tool")
    )


def spans_of(tools: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """Return a row each span of each tool call: Tool, and SPAN of the span; `nodes` are those that Tool and Nodes number."""
    spans = tools.select("Tool", Node="Nodes").explode("Node", empty_as_null=False)
    return spans[["Tool"]].hstack(nodes[SPAN][spans["Node"]])


def asked_by_id(nodes: pl.DataFrame, tools: pl.DataFrame, events: Indices, attempt: Indices, call_of: Indices) -> Indices:
    """Return the event of the call whose response requested each tool call by its id; NO_CALL where none did.

    Of several (some servers count from 0 in each answer) the latest that came before. `events` are the tool calls' places among all events,
    `attempt` has the attempt of each event, `call_of` the event of the call that each node is part of (NO_CALL: none).
    """
    asked = np.full(tools.height, NO_CALL, dtype=np.int64)
    if tools.is_empty():
        return asked
    known = tools.select("ToolCallId", event=events, attempt=attempt[events], tool=pl.int_range(pl.len()))
    if (named := known.filter(pl.col("ToolCallId") != "")).height:
        requested = dialects.asked_tools(nodes)
        calls = requested.select("ToolCallId", call=call_of[nodes_of(requested, nodes)]).filter(pl.col("call") != NO_CALL)
        same = ["attempt", "ToolCallId"]
        calls = calls.with_columns(attempt=attempt[calls["call"].to_numpy()]).sort("call")
        # Pairs of each call with each tool call of its id would be as many as the square of their number.
        before = named.sort("event").join_asof(calls, left_on="event", right_on="call", by=same, check_sortedness=False)
        latest = before.join(calls.group_by(same).agg(latest=pl.col("call").last()), on=same)
        asked[latest["tool"].to_numpy()] = latest.select(pl.coalesce("call", "latest")).to_series().to_numpy()
    return asked
