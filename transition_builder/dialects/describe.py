"""Classification of spans of any convention.

Invariant: a row a span, in the same order; no content of attributes makes it fail.

A span has one dialect: its scope's, where that determines it (the gateway's, vLLM's, Pydantic AI's, ...), else the first below whose mark
it has. A dialect reads its own spans alone, and of their attributes only those that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import polars as pl

from spangrad import semconv
from transition_builder.dialects import scopes, suspects
from transition_builder.dialects.conventions import (
    agent_lightning,
    gen_ai,
    langfuse,
    mlflow,
    openinference,
    others,
    pydantic_ai,
    traceloop,
    vercel,
    vllm,
)
from transition_builder.dialects.reading import NO, SCORES, AttributeColumns, Reading
from transition_builder.dialects.scores import scores

_GEN_AI_KEYS = r"^gen_ai\."


def _nothing(attributes: AttributeColumns) -> Reading:
    """Read spans of no dialect: some are suspects, and any may name its agent."""
    return Reading(
        suspect=suspects.suspects(),
        agent=attributes.first(semconv.OPENINFERENCE_AGENT_NAME),
        error=attributes.first(semconv.ERROR_TYPE),
    )


READERS: Mapping[str, Callable[[AttributeColumns], Reading]] = {
    "gateway": lambda _: Reading(),  # spangrad_internal.calls holds the facts of its calls
    "vllm": vllm.read,
    "pydantic_ai": pydantic_ai.read,
    "agent_lightning": agent_lightning.read,
    "vercel": vercel.read,
    "openinference": openinference.read,
    "mlflow": mlflow.read,
    "langfuse": langfuse.read,
    "traceloop": traceloop.read,
    **{name: others.reader(words) for name, words in others.VOCABULARIES.items()},
    "gen_ai": gen_ai.read,
    "": _nothing,
}
"""Readers of dialects, by their names in Convention."""
_SERVERS = frozenset({"gateway", "vllm"})
"""Dialects of servers; requests that they make are not calls of a rollout."""
MARKS = {
    "vercel": (vercel.OPERATION,),
    "openinference": (semconv.OPENINFERENCE_KIND,),
    "mlflow": (mlflow.SPAN_TYPE,),
    "agent_lightning": agent_lightning.MARKS,
    "langfuse": (langfuse.OBSERVATION_TYPE,),
    "traceloop": (traceloop.SPAN_KIND, traceloop.REQUEST_TYPE),
}
"""Attributes that mark a dialect's spans, in order of precedence."""


def describe(spans: pl.DataFrame) -> pl.DataFrame:
    """Add the columns of NODES that classify each span to resolved SPANS with RolloutId, among which evaluations may be."""
    attributes, beside = conventions(spans)

    def columns(name: str, reading: Reading) -> Callable[[pl.DataFrame], pl.DataFrame]:
        # A span that carries a dialect's mark and is nothing in it may be the request of a client that was only decorated.
        return partial(reading.of, request=NO if name in _SERVERS else suspects.requests(attributes))

    described = by_dialect(attributes, beside, columns).with_columns(beside["Convention"], _scores(attributes, spans))
    return spans.drop(described.columns, strict=False).hstack(described)


def by_dialect(
    attributes: AttributeColumns, beside: pl.DataFrame, columns: Callable[[str, Reading], Callable[[pl.DataFrame], pl.DataFrame]]
) -> pl.DataFrame:
    """Read spans, those of each dialect together; return a row a span, in their order.

    Args:
        attributes: of the spans.
        beside: Convention, the dialect of each span, and further columns that readings use.
        columns: for a dialect and its reading, a function that makes the rows of the requested attributes.
    """
    convention = beside["Convention"]
    names = convention.unique(maintain_order=True).to_list() or [""]
    parts, order = list[pl.DataFrame](), list[np.ndarray]()
    for name in names:
        rows = (convention == name).arg_true().to_numpy()
        attributes.forget()
        read = columns(name, READERS.get(name, READERS[""])(attributes))
        parts.append(read(attributes.frame(beside, rows if len(names) > 1 else None)))
        order.append(rows)
    row_of = np.empty(convention.len(), dtype=np.int64)
    row_of[np.concatenate(order)] = np.arange(convention.len())
    return pl.concat(parts)[row_of]


def _scores(attributes: AttributeColumns, spans: pl.DataFrame) -> pl.Series | pl.Expr:
    scored = scores(attributes, spans)
    if scored is None:
        return pl.lit([], SCORES).alias("Scores")
    rows = pl.DataFrame({"row": np.arange(spans.height)})
    return rows.join(scored, on="row", how="left", maintain_order="left").select(pl.col("Scores").fill_null([])).to_series()


def conventions(spans: pl.DataFrame) -> tuple[AttributeColumns, pl.DataFrame]:
    """Return the attributes of spans, with ScopeName, SpanName, StatusCode, StatusMessage, OfClient and Convention beside them."""
    attributes = AttributeColumns(spans)
    beside = _beside(spans, attributes)
    return attributes, beside.with_columns(_conventions(attributes, beside).alias("Convention"))


def _beside(spans: pl.DataFrame, attributes: AttributeColumns) -> pl.DataFrame:
    """Return the columns that readings may use beside attributes."""
    client = [scope for scope in spans["ScopeName"].unique() if scopes.is_client(scope or "")]
    return spans.select(
        pl.col("ScopeName", "SpanName", "StatusCode", "StatusMessage").fill_null(""),
        pl.col("ScopeName").is_in(client).fill_null(False).alias("OfClient"),
        attributes.matching(suspects.KEYS).alias(suspects.SPEAKS),
    )


def _conventions(attributes: AttributeColumns, beside: pl.DataFrame) -> pl.Series:
    """Return the dialect of each span; empty where none reads it."""
    by_scope = {scope: name for scope in beside["ScopeName"].unique() if (name := scopes.dialect(scope))}
    of_scope = (
        pl.col("ScopeName").replace_strict(list(by_scope), list(by_scope.values()), default=None, return_dtype=pl.String)
        if by_scope
        else pl.lit(None, pl.String)
    )
    is_marked = {name: attributes.has(*names) for name, names in MARKS.items()}
    for name, words in others.VOCABULARIES.items():
        has_mark = attributes.has(words.mark)
        if words.spans and has_mark is not NO:
            has_mark = has_mark & pl.col("SpanName").str.contains(words.spans)
        if words.named:
            has_mark = has_mark | pl.col("SpanName").str.contains(words.named)
        is_marked[name] = has_mark
    is_marked["gen_ai"] = pl.col("generative")
    marked = [pl.when(has_mark).then(pl.lit(name)) for name, has_mark in is_marked.items() if has_mark is not NO]
    return (
        attributes.frame(beside.with_columns(attributes.matching(_GEN_AI_KEYS).alias("generative")))
        .select(pl.coalesce(of_scope, *marked, pl.lit("")))
        .to_series()
    )
