"""Rules about the tool calls that responses request: `malformed_arguments`, `repeated_call`.

A call that requests several such gets the reward as many times.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import polars as pl

from spangrad.errors import JSON_ERRORS
from spangrad.settings import AirRule
from transition_builder.rewards.rules.rule_input import RuleInput
from transition_builder.rewards.rules.tools import named
from transition_builder.schemas import SPAN


def malformed_arguments(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Find tool calls whose arguments are no JSON object. Only responses show it: a tool's span holds parsed arguments of other code."""
    requested = _requested_tools(rule, rule_input)
    is_object = _mapped(requested["Arguments"], lambda text: isinstance(_decoded(text), dict), pl.Boolean)
    return _findings(rule, requested.filter(~is_object), pl.len())


def repeated_call(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Find tool calls that the same agent requested right before, with the same arguments: in the same response, or in the call before it.

    The call before is its parent on its branch, so that two workers with the same request at the same time repeat nothing.
    """
    executed = rule_input.tools.filter(pl.col("ToolArguments").is_not_null() & named(rule, "ToolName"))
    unrecorded = (
        executed.join(rule_input.answered.select("CallId"), on="CallId", how="anti", maintain_order="left")
        .select("CallId", Name="ToolName", Arguments="ToolArguments")
        .join(rule_input.first.select("CallId", *SPAN, "AgentName", "ParentCallId"), on="CallId", maintain_order="left")
    )
    requested = pl.concat([_requested_tools(rule, rule_input), unrecorded], how="diagonal")
    same = requested.with_columns(Arguments=_mapped(requested["Arguments"], _canonical, pl.String))
    tool = ["Name", "Arguments"]
    counts = same.group_by("CallId", "ParentCallId", "AgentName", *SPAN, *tool, maintain_order=True).len()
    before = counts.select(*tool, "AgentName", ParentCallId="CallId", again=pl.lit(1))
    repeated = counts.join(before, on=[*tool, "AgentName", "ParentCallId"], how="left", maintain_order="left")
    times = (pl.col("len").cast(pl.Int64) - 1 + pl.col("again").fill_null(0)).sum()
    return _findings(rule, repeated, times).filter(pl.col("Value") != 0)


def _requested_tools(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Return a row for each tool call that a response requested and that the rule names: Name and Arguments beside the call's."""
    return (
        rule_input.answered.select("CallId", *SPAN, "AgentName", "ParentCallId", pl.col("ToolCalls").alias("call"))
        .explode("call", empty_as_null=False)
        .unnest("call")
        .filter(named(rule, "Name"))
    )


def _findings(rule: AirRule, rows: pl.DataFrame, times: pl.Expr) -> pl.DataFrame:
    return rows.group_by("CallId", *SPAN, maintain_order=True).agg(Value=times.cast(pl.Float64) * rule.reward)


def _mapped(texts: pl.Series, function: Callable[[str], object], dtype: type[pl.DataType]) -> pl.Series:
    """Apply a function to each text, computed once for equal ones."""
    values = {text: function(text) for text in texts.unique()}
    return pl.Series([values[text] for text in texts], dtype=dtype)


def _canonical(text: str) -> str:
    """Return arguments without irrelevant differences: the order of keys, and blanks."""
    arguments = _decoded(text)
    return text.strip() if arguments is None else json.dumps(arguments, sort_keys=True)


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except JSON_ERRORS:
        return None
