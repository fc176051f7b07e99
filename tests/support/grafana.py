"""Model of Grafana around a panel's query: it replaces variables and macros before, and checks the columns of the answer after."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

ALL = "$__all"
"""The value of a variable whose every option is chosen."""


@dataclass(frozen=True)
class Choice:
    """A variable's state on an open dashboard."""

    value: str | list[str]
    """A list: the variable may have several values. `[ALL]`: all options are chosen."""
    options: Sequence[str] = ()
    """Answers of the variable's query."""

    @property
    def everything(self) -> bool:
        """Return whether the data source reads the value as all options, or as no choice."""
        text = ",".join(self.value) if isinstance(self.value, list) else self.value
        return text in ("", ALL)

    @property
    def values(self) -> str | list[str]:
        """Values that replace the variable in a query."""
        return list(self.options) if self.value in (ALL, [ALL]) else self.value


@dataclass(frozen=True)
class Window:
    """The time range and the interval that the panel's width gives."""

    start: datetime
    end: datetime
    interval_seconds: float = 60.0


Choices = Mapping[str, Choice]

# --- variables: the browser's part ---

_VARIABLE = re.compile(r"\$(\w+)|\[\[(\w+?)(?::(\w+))?\]\]|\$\{(\w+)(?:\.[^:^}]+)?(?::([^}]+))?\}")


