"""Spans whose raw answers are worth reading, as `reconstruct` may need them: clients without a gateway call below them."""

from __future__ import annotations

import polars as pl

from transition_builder import dialects
from transition_builder.calls.forest import SpanForest, nodes_of
from transition_builder.completeness.resolve import NAMED
from transition_builder.schemas import SPAN

_ANSWERING = ["Timestamp", "ServiceName", "SpanName", "ScopeName", "StatusCode", "StatusMessage", "Attributes"]
"""Columns that show whether a span holds a response, and where."""


def uncovered(spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return openai-level SPANS without a gateway call below them: TraceId, SpanId, Timestamp, ServiceName and SpanName.

    CALLS that do not name their rollout cover nothing here, because they may turn out to belong to no rollout.
    """
    links = [*SPAN, "ParentSpanId"]
    recorded = calls[["RolloutKeySource", *links]].filter(NAMED)[links]
    real = spans[["RowKind", *links]].with_row_index("row").filter(pl.col("RowKind") == "span")
    # Usually nothing lies between a client and the gateway: then only the other spans are examined.
    parents = recorded[["TraceId", "ParentSpanId"]].rename({"ParentSpanId": "SpanId"})
    apart = _holders(spans, real.join(parents, on=SPAN, how="anti", maintain_order="left")["row"])
    if apart.is_empty():
        return apart
    holders = pl.concat([apart, _holders(spans, real.join(parents, on=SPAN, how="semi")["row"])])
    own = real[links].unique(SPAN, keep="first", maintain_order=True)
    nodes = pl.concat([own, recorded.unique(SPAN, maintain_order=True).join(own, on=SPAN, how="anti")])
    forest = SpanForest.of_spans(nodes)
    covered = forest.nearest(forest.mask(nodes_of(holders, nodes)))[nodes_of(recorded, nodes)]
    return apart.join(nodes[covered[covered != forest.size]], on=SPAN, how="anti", maintain_order="left")


def _holders(spans: pl.DataFrame, rows: pl.Series) -> pl.DataFrame:
    """Return the keys of those of some rows that hold an answer, each once."""
    among = spans[[*SPAN, *_ANSWERING]][rows]
    if among.height:
        among = among.filter(dialects.holds_answer(among))
    return among[[*SPAN, "Timestamp", "ServiceName", "SpanName"]].unique(SPAN, keep="first", maintain_order=True)
