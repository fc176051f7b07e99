"""Which calls a selection takes, as one Polars expression that every stage uses.

In: `spangrad.settings.Selection`. Out: conditions over the columns AgentName, Model, Policy (texts), Tools and Components (lists of
texts). Invariant: a name matches in full or not at all, and all patterns that are given must match; a condition is never null.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from spangrad.errors import SettingsError
from spangrad.settings import Selection


@dataclass(frozen=True, slots=True)
class Condition:
    """One pattern of a selection."""

    what: str
    """agent, model, policy, tool or component."""
    holds: pl.Expr
    """Boolean, a row a call."""
    found: pl.Expr
    """What the pattern was held against: a text a call; names of a list are joined by `, `."""


def conditions(selection: Selection) -> list[Condition]:
    """The conditions of a selection, one for each pattern that is given, in the order of its fields.

    A call that failed before anything answered it names no policy; it was asked for by its model's name, which stands in for it.

    Raises:
        SettingsError: a pattern is no regular expression (in the syntax of Rust's regex crate, which Polars uses).
    """
    policy = pl.when(pl.col("Policy") != "").then("Policy").otherwise("Model")
    one = [
        ("agent", selection.agents, pl.col("AgentName")),
        ("model", selection.models, pl.col("Model")),
        ("policy", selection.policies, policy),
    ]
    several = [("tool", selection.tools, pl.col("Tools")), ("component", selection.components, pl.col("Components"))]
    return [
        *(
            Condition(what, _matches(name, pattern, what).fill_null(value=False), name)
            for what, pattern, name in one
            if pattern is not None
        ),
        *(
            Condition(what, names.list.eval(_matches(pl.element(), pattern, what)).list.any().fill_null(value=False), names.list.join(", "))
            for what, pattern, names in several
            if pattern is not None
        ),
    ]


def expression(selection: Selection) -> pl.Expr:
    """Whether a call is selected: all its patterns match. True for every call where the selection has none.

    Raises:
        SettingsError: a pattern is no regular expression.
    """
    anyone = pl.col("AgentName").is_null() | pl.lit(value=True)  # a literal alone would not be a row a call
    return pl.all_horizontal(anyone, *(one.holds for one in conditions(selection)))


def _matches(name: pl.Expr, pattern: str, what: str) -> pl.Expr:
    whole = f"^(?:{pattern})$"
    try:
        pl.select(pl.lit("").str.contains(whole))
    except pl.exceptions.ComputeError as error:
        raise SettingsError(
            f"selection.{'policies' if what == 'policy' else f'{what}s'} = {pattern!r} is no regular expression ({_reason(error)}). "
            "Mend it; it must match a name in full."
        ) from None
    return name.str.contains(whole)


def _reason(error: Exception) -> str:
    """The parser's own words: the line that says what is wrong."""
    told = [line.removeprefix("error: ") for line in str(error).splitlines() if line.startswith("error: ")]
    return told[0] if told else str(error).splitlines()[0]