def replace_variables(sql: str, choices: Choices) -> str:
    """Variables by their values, `$name` or `${name:format}`; unknown names stay."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        return _formatted(choices[name].values, match[3] or match[5] or "") if name in choices else match[0]

    return _VARIABLE.sub(value, sql)


def _formatted(value: str | list[str], format_: str) -> str:
    values = value if isinstance(value, list) else [value]
    match format_:
        case "singlequote":
            return ",".join("'" + text.replace("'", "\\'") + "'" for text in values)
        case "sqlstring":
            return ",".join("'" + text.replace("'", "''") + "'" for text in values)
        case "csv" | "raw":
            return ",".join(values)
        case "":
            # The data source's own default: quoted without escapes when there may be several, else as it is.
            return "'" + "','".join(values) + "'" if isinstance(value, list) else value
    raise NotImplementedError(f"the format {format_!r} of a variable is not expanded here")


def conditional_all(sql: str, choices: Choices) -> str:
    """`$__conditionalAll(condition, $variable)`: the condition, or `1=1` when every value is chosen. The last one is replaced first."""
    macro = "$__conditionalAll"
    while (start := sql.rfind(macro + "(")) >= 0:
        end, arguments = _arguments(sql, start + len(macro))
        if len(arguments) != 2:
            return sql
        name = re.search(r"(?<=\$\{)\w+(?=\})|(?<=\$)\w+", arguments[1])
        choice = choices.get(name[0]) if name else None
        sql = sql[:start] + ("1=1" if choice and choice.everything else arguments[0]) + sql[end:]
    return sql


# --- macros: the backend's part ---


def expand_macros(sql: str, window: Window) -> str:
    """Macros of the data source by its SQL, the innermost first."""
    matches = list(re.finditer(r"\$__(\w+)", sql))
    for match in reversed(matches):
        macro = _MACROS.get(match[1])
        if macro is None:
            continue
        end, arguments = _arguments(sql, match.end()) if sql[match.end() : match.end() + 1] == "(" else (match.end(), [])
        sql = sql[: match.start()] + macro([argument.strip() for argument in arguments], window) + sql[end:]
    return sql


def _seconds(instant: datetime) -> str:
    return f"toDateTime({math.floor(instant.timestamp())})"


def _milliseconds(instant: datetime) -> str:
    return f"fromUnixTimestamp64Milli({round(instant.timestamp() * 1000)})"


def _day(instant: datetime) -> str:
    return f"toDate('{instant.astimezone(UTC):%Y-%m-%d}')"


def _between(column: str, window: Window, spelled: Any) -> str:
    return f"{column} >= {spelled(window.start)} AND {column} <= {spelled(window.end)}"


def _date_time(arguments: list[str], window: Window) -> str:
    date, time = arguments
    return f"({_between(date, window, _day)}) AND ({_between(time, window, _seconds)})"


def _whole(value: float) -> int:
    return int(max(value, 1))


_MACROS = {
    "fromTime": lambda _, window: _seconds(window.start),
    "toTime": lambda _, window: _seconds(window.end),
    "fromTime_ms": lambda _, window: _milliseconds(window.start),
    "toTime_ms": lambda _, window: _milliseconds(window.end),
    "timeFilter": lambda arguments, window: _between(*arguments, window, _seconds),
    "timeFilter_ms": lambda arguments, window: _between(*arguments, window, _milliseconds),
    "dateFilter": lambda arguments, window: _between(*arguments, window, _day),
    "dateTimeFilter": _date_time,
    "dt": _date_time,
    "timeInterval": lambda arguments, window: (
        f"toStartOfInterval(toDateTime({arguments[0]}), INTERVAL {_whole(window.interval_seconds)} second)"
    ),
    "timeInterval_ms": lambda arguments, window: (
        f"toStartOfInterval(toDateTime64({arguments[0]}, 3), INTERVAL {_whole(window.interval_seconds * 1000)} millisecond)"
    ),
    "interval_s": lambda _, window: str(_whole(window.interval_seconds)),
}


def _arguments(sql: str, connect_with: int) -> tuple[int, list[str]]:
    """Return the index after the parentheses that open at `connect_with`, and the arguments that commas separate in them."""
    depth, begin, arguments = 0, connect_with + 1, list[str]()
    for at in range(connect_with, len(sql)):
        depth += {"(": 1, ")": -1}.get(sql[at], 0)
        if depth == 0 or (depth == 1 and sql[at] == ","):
            arguments.append(sql[begin:at])
            begin = at + 1
        if depth == 0:
            return at + 1, arguments
    raise ValueError(f"parentheses do not close: {sql[connect_with - 20 :]}")


def expand(sql: str, choices: Choices, window: Window) -> str:
    """The statement that reaches the store."""
    return expand_macros(replace_variables(conditional_all(sql, choices), choices), window)


# --- what a dashboard asks ---


@dataclass(frozen=True)
class Panel:
    """A panel that asks."""

    title: str
    kind: str
    sql: str
    model: Mapping[str, Any]


def panels(dashboard: Mapping[str, Any]) -> Iterator[Panel]:
    """Every query of every panel, those inside rows included."""
    for panel in dashboard["panels"]:
        yield from panels({"panels": panel.get("panels", [])})
        for target in panel.get("targets", []):
            yield Panel(panel["title"], panel["type"], target["rawSql"], panel)


# --- what a panel can draw ---

Columns = Sequence[tuple[str, str]]
"""Names and ClickHouse types of an answer."""
TRACE = {
    "traceID": "text", "spanID": "text", "parentSpanID": "text", "operationName": "text", "serviceName": "text", "startTime": "time",
    "duration": "number", "tags": "json", "serviceTags": "json",
}  # fmt: skip
"""Columns that the trace panel needs, with their kinds (https://grafana.com/docs/grafana/latest/explore/trace-integration/#data-api)."""


def field_kind(type_: str) -> str:
    """Return the data source's kind of a ClickHouse type: time, number, bool, text or json; `?` after it: nullable; empty: no converter."""
    while match := re.fullmatch(r"LowCardinality\((.*)\)", type_):
        type_ = match[1]
    if match := re.fullmatch(r"Nullable\((.*)\)", type_):
        kind = field_kind(match[1])
        return kind + "?" if kind else ""
    for kind, pattern in (
        ("time", r"Date(32|Time|Time64)?(\(.*\))?"),
        ("number", r"U?Int(8|16|32|64|128|256)|Float(32|64)|Decimal.*"),
        ("bool", r"Bool"),
        ("text", r"String|Enum(8|16)\(.*\)|IPv[46]"),
        ("json", r"(Array|Tuple|Map|Nested|Variant|JSON).*"),
    ):
        if re.fullmatch(pattern, type_):
            return kind
    return ""


def complaints(panel: Panel, columns: Columns, rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the reasons why the panel cannot draw the answer, as sentences; empty if it can."""
    names = [name for name, _ in columns]
    kinds = [field_kind(type_) for _, type_ in columns]
    sentences = [
        f"{name} is {type_}, which the data source cannot convert" for (name, type_), kind in zip(columns, kinds, strict=True) if not kind
    ]
    sentences += [f"two columns are named {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    sentences += ["no rows"] if not rows else []
    overridden = {
        override["matcher"]["options"] for override in panel.model["fieldConfig"]["overrides"] if override["matcher"]["id"] == "byName"
    }
    sentences += [f"an override speaks of {name}, which is no column" for name in sorted(overridden - set(names))]
    by_kind = {
        kind: [at for at, given in enumerate(kinds) if given.rstrip("?") == kind] for kind in ("time", "number", "text", "json", "bool")
    }
    check = {"timeseries": _series, "trend": _trend, "stat": _stat, "barchart": _bars, "table": _table, "traces": _trace}[panel.kind]
    sentences += check(panel, columns, kinds, by_kind, rows)
    drawn = [names[at] for at in by_kind["number"] if rows and all(_empty(row[at]) for row in rows)]
    return sentences + ([f"{name} has no value in any row" for name in drawn] if panel.kind != "table" else [])


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value)) or value in ("NaN", "nan")


def _at(rows: Sequence[Sequence[Any]], column: int) -> list[Any]:
    return [row[column] for row in rows]


def _series(panel: Panel, columns: Columns, kinds: list[str], by_kind: Mapping[str, list[int]], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Long or wide: a time that is never null and ascends, numbers, and of words at most one column, whose values name the curves."""
    sentences = [] if kinds.count("time") == 1 else ["a time series has one column of DateTime that is never null"]
    sentences += [] if by_kind["number"] else ["a time series has a column of numbers"]
    sentences += [
        f"{columns[at][0]} is {columns[at][1]}: a time series draws numbers and names" for at in (*by_kind["json"], *by_kind["bool"])
    ]
    sentences += ["more than one column names the curves"] if len(by_kind["text"]) > 1 else []
    if by_kind["time"]:
        times = _at(rows, by_kind["time"][0])
        sentences += [] if times == sorted(times) else ["the times do not ascend"]
        keys = [(row[by_kind["time"][0]], *(row[at] for at in by_kind["text"])) for row in rows]
        sentences += [] if len(keys) == len(set(keys)) else ["a curve has two values at one time"]
    return sentences


def _trend(panel: Panel, columns: Columns, kinds: list[str], by_kind: Mapping[str, list[int]], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A column of numbers that ascend, never null, and others of numbers."""
    x = panel.model["options"]["xField"]
    names = [name for name, _ in columns]
    if x not in names or kinds[names.index(x)] != "number":
        return [f"{x} is no column of numbers that are never null"]
    values = [float(value) for value in _at(rows, names.index(x))]
    sentences = [] if values == sorted(set(values)) else [f"{x} does not ascend"]
    sentences += [] if len(by_kind["number"]) > 1 else ["nothing to draw over it"]
    return sentences + [
        f"{name} is {type_}: a trend draws numbers"
        for (name, type_), kind in zip(columns, kinds, strict=True)
        if kind.rstrip("?") != "number"
    ]


def _stat(panel: Panel, columns: Columns, kinds: list[str], by_kind: Mapping[str, list[int]], rows: Sequence[Sequence[Any]]) -> list[str]:
    sentences = [] if len(rows) == 1 else [f"one number is drawn, and there are {len(rows)} rows"]
    return sentences + ([] if [kind.rstrip("?") for kind in kinds] == ["number"] else ["one column of a number is drawn"])


def _bars(panel: Panel, columns: Columns, kinds: list[str], by_kind: Mapping[str, list[int]], rows: Sequence[Sequence[Any]]) -> list[str]:
    x = panel.model["options"]["xField"]
    named = [columns[at][0] for at in by_kind["text"]]
    sentences = [] if named == [x] else [f"{x} is not the one column of words"]
    return sentences + ([] if by_kind["number"] else ["there is no column of numbers"])


def _table(panel: Panel, columns: Columns, kinds: list[str], by_kind: Mapping[str, list[int]], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Flat values; what a link speaks of is a column."""
    sentences = [f"{columns[at][0]} is {columns[at][1]}: a table shows flat values" for at in by_kind["json"]]
    text = str(panel.model["fieldConfig"]["overrides"])
    rollout_texts = set(re.findall(r"__data\.fields\.(\w+)", text))
    return sentences + [f"a link speaks of {name}, which is no column" for name in sorted(rollout_texts - {name for name, _ in columns})]


def _trace(panel: Panel, columns: Columns, kinds: list[str], by_kind: Mapping[str, list[int]], rows: Sequence[Sequence[Any]]) -> list[str]:
    have = {name: kind for (name, _), kind in zip(columns, kinds, strict=True)}
    sentences = [f"{name} is not {kind}" for name, kind in TRACE.items() if have.get(name) != kind]
    if "traceID" in have and len({row[[name for name, _ in columns].index("traceID")] for row in rows}) > 1:
        sentences.append("there is more than one trace")
    return sentences
