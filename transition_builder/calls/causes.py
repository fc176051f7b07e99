"""Causes of tool calls: the model call that led to each.

In: described spans, their forest, and the calls of all attempts. Out: a row a tool call, with the call that caused it. Invariant:
every tool call is one row, however many spans record it; one without a cause names no call.

Spans of one name directly inside each other (AutoGen's OpenInference span over its native one) are one tool call: it failed where
any of them did. The cause is the call whose response requested that tool call id, where both spans name it: of several (some servers
count from 0 in each answer) the latest that came before. Else it is the call that came before, as `before` defines it.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from transition_builder import dialects
from transition_builder.calls.before import NO_CALL
from transition_builder.calls.lineage import Forest, Indices, Mask
from transition_builder.schemas import ATTEMPT, SPAN

_FIRST = ["ToolCallId", "ToolArguments", "ToolResult"]


def tool_spans(nodes: pl.DataFrame, tree: Forest, call_like: Mask) -> tuple[Indices, Indices]:
    """Return the outermost spans of tool calls, and for every tool span, in order of nodes, the outermost one of its tool call."""
    is_tool = nodes["IsTool"].to_numpy()
    spans = np.flatnonzero(is_tool)
    if not len(spans):
        return spans, spans
    stops = is_tool | call_like | nodes["AgentName"].is_not_null().to_numpy()
    above = tree.nearest(stops)[tree.parent[spans]]
    nested = np.flatnonzero(np.append(is_tool, False)[above])
    outer = np.arange(tree.size + 1)
    if len(nested):
        facts = nodes.select("ToolName", "ToolCallId")
        inside, outside = facts[spans[nested]], facts[above[nested]]
        same = (inside["ToolName"] == outside["ToolName"]) | (inside["ToolCallId"] == outside["ToolCallId"]).fill_null(False)
        same_tool = nested[same.fill_null(False).to_numpy()]
        outer[spans[same_tool]] = above[same_tool]
        while not np.array_equal(further := outer[outer], outer):
            outer = further
    return np.unique(outer[spans]), outer[spans]


def facts(nodes: pl.DataFrame, tools: Indices, outer: Indices) -> pl.DataFrame:
    """Return the attributes of each tool call, a row for each of `tools` (see `tool_spans`), in their order."""
    about = nodes.select(*ATTEMPT, *SPAN, "ToolName", "ToolFailed", *_FIRST, "Duration", "IsTool")
    if len(tools) == len(outer):
        return (
            about[tools]
            .drop("IsTool")
            .with_columns(Tool=pl.Series(tools, dtype=pl.Int64), Nodes=pl.Series(tools[:, None], dtype=pl.List(pl.Int64)))
        )
    spans = about.with_columns(Nodes=pl.int_range(pl.len())).filter("IsTool").with_columns(Tool=pl.Series(outer, dtype=pl.Int64))
    merged = spans.group_by("Tool", maintain_order=True).agg(
        pl.col("ToolFailed").any(), *(pl.col(name).drop_nulls().first() for name in _FIRST), "Nodes"
    )
    of_outer = about[tools].drop("ToolFailed", *_FIRST, "IsTool").with_columns(Tool=pl.Series(tools, dtype=pl.Int64))
    return of_outer.join(merged, on="Tool", how="left", maintain_order="left")


def asked(nodes: pl.DataFrame, tools: pl.DataFrame, attempt: Indices, until: Indices, row_of: Indices, attempt_of: Indices) -> Indices:
    """Return the row of the call whose response requested each tool call by its id; NO_CALL where none did.

    Args:
        nodes: described spans.
        tools: `facts` of the tool calls.
        attempt: the number of each tool call's attempt.
        until: how many calls may have come before each tool call.
        row_of: the call that each node is part of, NO_CALL where of none.
        attempt_of: the number of each call's attempt.
    """
    requesting_call = np.full(tools.height, NO_CALL, dtype=np.int64)
    named = tools.select("ToolCallId", tool=pl.int_range(pl.len(), dtype=pl.Int64), attempt=attempt).filter(
        pl.col("ToolCallId").fill_null("") != ""
    )
    if named.is_empty():
        return requesting_call
    index = nodes.select(SPAN).with_row_index("node")
    node = pl.col("node").cast(pl.Int64)
    requested = dialects.asked_tools(nodes).join(index, on=SPAN).select("ToolCallId", node)
    row = row_of[requested["node"].to_numpy()]
    known = row != NO_CALL
    calls = requested.filter(pl.Series(known)).select("ToolCallId", row=row[known], attempt=attempt_of[row[known]])
    pairs = named.join(calls, on=["attempt", "ToolCallId"])
    tool, call = pairs["tool"].to_numpy(), pairs["row"].to_numpy()
    best = np.lexsort((call, call < until[tool]))
    requesting_call[tool[best]] = call[best]
    return requesting_call
