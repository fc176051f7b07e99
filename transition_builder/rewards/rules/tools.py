"""Rules about tools that ran: `tool_ok`, `tool_error`, `tool_exception`, `empty_result`. A finding is of the call that caused the tool."""

from __future__ import annotations

import polars as pl

from spangrad.settings import AirRule
from transition_builder.rewards.rules.rule_input import RuleInput

EVERY = ("*",)
_EMPTY = ("", "[]", "{}", "()", "null", "None", '""', "''")
"""Empty results, as JSON and as Python write them."""


_OUTCOMES = {
    "tool_ok": ~pl.col("ToolFailed"),
    "tool_error": pl.col("ToolFailed"),
    # A tool whose span holds no result is not judged.
    "empty_result": ~pl.col("ToolFailed") & pl.col("ToolResult").str.strip_chars().is_in(_EMPTY),
}
"""Kinds of rules, and when a tool's outcome meets them."""


def outcome(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Find tools that ran without an error, that failed, or that ran and returned nothing."""
    return _findings(rule, rule_input, _OUTCOMES[rule.kind])


def exception(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Find tools in which an exception of a type was raised that matches rule.types in full; a tool call counts once."""
    matching = rule_input.exception_types.filter(pl.col("ExceptionType").str.contains(whole(rule.types or "")))
    return _findings(rule, rule_input, pl.col("Tool").is_in(matching["Tool"].implode()))


def named(rule: AirRule, column: str) -> pl.Expr:
    """Return whether a tool is among those that a rule names."""
    return pl.lit(True) if rule.tools == EVERY else pl.col(column).is_in(rule.tools)


def whole(pattern: str) -> str:
    """Return a regular expression that a text must match from its beginning to its end."""
    return rf"\A(?:{pattern})\z"


def _findings(rule: AirRule, rule_input: RuleInput, holds: pl.Expr) -> pl.DataFrame:
    return rule_input.tools.filter(named(rule, "ToolName") & holds).select("CallId", "TraceId", "SpanId", Value=pl.lit(rule.reward))
