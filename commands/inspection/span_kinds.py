"""Kinds of spans for the record of a rollout, as the builder's dialects recognise them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spangrad import semconv
from spangrad.store.rollout.record import UNKNOWN_MODEL_CALL

_READ = frozenset({"gateway", "llm", "engine"})
_KINDS = {
    "IsTool": "tool",
    "IsClient": "llm",
    "IsModel": "llm",
    "IsEngine": "engine",
    "IsChain": "chain",
    "IsSuspect": UNKNOWN_MODEL_CALL,
}


def describe(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield kind, agent and tool of each span, a row of spangrad.rollout_spans; empty where no dialect knows them."""
    import polars as pl

    from transition_builder import dialects
    from transition_builder.schemas import SPANS

    columns = {name: [row["Started" if name == "Timestamp" else name] for row in rows] for name in SPANS}
    frame = pl.DataFrame(columns, schema=dict(SPANS), strict=False).with_columns(RolloutId=pl.col("RolloutKey"))
    descriptions = list(dialects.describe(frame).select(*_KINDS, "AgentName", "ToolName").iter_rows(named=True))
    kinds = [_kind(row, description) for row, description in zip(rows, descriptions, strict=True)]
    # Any request to a model server counts as suspect; in a trace with calls that a dialect reads, it belongs to one of those.
    read = {row["TraceId"] for row, kind in zip(rows, kinds, strict=True) if kind in _READ}
    for row, kind, description in zip(rows, kinds, descriptions, strict=True):
        known = "" if kind == UNKNOWN_MODEL_CALL and row["TraceId"] in read else kind
        yield known, description["AgentName"] or "", (description["ToolName"] or "") if description["IsTool"] else ""


def _kind(row: Mapping[str, Any], description: Mapping[str, Any]) -> str:
    if row["ScopeName"] == semconv.GATEWAY_SCOPE:
        return "gateway"
    known = next((kind for name, kind in _KINDS.items() if description[name]), "")
    return row["Attributes"].get(semconv.OPENINFERENCE_KIND, "").lower() or known
