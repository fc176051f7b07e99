"""Filters and orders of the list of rollouts, from a query string to conditions of a statement.

In: the parameters of a URL. Out: a `RolloutFilter`, a condition with its parameters, cursors. Invariant: values of a URL reach a statement
as parameters alone, never as SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from page.cursors import Value, decode_cursor, encode_cursor

HAS_RETURN = "ifNull(isFinite(Return), 0)"
"""Condition: a rollout has one return: none without reward and transition, or if rewards are of several roles or no numbers."""
_FINITE = f"if({HAS_RETURN}, assumeNotNull(Return), -1e300)"
SORTS = {
    "built": "toInt64(toUnixTimestamp64Micro(IngestedAt))",
    "started": "toInt64(toUnixTimestamp64Nano(StartedAt))",
    "return": _FINITE,
    "calls": "toInt64(Calls)",
    "drops": "toInt64(Drops)",
    "failed_tools": "toInt64(FailedToolCalls)",
    "tokens": "toInt64(InputTokens + OutputTokens)",
    "seconds": "toFloat64(Seconds)",
}
"""Name of an order -> the expression that it compares."""
_COLUMNS = {"run": "RunId", "mode": "Mode", "task": "TaskId", "group": "GroupId", "outcome": "Outcome", "spec": "BuildSpec"}
"""Name of a filter -> the column that it compares with a text."""
_CONDITIONS: Mapping[str, str | Mapping[bool, str]] = {
    **{name: f"{column} = {{{name}:String}}" for name, column in _COLUMNS.items()},
    "agent": "has(AgentNames, {agent:String})",
    "version": "has(PolicyVersions, {version:UInt64})",
    "reward_from": f"{HAS_RETURN} AND Return >= {{reward_from:Float64}}",
    "reward_to": f"{HAS_RETURN} AND Return <= {{reward_to:Float64}}",
    "failed": {True: "Outcome != 'succeeded'", False: "Outcome = 'succeeded'"},
    "failed_tool": {True: "FailedToolCalls > 0", False: "FailedToolCalls = 0"},
    "text": "positionCaseInsensitiveUTF8(concat(RolloutId, ' ', TaskId, ' ', GroupId, ' ', RunId), {text:String}) > 0",
}
"""Name of a filter -> its condition, with a parameter of that name; of one that is yes or no, both conditions."""
KEY = ("RunId", "RolloutId", "BuildSpec")
"""Columns that identify a row, in the order in which they break ties."""


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Condition of a list of rollouts. None: any value."""

    run: str | None = None
    mode: str | None = None
    task: str | None = None
    group: str | None = None
    outcome: str | None = None
    spec: str | None = None
    agent: str | None = None
    version: int | None = None
    """Policy version that sampled a token of it."""
    reward_from: float | None = None
    """Least return; a rollout without one does not meet it."""
    reward_to: float | None = None
    """Largest return; likewise."""
    failed: bool | None = None
    """True: it failed. False: it succeeded."""
    failed_tool: bool | None = None
    """True: a tool call of it failed. False: none did."""
    text: str | None = None
    """Text in the id of its rollout, task, group or run, in upper or lower case."""
    contents: str | None = None
    """Text in a span of it: a message, a tool call, an error. It is no part of the condition: `page.rollouts.text_search` looks for it."""

    @staticmethod
    def of(query: Mapping[str, str]) -> RolloutFilter:
        """Return the filter that a query string names; empty values name none.

        Raises:
            ValueError: a value is no number, or neither yes nor no.
        """
        values: dict[str, Any] = {}
        for field in fields(RolloutFilter):
            text = query.get(field.name, "")
            if text.strip():
                read = _READERS.get(field.name)
                values[field.name] = read(field.name, text) if read else text
        return RolloutFilter(**values)

    def condition(self) -> tuple[str, dict[str, Any]]:
        """Return a condition over builds with their Outcome and Return, and its parameters."""
        given = {name: value for name in _CONDITIONS if (value := getattr(self, name)) is not None}
        parts = [text if isinstance(text := _CONDITIONS[name], str) else text[value] for name, value in given.items()]
        return " AND ".join(parts) or "true", {name: value for name, value in given.items() if not isinstance(value, bool)}


@dataclass(frozen=True, slots=True)
class RolloutOrder:
    """Order of a list, and the row after which it goes on."""

    sort: str = "built"
    descending: bool = True
    after: Sequence[Value] | None = None
    """Value of the order's expression and KEY of the last row that is shown. None: the list begins."""

    @staticmethod
    def of(query: Mapping[str, str]) -> RolloutOrder:
        """Return the order that a query string names.

        Raises:
            ValueError: there is no such order, or the cursor is none of ours.
        """
        sort, order = query.get("sort") or "built", query.get("order") or "desc"
        if sort not in SORTS or order not in {"asc", "desc"}:
            raise ValueError(f"sort = {sort!r}, order = {order!r}: sort is one of {', '.join(SORTS)}, order is asc or desc.")
        return RolloutOrder(
            sort, order == "desc", decode_cursor(query["after"], (int, float), str, str, str) if query.get("after") else None
        )

    def following(self, cursor: str) -> RolloutOrder:
        """Return the same order from the row of a cursor on."""
        return replace(self, after=decode_cursor(cursor, (int, float), str, str, str))

    @property
    def expression(self) -> str:
        """Return the expression that the order compares."""
        return SORTS[self.sort]

    @property
    def newest_built(self) -> bool:
        """Return whether the order is that of builds, the newest first."""
        return self.sort == "built" and self.descending and (self.after is None or isinstance(self.after[0], int))

    def clauses(self) -> tuple[str, str, dict[str, Any]]:
        """Return a condition, an ORDER BY clause and the parameters of both."""
        direction = "DESC" if self.descending else "ASC"
        order = ", ".join(f"{column} {direction}" for column in ("SortValue", *KEY))
        if self.after is None:
            return "true", order, {}
        kind = "Int64" if isinstance(self.after[0], int) else "Float64"
        names = [f"{{after_{number}:String}}" for number in range(1, 4)]
        condition = f"(SortValue, {', '.join(KEY)}) {'<' if self.descending else '>'} ({{after_0:{kind}}}, {', '.join(names)})"
        return condition, order, {f"after_{number}": value for number, value in enumerate(self.after)}


def cursor_of(row: Mapping[str, Any]) -> str:
    """Return the cursor of a row: what follows it comes next."""
    return encode_cursor([row["SortValue"], *(row[name] for name in KEY)])


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} = {text[:80]!r} is no number.") from None


def _version(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ValueError(f"{name} = {text[:80]!r} is no version. Give a number from 0.")
    return int(text)


def _choice(name: str, text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ValueError(f"{name} = {text[:80]!r} is neither yes nor no.")
    return text == "yes"


_READERS = {"version": _version, "reward_from": _number, "reward_to": _number, "failed": _choice, "failed_tool": _choice}
