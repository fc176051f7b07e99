"""Rules about calls themselves: `latency`, `unparsable_output`, `expression`, `sql`. A finding names the call's own span."""

from __future__ import annotations

import msgspec
import polars as pl

from spangrad.errors import JSON_ERRORS, RuleError
from spangrad.settings import AirRule
from transition_builder.rewards.rules.rule_input import RuleInput
from transition_builder.rewards.rules.tools import whole
from transition_builder.schemas import ATTEMPT, SPAN

JSON = "json"
"""Form of a text that is JSON."""
USE_TRY_CAST = "Use TRY_CAST, which gives null, for a CAST of a text that may not be a number."


def latency(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Find calls that took longer than rule.seconds; all choices of a call count once."""
    return rule_input.first.filter(pl.col("Seconds") > rule.seconds).select("CallId", *SPAN, Value=pl.lit(rule.reward))


def unparsable_output(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Find calls whose text is not of rule.form. Responses with tool calls alone, and unrecorded ones, are not judged."""
    has_reply = (pl.col("Text") != "") | (pl.col("ToolCalls").list.len() == 0)
    answered = rule_input.answered.filter(has_reply)
    if rule.form == JSON:
        wrong = pl.Series([not _is_json(text) for text in answered["Text"]], dtype=pl.Boolean)
        return answered.filter(wrong).select("CallId", *SPAN, Value=pl.lit(rule.reward))
    return answered.filter(~pl.col("Text").str.contains(whole(rule.form or ""))).select("CallId", *SPAN, Value=pl.lit(rule.reward))


def expression(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Return the value of rule.where for each call, times the reward; calls for which it is null get nothing.

    Aggregates are over the calls of the attempt, so that nothing depends on what else is built at the same time.

    Raises:
        RuleError: the expression has no value for some call, such as CAST of a text that is no number.
    """
    value = pl.sql_expr(rule.where or "").cast(pl.Float64).over(ATTEMPT)
    try:
        values = rule_input.columns.select("CallId", *SPAN, Value=value * rule.reward)
    except pl.exceptions.PolarsError as error:
        raise RuleError(
            f"the rule {rule.name!r} has where = {rule.where!r}, which cannot be evaluated for some calls: {reason(error)}. "
            f"{USE_TRY_CAST} Nothing was written of the rollouts that it was evaluated for."
        ) from error
    return values.filter(pl.col("Value").is_not_null() & (pl.col("Value") != 0))


def sql(rule: AirRule, rule_input: RuleInput) -> pl.DataFrame:
    """Return the values of the file rule.where for calls, times the reward."""
    return rule_input.sql.filter(pl.col("Name") == rule.where).select("CallId", *SPAN, Value=pl.col("Value") * rule.reward)


def reason(error: pl.exceptions.PolarsError) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().splitlines()[0].rstrip(".")


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except JSON_ERRORS:
        return False
    return True
