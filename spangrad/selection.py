"""Conditions of a selection of calls, as Polars expressions that every stage uses.

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
    """Kind of name that is matched: agent, model, policy, tool or component."""
    holds: pl.Expr
    """Boolean expression, one row for each call."""
    value: pl.Expr
    """Text that the pattern is matched against, one row for each call; names of a list are joined by `, `."""


def conditions(selection: Selection, section: str = "selection") -> list[Condition]:
    """Return the conditions of a selection, one for each pattern that is given, in the order of its fields.

    A call that failed before a backend answered names no policy; the model's name that was requested is used instead. `section` is the
    selection's place in the settings, for errors.

    Raises:
        SettingsError: a pattern is no regular expression (in the syntax of Rust's regex crate, which Polars uses).
    """
    policy = pl.when(pl.col("Policy") != "").then("Policy").otherwise("Model")
    texts = {
        "agent": (selection.agents, pl.col("AgentName")),
        "model": (selection.models, pl.col("Model")),
        "policy": (selection.policies, policy),
    }
    lists = {"tool": (selection.tools, pl.col("Tools")), "component": (selection.components, pl.col("Components"))}
    given = list[Condition]()
    for what, (pattern, names) in (texts | lists).items():
        if pattern is not None and what in texts:
            given.append(Condition(what, _matches(names, pattern, what, section).fill_null(value=False), names))
        elif pattern is not None:
            holds = names.list.eval(_matches(pl.element(), pattern, what, section)).list.any()
            given.append(Condition(what, holds.fill_null(value=False), names.list.join(", ")))
    return given


def expression(selection: Selection, section: str = "selection") -> pl.Expr:
    """Return the expression that is true for a selected call: all its patterns match. True for every call where there are none.

    Raises:
        SettingsError: a pattern is no regular expression.
    """
    always = pl.col("AgentName").is_null() | pl.lit(value=True)  # a literal alone would not have one row for each call
    return pl.all_horizontal(always, *(condition.holds for condition in conditions(selection, section)))


def selected_of(policy: str, selection: Selection) -> pl.Expr:
    """Return the expression that is true for a selected call that a policy answered.

    Raises:
        SettingsError: a pattern is no regular expression.
    """
    return (pl.col("Policy") == policy) & expression(selection)


def _matches(name: pl.Expr, pattern: str, what: str, section: str) -> pl.Expr:
    whole = f"^(?:{pattern})$"
    if fault := pattern_fault(whole):
        raise SettingsError(
            f"{section}.{'policies' if what == 'policy' else f'{what}s'} = {pattern!r} is no regular expression ({fault}). "
            "Fix it; it must match a name in full."
        )
    return name.str.contains(whole)


def pattern_fault(pattern: str) -> str:
    """Return the reason why a pattern is no regular expression, in the parser's words; empty where it is one."""
    try:
        pl.select(pl.lit("").str.contains(pattern))
    except pl.exceptions.ComputeError as error:
        lines = str(error).splitlines()
        return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return ""
