"""Reading of span attributes by dialects: each requested attribute as a column, and `Reading`, the expressions that classify a span.

Invariant: a span that lacks an attribute gives null, never an error, and so does text that was meant as a number or as JSON and is none.

An attribute that no span of the batch has costs nothing: it is a literal null. Of the others only the requested ones are extracted
from the maps; all keys are compared once, as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache

import numpy as np
import polars as pl

NONE = pl.lit(None, pl.String)
NO = pl.lit(False)
SCORES = pl.List(pl.Struct({"Name": pl.String(), "Value": pl.Float64()}))
OF_CLIENT = pl.col("OfClient")
"""Condition: the span's scope belongs to a client library of the model's server."""
_ERROR_FLAG = r'"is_?[eE]rror"\s*:\s*true'
"""Pattern of a failed tool result, in the spelling of MCP and Anthropic."""

_NAMES_KEPT = 2**16
"""Names of attributes whose comparison with a pattern is remembered."""


@cache
def attribute(name: str) -> pl.Expr:
    """Return a span's attribute; null where it has none."""
    return pl.col("Attributes").map.get(name)


@cache
def _not_empty(name: str) -> pl.Expr:
    """Return a column of texts, null where they are empty."""
    return pl.col(name).replace("", None)


def coalesced(columns: Iterable[pl.Expr]) -> pl.Expr:
    """Return the first value that is not null; null of no columns."""
    among = list(columns)
    return pl.coalesce(among) if among else NONE


class AttributeColumns:
    """Attributes of spans, as a column each."""

    def __init__(self, spans: pl.DataFrame) -> None:
        """Index the keys of all attributes together; `spans` is anything with Attributes."""
        maps = (
            spans["Attributes"].rechunk().to_frame().select(keys=pl.col("Attributes").map.keys(), values=pl.col("Attributes").map.values())
        )
        lengths = maps["keys"].list.len().fill_null(0).to_numpy()
        self.height = spans.height
        values = maps["values"].explode(empty_as_null=False, keep_nulls=False)
        self._absent = len(values)
        self._values = values.append(pl.Series([None], dtype=values.dtype))
        encoded = maps["keys"].explode(empty_as_null=False, keep_nulls=False).to_arrow().dictionary_encode()
        self._names: list[str] = encoded.dictionary.to_pylist()
        self._codes = pl.Series(encoded.indices).to_numpy()
        self._rows = np.repeat(np.arange(self.height), lengths)
        self._columns: dict[str, pl.Series] = {}
        self._requested: set[str] = set()

    def __call__(self, name: str) -> pl.Expr:
        """Return an attribute; null where a span has none."""
        return pl.col(name) if self.present(name) else NONE

    def present(self, *names: str) -> list[str]:
        """Return those of several attributes that any span has, which are columns from now on."""
        present = [name for name in names if name in self._places]
        for name in present:
            if name not in self._columns:
                self._columns[name] = self._column(name, np.flatnonzero(self._codes == self._places[name]))
        self._requested.update(present)
        return present

    def first(self, *names: str) -> pl.Expr:
        """Return the first of several attributes that a span has and that is not empty."""
        return coalesced(_not_empty(name) for name in self.present(*names))

    def any_of(self, *names: str) -> pl.Expr:
        """Return the first of several attributes that a span has, even if empty."""
        return coalesced(pl.col(name) for name in self.present(*names))

    def has(self, *names: str) -> pl.Expr:
        """Return whether a span has any of several attributes; NO where no span has."""
        columns = [pl.col(name).is_not_null() for name in self.present(*names)]
        return pl.any_horizontal(columns) if columns else NO

    def once(self, name: str, what: pl.Expr) -> pl.Expr:
        """Evaluate an expression over attributes once, for many others that use it; `name` must not be the name of an attribute."""
        if name not in self._columns:
            roots = what.meta.root_names()
            if not roots:
                return what
            self._columns[name] = pl.DataFrame([self._columns[root] for root in roots]).select(what.alias(name)).to_series()
        self._requested.add(name)
        return pl.col(name)

    def matching(self, pattern: str) -> pl.Series:
        """Return a boolean a span: any of its attributes has a name that matches a pattern."""
        matches = np.zeros(self.height, dtype=np.bool_)
        matches[self._rows[self._at(pattern)]] = True
        return pl.Series(matches)

    def entries(self, pattern: str) -> pl.DataFrame:
        """Return attributes whose names match a pattern: row (of the spans), key, value."""
        at, names = self._at(pattern), pl.Series("key", self._names, dtype=pl.String)
        return pl.DataFrame(
            [
                pl.Series("row", self._rows[at], dtype=pl.Int64),
                names[self._codes[at]],
                self._values[at].alias("value"),
            ]
        )

    def _at(self, pattern: str) -> np.ndarray:
        """Return the places of the attributes whose names match a pattern."""
        matching = np.fromiter((_matches(pattern, name) for name in self._names), np.bool_, len(self._names))
        return np.flatnonzero(matching[self._codes]) if matching.any() else np.zeros(0, dtype=np.int64)

    def forget(self) -> None:
        """Exclude from `frame` the attributes that were requested so far."""
        self._requested.clear()

    def frame(self, beside: pl.DataFrame, rows: np.ndarray | None = None) -> pl.DataFrame:
        """Return the requested attributes beside other columns of the same spans; optionally some rows only."""
        whole = beside.hstack([column for name, column in self._columns.items() if name in self._requested])
        return whole if rows is None else whole[rows]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: code for code, name in enumerate(self._names)}

    def _column(self, name: str, at: np.ndarray) -> pl.Series:
        entry_of = np.full(self.height, self._absent, dtype=np.uint32)
        # The first of several, should a sender repeat a key.
        entry_of[self._rows[at[::-1]]] = at[::-1]
        return self._values[entry_of].alias(name)


