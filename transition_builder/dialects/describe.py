"""What each span is, whichever convention says so.

In: spans of any conventions. Out: NODES. Invariant: a row a span, in the same order; whatever stands in the attributes, nothing fails.

A span has one dialect: its scope's, where that alone tells (the gateway's, vLLM's, Pydantic AI's, ...), else the first below whose mark it
carries. A dialect reads its own spans alone, and of their attributes only those that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

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
from transition_builder.dialects.reading import NO, SCORES, Reading, Said
from transition_builder.dialects.scores import scores

_GEN_AI_KEYS = r"^gen_ai\."


def _gateway(said: Said) -> Reading:
    """The gateway's own spans: otel.calls holds what they say of calls."""
    base = gen_ai.read(said)
    return replace(base, call=NO, tool=NO, chain=NO, suspect=NO, agent=pl.lit(None, pl.String))


def _nothing(said: Said) -> Reading:
    """Spans of no dialect: some are suspects, and any may say whose it is."""
    return Reading(
        suspect=suspects.suspects(said), agent=said.first(semconv.OPENINFERENCE_AGENT_NAME), error=said.first(semconv.ERROR_TYPE)
    )


READERS: Mapping[str, Callable[[Said], Reading]] = {
    "gateway": _gateway,
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
"""The dialects, by the names that Convention has."""
_SERVERS = frozenset({"gateway", "vllm"})
"""Dialects of those who answer calls: what they ask in turn is nobody's call."""
_MARKS = {
    "vercel": (vercel.OPERATION,),
    "openinference": (semconv.OPENINFERENCE_KIND,),
    "mlflow": (mlflow.SPAN_TYPE,),
    "agent_lightning": agent_lightning.MARKS,
    "langfuse": (langfuse.OBSERVATION_TYPE,),
    "traceloop": (traceloop.SPAN_KIND, traceloop.REQUEST_TYPE),
}
"""Attributes that mark a dialect's spans, the first dialect first."""


def describe(spans: pl.DataFrame) -> pl.DataFrame:
    """Add what each span is.

    Args:
        spans: SPANS and RolloutId, resolved; evaluations may be among them.

    Returns:
        The same rows with the further columns of NODES, and ResponseId, Model, InputTokens, OutputTokens (null where the span is neither
        call, engine call nor suspect, or does not say).
    """
    said = Said(spans)
    beside = _beside(spans, said)
    convention = _conventions(said, beside)
    names = convention.unique(maintain_order=True).to_list()
    parts, order = [Reading().of(beside.clear())], [np.zeros(0, dtype=np.int64)]
    for name in names:
        rows = (convention == name).arg_true().to_numpy() if len(names) > 1 else None
        said.forget()
        reading = READERS[name](said)
        # A span that carries a dialect's mark and is nothing in it may be the request of a client that was only decorated.
        request = NO if name in _SERVERS else suspects.requests(said)
        parts.append(reading.of(said.frame(beside, rows), request))
        order.append(np.arange(spans.height) if rows is None else rows)
    place = np.empty(spans.height, dtype=np.int64)
    place[np.concatenate(order)] = np.arange(spans.height)
    described = pl.concat(parts)[place].with_columns(convention.alias("Convention"), _scores(said, spans))
    return spans.drop(described.columns, strict=False).hstack(described)


def _scores(said: Said, spans: pl.DataFrame) -> pl.Series:
    found = scores(said, spans)
    if found is None:
        return pl.repeat([], spans.height, dtype=SCORES, eager=True).alias("Scores")
    rows = pl.DataFrame({"row": np.arange(spans.height)})
    return rows.join(found, on="row", how="left", maintain_order="left").select(pl.col("Scores").fill_null([])).to_series()


def conventions(spans: pl.DataFrame) -> tuple[Said, pl.DataFrame]:
    """The attributes of spans, and beside them ScopeName, SpanName, StatusCode, StatusMessage, OfClient and Convention."""
    said = Said(spans)
    beside = _beside(spans, said)
    return said, beside.with_columns(_conventions(said, beside).alias("Convention"))


def _beside(spans: pl.DataFrame, said: Said) -> pl.DataFrame:
    """The columns that readings may use beside attributes."""
    client = [scope for scope in spans["ScopeName"].unique() if scopes.is_client(scope or "")]
    return spans.select(
        pl.col("ScopeName", "SpanName", "StatusCode", "StatusMessage").fill_null(""),
        pl.col("ScopeName").is_in(client).fill_null(False).alias("OfClient"),
        said.matching(suspects.KEYS).alias(suspects.SPEAKS),
    )


def _conventions(said: Said, beside: pl.DataFrame) -> pl.Series:
    """The dialect of each span; empty where none reads it."""
    told = {scope: name for scope in beside["ScopeName"].unique() if (name := scopes.dialect(scope))}
    of_scope = (
        pl.col("ScopeName").replace_strict(list(told), list(told.values()), default=None, return_dtype=pl.String)
        if told
        else pl.lit(None, pl.String)
    )
    marked = [pl.when(said.has(*names)).then(pl.lit(name)) for name, names in _MARKS.items()]
    for name, words in others.VOCABULARIES.items():
        there = said.has(words.mark)
        if words.spans:
            there = there & pl.col("SpanName").str.contains(words.spans)
        if words.named:
            there = there | pl.col("SpanName").str.contains(words.named)
        marked.append(pl.when(there).then(pl.lit(name)))
    marked.append(pl.when("generative").then(pl.lit("gen_ai")))
    return (
        said.frame(beside.with_columns(said.matching(_GEN_AI_KEYS).alias("generative")))
        .select(pl.coalesce(of_scope, *marked, pl.lit("")))
        .to_series()
    )
