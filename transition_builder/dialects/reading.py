"""What a dialect says of its spans, and how it reads their attributes.

In: the attributes of many spans, as one column of maps. Out: `Said`, which gives each attribute that somebody asks for as a column of its
own, and `Reading`, the expressions over such columns that say what a span is. Invariant: a span that lacks an attribute gives null, never
an error, and so does text that was meant as a number or as JSON and is none.

An attribute that no span of the batch has costs nothing: it is a literal null. Of the others only those that are asked for are taken out
of the maps, all keys being compared once, as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from spangrad import semconv

NONE = pl.lit(None, pl.String)
NO = pl.lit(False)
SCORES = pl.List(pl.Struct({"Name": pl.String(), "Value": pl.Float64()}))
OF_CLIENT = pl.col("OfClient")
"""Whether a span's scope belongs to a library that speaks to the model's server."""
_ERROR_FLAG = r'"is_?[eE]rror"\s*:\s*true'
"""How a tool's result says that it is none: MCP's and Anthropic's spelling."""


def attribute(name: str) -> pl.Expr:
    """A span's attribute; null where it has none."""
    return pl.col("Attributes").map.get(name)


class Said:
    """Attributes of spans, a column each."""

    def __init__(self, spans: pl.DataFrame) -> None:
        """Take the keys of all attributes together.

        Args:
            spans: anything with Attributes.
        """
        maps = (
            spans["Attributes"].rechunk().to_frame().select(keys=pl.col("Attributes").map.keys(), values=pl.col("Attributes").map.values())
        )
        lengths = maps["keys"].list.len().fill_null(0).to_numpy()
        self.height = spans.height
        self._values = maps["values"].explode(empty_as_null=False, keep_nulls=False)
        encoded = maps["keys"].explode(empty_as_null=False, keep_nulls=False).to_arrow().dictionary_encode()
        self._names: list[str] = encoded.dictionary.to_pylist()
        self._codes = encoded.indices.to_numpy(zero_copy_only=False)
        self._rows = np.repeat(np.arange(self.height), lengths)
        self._columns: dict[str, pl.Series] = {}
        self._asked: set[str] = set()

    def __call__(self, name: str) -> pl.Expr:
        """An attribute; null where a span has none."""
        self._asked.add(name)
        if name not in self._columns:
            code = self._places.get(name)
            if code is None:
                return NONE
            self._columns[name] = self._column(name, np.flatnonzero(self._codes == code))
        return pl.col(name)

    def first(self, *names: str) -> pl.Expr:
        """The first of several attributes that a span has and that is not empty."""
        there = [self(name).replace("", None) for name in names if name in self._places]
        return pl.coalesce(there) if there else NONE

    def any_of(self, *names: str) -> pl.Expr:
        """The first of several attributes that a span has, be it empty."""
        there = [self(name) for name in names if name in self._places]
        return pl.coalesce(there) if there else NONE

    def has(self, *names: str) -> pl.Expr:
        """Whether a span has any of several attributes."""
        there = [self(name).is_not_null() for name in names if name in self._places]
        return pl.any_horizontal(there) if there else NO

    def once(self, name: str, what: pl.Expr) -> pl.Expr:
        """An expression over attributes alone that many others use, worked out here and now; `name` is no attribute's."""
        if name not in self._columns:
            roots = what.meta.root_names()
            if not roots:
                return what
            self._columns[name] = pl.DataFrame([self._columns[root] for root in roots]).select(what.alias(name)).to_series()
        self._asked.add(name)
        return pl.col(name)

    def matching(self, pattern: str) -> pl.Series:
        """Whether any of a span's attributes has a name that matches a pattern: a boolean a span."""
        found = np.zeros(self.height, dtype=np.bool_)
        wanted = pl.Series(self._names, dtype=pl.String).str.contains(pattern).to_numpy()
        if wanted.any():
            found[self._rows[wanted[self._codes]]] = True
        return pl.Series(found)

    def entries(self, pattern: str) -> pl.DataFrame:
        """Attributes whose names match a pattern: row (of the spans), key, value."""
        wanted = pl.Series(self._names, dtype=pl.String).str.contains(pattern).to_numpy()
        at = np.flatnonzero(wanted[self._codes]) if wanted.any() else np.zeros(0, dtype=np.int64)
        names = pl.Series("key", self._names, dtype=pl.String)
        return pl.DataFrame(
            [
                pl.Series("row", self._rows[at], dtype=pl.Int64),
                names.gather(pl.Series(self._codes[at], dtype=pl.UInt32)),
                self._values.gather(pl.Series(at, dtype=pl.UInt32)).alias("value"),
            ]
        )

    def forget(self) -> None:
        """Leave out of `frame` what was asked for so far."""
        self._asked.clear()

    def frame(self, beside: pl.DataFrame, rows: np.ndarray | None = None) -> pl.DataFrame:
        """The attributes that were asked for, beside other columns of the same spans; some rows of it."""
        whole = beside.hstack([column for name, column in self._columns.items() if name in self._asked])
        return whole if rows is None else whole[rows]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: code for code, name in enumerate(self._names)}

    def _column(self, name: str, at: np.ndarray) -> pl.Series:
        place = np.full(self.height, -1, dtype=np.int64)
        # The first of several, should a sender repeat a key.
        place[self._rows[at[::-1]]] = at[::-1]
        there = pl.Series(place, dtype=pl.Int64)
        return self._values.gather(there.set(there < 0, None).cast(pl.UInt32)).alias(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a dialect's spans are, as expressions over `Said`, ScopeName, SpanName, StatusCode, StatusMessage and OfClient."""

    call: pl.Expr = NO
    """It calls a model for an answer (no embedding, no ranking)."""
    client: pl.Expr = OF_CLIENT
    """If it is a call: it is the library's that speaks to the model's server, no framework's above it."""
    engine: pl.Expr = NO
    """It is the server's own span of a call."""
    tool: pl.Expr = NO
    chain: pl.Expr = NO
    suspect: pl.Expr = NO
    """It may be a call, and says too little to be read as one."""
    agent: pl.Expr = NONE
    tool_name: pl.Expr = NONE
    tool_call_id: pl.Expr = NONE
    arguments: pl.Expr = NONE
    result: pl.Expr = NONE
    failed: pl.Expr = NO
    """If it is a tool: it failed, and neither its status nor `error.type` says so."""
    error: pl.Expr = NONE
    """The type of an error."""
    model: pl.Expr = NONE
    """As answered, else as asked."""
    response_id: pl.Expr = NONE
    input_tokens: pl.Expr = NONE
    output_tokens: pl.Expr = NONE
    finish: pl.Expr = NONE
    """Why the answer ended: of its first choice."""

    def of(self, frame: pl.DataFrame, request: pl.Expr = NO) -> pl.DataFrame:
        """The columns that `describe` adds, without Convention and Scores.

        Args:
            frame: what the expressions read.
            request: which spans are requests for an answer, and suspects therefore unless they are something else.
        """
        flags = {name: getattr(self, name).fill_null(False) for name in ("call", "engine", "tool", "chain", "suspect")}
        client = self.client.fill_null(False).alias("=client")
        known = frame.with_columns(client, **{f"={name}": flag for name, flag in flags.items()})
        call, engine, tool, chain, suspect, client = (pl.col(f"={name}") for name in (*flags, "client"))
        suspect = (suspect | (request & ~tool & ~chain & ~engine)) & ~call
        known = known.with_columns(suspect.alias("=suspect"), (call | engine | suspect).alias("=called"))
        called, result = pl.col("=called"), pl.when(tool).then(self.result)
        failed = (pl.col("StatusCode") == "Error") | (self.error.fill_null("") != "") | self.failed | result.str.contains(_ERROR_FLAG)
        return known.select(
            IsClient=call & client,
            IsModel=call & ~client,
            IsEngine=engine,
            IsTool=tool & ~call,
            IsChain=chain,
            IsSuspect=pl.col("=suspect"),
            AgentName=self.agent,
            ToolName=pl.when(tool).then(pl.coalesce(self.tool_name, "SpanName")).otherwise(pl.lit("")),
            ToolFailed=tool & failed.fill_null(False),
            ToolCallId=pl.when(tool).then(self.tool_call_id),
            ToolArguments=pl.when(tool).then(self.arguments),
            ToolResult=result,
            ResponseId=pl.when(called).then(self.response_id),
            Model=pl.when(called).then(self.model),
            InputTokens=pl.when(called).then(self.input_tokens.cast(pl.Int64, strict=False)),
            OutputTokens=pl.when(called).then(self.output_tokens.cast(pl.Int64, strict=False)),
        )


def of_json(text: pl.Expr, *fields: str) -> pl.Expr:
    """A field of a JSON object, as text; null where the text is no object or lacks it. Several: the first that is there."""
    return pl.coalesce(text.str.json_path_match(f"$.{name}") for name in fields)


def first_of_list(text: pl.Expr) -> pl.Expr:
    """The first text in a JSON list; the text itself where it is no list."""
    return text.str.extract(r'^\s*\[?\s*"?([^"\],]+)')


def unquoted(text: pl.Expr) -> pl.Expr:
    """What a JSON string says; other text as it is."""
    return text.str.strip_chars('"')


def error_type(said: Said) -> pl.Expr:
    """The type of a span's error, in the words of OpenTelemetry's conventions."""
    return said.first(semconv.ERROR_TYPE, "exception.type")