@lru_cache(_NAMES_KEPT)
def _matches(pattern: str, name: str) -> bool:
    # Names repeat from batch to batch, and a pattern may take longer to compile than a small batch to read.
    return re.search(pattern, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Expressions that classify a dialect's spans, over `AttributeColumns`, ScopeName, SpanName, StatusCode, StatusMessage and OfClient."""

    call: pl.Expr = NO
    """The span is a call of a model for a response (no embedding, no ranking)."""
    client: pl.Expr = OF_CLIENT
    """The call is recorded by the client library of the model's server, not by a framework above it."""
    engine: pl.Expr = NO
    """The span is the server's own span of a call."""
    tool: pl.Expr = NO
    chain: pl.Expr = NO
    suspect: pl.Expr = NO
    """The span may be a call, and has too little data to be read as one."""
    agent: pl.Expr = NONE
    tool_name: pl.Expr = NONE
    tool_call_id: pl.Expr = NONE
    arguments: pl.Expr = NONE
    result: pl.Expr = NONE
    failed: pl.Expr = NO
    """The tool failed, and neither the span's status nor `error.type` shows it."""
    error: pl.Expr = NONE
    """Type of an error."""
    model: pl.Expr = NONE
    """Model as reported in the response, else as requested."""
    response_id: pl.Expr = NONE
    input_tokens: pl.Expr = NONE
    output_tokens: pl.Expr = NONE
    finish: pl.Expr = NONE
    """Finish reason of the first choice."""

    def of(self, frame: pl.DataFrame, request: pl.Expr = NO) -> pl.DataFrame:
        """Return the columns that `describe` adds, without Convention and Scores.

        Spans for which `request` holds ask for a response: they are suspects unless they are something else.
        """
        flags = {f"={name}": getattr(self, name).fill_null(False) for name in _FLAGS}
        others = {f"={name}": getattr(self, name) for name in _OTHERS}
        # A column of the frame first: a row a span, however many of the others are literals.
        read = frame.select("SpanName", "StatusCode", **flags, **others, **{"=request": request})
        return read.with_columns(_SUSPECT.alias("=suspect")).with_columns(_CALLED.alias("=called")).select(**_DESCRIBED)


_FLAGS = ("call", "client", "engine", "tool", "chain", "suspect")
"""Fields of a reading of which null counts as False."""
_OTHERS = tuple(field.name for field in fields(Reading) if field.name not in _FLAGS)
# Over the columns of a reading, `=` and the field's name: made once, since making an expression costs more than a small batch's values.
_SUSPECT = (pl.col("=suspect") | (pl.col("=request") & ~pl.any_horizontal("=tool", "=chain", "=engine"))) & ~pl.col("=call")
_CALLED = pl.any_horizontal("=call", "=engine", "=suspect")
_RESULT = pl.when("=tool").then("=result")
_FAILED = (pl.col("StatusCode") == "Error") | (pl.col("=error").fill_null("") != "") | pl.col("=failed") | _RESULT.str.contains(_ERROR_FLAG)
_DESCRIBED = {
    "IsClient": pl.col("=call") & pl.col("=client"),
    "IsModel": pl.col("=call") & ~pl.col("=client"),
    "IsEngine": pl.col("=engine"),
    "IsTool": pl.col("=tool") & ~pl.col("=call"),
    "IsChain": pl.col("=chain"),
    "IsSuspect": pl.col("=suspect"),
    "AgentName": pl.col("=agent"),
    "ToolName": pl.when("=tool").then(pl.coalesce("=tool_name", "SpanName")).otherwise(pl.lit("")),
    "ToolFailed": pl.col("=tool") & _FAILED.fill_null(False),
    "ToolCallId": pl.when("=tool").then("=tool_call_id"),
    "ToolArguments": pl.when("=tool").then("=arguments"),
    "ToolResult": _RESULT,
    "ResponseId": pl.when("=called").then("=response_id"),
    "Model": pl.when("=called").then("=model"),
    "InputTokens": pl.when("=called").then("=input_tokens").cast(pl.Int64, strict=False),
    "OutputTokens": pl.when("=called").then("=output_tokens").cast(pl.Int64, strict=False),
}
"""Columns that `describe` adds, without Convention and Scores, over the columns of a reading."""


def of_json(text: pl.Expr, *fields: str) -> pl.Expr:
    """Return a field of a JSON object, as text; null where the text is no object or lacks it. Several: the first that exists."""
    return pl.coalesce(text.str.json_path_match(f"$.{name}") for name in fields)


def first_of_list(text: pl.Expr) -> pl.Expr:
    """Return the first text in a JSON list, null where that is empty, `""` or `null`; the text itself where it is no list."""
    return text.str.extract(r'^\s*(?:\[\s*)?"?\s*([^"\[\],\s][^"\],]*)').replace("null", None)


def unquoted(text: pl.Expr) -> pl.Expr:
    """Return the value of a JSON string; other text unchanged."""
    return text.str.strip_chars('"')
