"""Columns of a call that `expression` and `python` rules may use, and the subset that a specification uses.

Invariant: data that needs a query to the store is read only where a rule uses it.
"""

from __future__ import annotations

import polars as pl

from spangrad.settings import AirRule, BuilderSettings
from transition_builder.schemas import TOOL_EVENTS, TOOL_LOGS, Schema

IDENTITY: Schema = {"RunId": pl.String(), "RolloutId": pl.String(), "Attempt": pl.UInt16(), "CallId": pl.String()}
"""Identity of a call, which a `python` rule's function gets beside the columns."""

COLUMNS: Schema = {
    "AgentName": pl.String(),
    "Policy": pl.String(),
    "Version": pl.UInt64(),
    "Model": pl.String(),
    "FinishReason": pl.String(),
    "Temperature": pl.Float64(),
    "Place": pl.Int64(),
    "Calls": pl.Int64(),
    "PromptTokens": pl.Int64(),
    "ResponseTokens": pl.Int64(),
    "Seconds": pl.Float64(),
    "Text": pl.String(),
    "AskedTools": pl.List(pl.String()),
    "Tools": pl.List(pl.String()),
    "FailedTools": pl.Int64(),
    "ToolExceptionTypes": pl.List(pl.String()),
    "ToolEventNames": pl.List(pl.String()),
    "ToolEvents": pl.List(pl.Struct({"Tool": pl.String(), "Name": TOOL_EVENTS["Name"], "Attributes": TOOL_EVENTS["Attributes"]})),
    "ToolLogSeverity": pl.Int64(),
    "ToolLogBodies": pl.List(pl.String()),
    "ToolLogs": pl.List(
        pl.Struct({"Tool": pl.String(), **{name: TOOL_LOGS[name] for name in ("Severity", "Body", "Attributes")}}),
    ),
}
"""Columns of a call. Place: among the calls of its attempt, from 0; Calls: how many there are. Text and AskedTools (the names of the tools
that its response requested) are null where the response was not recorded. Tools, FailedTools and the rest are of the tools that it caused
to run: ToolExceptionTypes has each type once a tool call; ToolLogSeverity is the highest, null where there is no log record."""

ANSWERS = frozenset({"Text", "AskedTools"})
"""Columns made from calls' responses."""
EVENTS = frozenset({"ToolExceptionTypes", "ToolEventNames", "ToolEvents"})
"""Columns made from the events of tools' spans."""
LOGS = frozenset({"ToolExceptionTypes", "ToolLogSeverity", "ToolLogBodies", "ToolLogs"})
"""Columns made from the log records of tools' spans."""
_OF_KINDS = {
    "malformed_arguments": ANSWERS,
    "repeated_call": ANSWERS,
    "unparsable_output": ANSWERS,
    "tool_exception": frozenset({"ToolExceptionTypes"}),
}


def used(spec: BuilderSettings) -> frozenset[str]:
    """Return the columns that the rules of a specification use."""
    return frozenset().union(*map(_used, spec.rules))


def _used(rule: AirRule) -> frozenset[str]:
    match rule.kind:
        case "expression":
            return frozenset(pl.sql_expr(rule.where or "").meta.root_names())
        case "python":
            return frozenset(COLUMNS if rule.columns is None else rule.columns)
        case _:
            return _OF_KINDS.get(rule.kind, frozenset())
