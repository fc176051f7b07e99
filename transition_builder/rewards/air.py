"""AIR, automatic intermediate rewards: rewards by rules over calls and their tools (docs/guides/rewards.md).

Invariant: a rule rewards only calls of the agents and the tools that it names; each reward names its rule, by hash, and the span that shows
the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from spangrad.errors import BuilderError
from spangrad.selection import pattern_fault
from spangrad.settings import AirRule, BuilderSettings
from spangrad.types import RewardSource
from transition_builder.frames import concat
from transition_builder.rewards.precedence import REPORTED, as_reported
from transition_builder.rewards.rules import calls, functions, tool_requests, tools
from transition_builder.rewards.rules.calls import USE_TRY_CAST, reason
from transition_builder.rewards.rules.columns import COLUMNS
from transition_builder.rewards.rules.rule_input import RuleInput
from transition_builder.rewards.rules.tools import whole
from transition_builder.schemas import ATTEMPT

RULES: Mapping[str, Callable[[AirRule, RuleInput], pl.DataFrame]] = {
    "tool_ok": tools.outcome,
    "tool_error": tools.outcome,
    "tool_exception": tools.exception,
    "empty_result": tools.outcome,
    "malformed_arguments": tool_requests.malformed_arguments,
    "repeated_call": tool_requests.repeated_call,
    "unparsable_output": calls.unparsable_output,
    "latency": calls.latency,
    "expression": calls.expression,
    "sql": calls.sql,
    "python": functions.python,
}
"""Functions of the kinds of rules."""


def earned(spec: BuilderSettings, rule_input: RuleInput) -> pl.DataFrame:
    """Return the rewards that the rules of a specification give, as REPORTED."""
    calls_with_agent = rule_input.placed[["RunId", "Mode", "RolloutId", "Attempt", "CallId", "AgentName"]]
    earnings = list[pl.DataFrame]()
    for rule in spec.rules:
        rows = RULES[rule.kind](rule, rule_input).join(calls_with_agent, on="CallId", maintain_order="left")
        if rule.agents is not None:
            rows = rows.filter(pl.col("AgentName").str.contains(whole(rule.agents)))
        if rows.height:
            facts = {"Name": rule.name, "Role": rule.role, "Source": RewardSource.AIR.value, "RuleHash": rule_hash(rule, spec)}
            earnings.append(as_reported(rows.with_columns(pl.lit(value).alias(name) for name, value in facts.items())))
    return concat(earnings, REPORTED)


def rule_hash(rule: AirRule, spec: BuilderSettings) -> str:
    """Return the hash of a rule, and of the file that it names: the first 16 hex digits of SHA-256 of its canonical JSON."""
    decides = rule.model_dump(mode="json")
    if rule.kind in ("sql", "python") and rule.where:
        decides["file"] = spec.sql_hash(rule.where) if rule.kind == "sql" else spec.source_hash(rule.where)
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def check(spec: BuilderSettings) -> None:
    """Check, before anything is built, that every rule can be evaluated.

    Raises:
        BuilderError: a pattern is no regular expression, an expression is not one over the columns of a call, a function cannot be
            imported, or a column does not exist.
    """
    for rule in spec.rules:
        form = rule.form if rule.form != calls.JSON else None
        for name, pattern in (("agents", rule.agents), ("form", form), ("types", rule.types)):
            if pattern is not None and (fault := pattern_fault(whole(pattern))):
                raise BuilderError(f"the rule {rule.name!r} has {name} = {pattern!r}, which is no regular expression: {fault}. Fix it.")
        if rule.kind == "expression":
            _check_expression(rule)
        if rule.kind == "python":
            _check_columns(rule)
            functions.load(rule)


def _check_columns(rule: AirRule) -> None:
    unknown = [name for name in rule.columns or () if name not in COLUMNS]
    if unknown:
        raise BuilderError(
            f"the rule {rule.name!r} has columns = {list(rule.columns or ())}, and a call has no {', '.join(unknown)}. "
            f"Name columns among {', '.join(COLUMNS)}."
        )


def _check_expression(rule: AirRule) -> None:
    schema = {**dict.fromkeys(ATTEMPT, pl.String()), **COLUMNS}
    calls = pl.DataFrame({name: [None, _ordinary(dtype)] for name, dtype in schema.items()}, schema=schema)
    try:
        dtype = calls.select(pl.sql_expr(rule.where or "").over(ATTEMPT).alias("value")).schema["value"]
        fault = "" if dtype.is_numeric() or dtype in (pl.Boolean(), pl.Null()) else f"it gives {dtype}"
    except pl.exceptions.InvalidOperationError as error:
        fault = f"{reason(error)}. {USE_TRY_CAST}"
    except pl.exceptions.PolarsError as error:
        fault = reason(error)
    if fault:
        raise BuilderError(
            f"the rule {rule.name!r} has where = {rule.where!r}, which is no number over the columns of a call: {fault.rstrip('.')}. "
            f"The columns are {', '.join(COLUMNS)}."
        )


def _ordinary(dtype: object) -> Any:
    """Return a value as calls have it: of texts one that is no number."""
    match dtype:
        case pl.List(inner=inner):
            return [_ordinary(inner)]
        case pl.Struct(fields=fields):
            return {field.name: _ordinary(field.dtype) for field in fields}
        case pl.String():
            return "x"
        case _:
            return 1
