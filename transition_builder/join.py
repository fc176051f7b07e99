"""One call, however many spans tell of it.

In: described spans, the gateway's calls, and what openai-level spans hold of answers. Out: canonical calls, each
once. Invariant: a call that the gateway recorded is the gateway's; nothing that it saw is counted a second time.

- An openai-level span is *covered* by the gateway's calls below it (usually through an HTTP span; with retries there are
  several), or by the one whose response id its answer repeats (no HTTP instrumentation, so no parent link).
- An openai-level span that is not covered is a call of the plain road, with ids or without. In an attempt that the gateway
  recorded, one that ended in an error is not: what reached the gateway has its own span, the rest never reached the engine.
- A framework's LLM span (ChatOpenAI, generation) is a call only where nothing closer to the wire exists: no gateway call in
  its attempt, no openai-level span in its process, no LLM span below it. It never holds ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder import lineage
from transition_builder.dialects import openinference
from transition_builder.frames import CALLS
from transition_builder.lineage import Forest, Indices
from transition_builder.resolve import NAMED

_ATTEMPT = ["RunId", "RolloutId", "Attempt"]
_SPAN = ["TraceId", "SpanId"]
CANONICAL = [
    *_ATTEMPT,
    *(name for name in CALLS if name not in {*_ATTEMPT, "Mode", "RolloutKey", "RolloutKeySource"}),
    "ByGateway",
    "Node",
    "ClientNode",
]
"""Columns of a canonical call: a row a choice."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Calls, and the spans of the agent's client that are the same calls."""

    calls: pl.DataFrame
    """Canonical calls, with Node (their span) and ClientNode (the openai-level span of the same call; tree.size where there is none)."""
    tree: Forest
    """The forest, where calls found by response id hang below their openai-level spans."""


def uncovered(spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Openai-level spans with no gateway call below them, whose answers are worth reading: at least those that `join` asks for.

    Args:
        spans: SPANS.
        calls: CALLS; those that do not name their rollout cover nothing here, because they may turn out to be nobody's.

    Returns:
        TraceId, SpanId, Timestamp, ServiceName and SpanName of each.
    """
    links = [*_SPAN, "ParentSpanId"]
    recorded = calls.select("RolloutKeySource", *links).filter(NAMED).select(links)
    of_scope = spans.filter((pl.col("RowKind") == "span") & openinference.IS_OF_SCOPE)
    # Usually nothing lies between the two, and that is seen at little cost.
    below = recorded.select("TraceId", SpanId="ParentSpanId")
    apart = of_scope.join(below, on=_SPAN, how="anti").filter(openinference.is_openai())
    apart = apart.select(*_SPAN, "Timestamp", "ServiceName", "SpanName").unique(_SPAN, keep="first", maintain_order=True)
    if apart.is_empty():
        return apart
    recorded = recorded.unique(_SPAN, maintain_order=True)
    own = spans.select("RowKind", *links).filter(pl.col("RowKind") == "span").select(links).unique(_SPAN, keep="first", maintain_order=True)
    nodes = pl.concat([own, recorded.join(own, on=_SPAN, how="anti")])
    at = nodes.select(_SPAN).with_row_index("node")
    marked = np.zeros(nodes.height, dtype=np.bool_)
    marked[_at(of_scope.filter(openinference.is_openai()), at)] = True
    covered = lineage.forest(nodes).nearest(marked)[_at(recorded, at)]
    return apart.filter(pl.Series(~np.isin(_at(apart, at), covered)))


def join(nodes: pl.DataFrame, tree: Forest, gateway_calls: pl.DataFrame, answers: pl.DataFrame) -> Joined:
    """Make canonical calls.

    Args:
        nodes: described, resolved spans of all attempts; the gateway's calls are among them.
        tree: over the same nodes.
        gateway_calls: canonical, resolved.
        answers: ANSWERS of (at least) the uncovered openai-level spans.
    """
    size = tree.size
    at = _locate(nodes, gateway_calls)
    client = _clients(nodes, tree, at)
    index = nodes.select(*_SPAN, *_ATTEMPT).with_row_index("node")
    said = (
        answers.filter(pl.col("ResponseId") != "")
        .join(index, on=_SPAN)
        .unique([*_ATTEMPT, "ResponseId"], keep="first", maintain_order=True)
    )
    by_id = gateway_calls.select(*_ATTEMPT, pl.col("ResponseId").replace("", None)).join(
        said.select(*_ATTEMPT, "ResponseId", "node"), on=[*_ATTEMPT, "ResponseId"], how="left", maintain_order="left"
    )
    told = by_id["node"].cast(pl.Int64).fill_null(size).to_numpy()
    adopted = (client == size) & (told != size)
    client = np.where(adopted, told, client)
    if adopted.any():
        tree = tree.with_parents(at[adopted], told[adopted])

    recorded = gateway_calls.select(_ATTEMPT).unique()
    taken = np.zeros(size, dtype=np.bool_)
    taken[client[client != size]] = True
    marked = nodes.with_row_index("Node").with_columns(pl.Series("taken", taken), pl.Series("inner", _has_model_below(nodes, tree)))
    by_gateway = marked.join(recorded, on=_ATTEMPT, how="semi", nulls_equal=True)["Node"]
    with_client = marked.filter("IsOpenAI").select(*_ATTEMPT, "ProcessId", "ServiceName").unique()
    seen = pl.col("Node").is_in(by_gateway.implode())
    openai = marked.filter(pl.col("IsOpenAI") & ~pl.col("taken") & ~(seen & (pl.col("StatusCode") == "Error")))
    framework = marked.filter(pl.col("IsModel") & ~pl.col("inner") & ~seen).join(
        with_client, on=[*_ATTEMPT, "ProcessId", "ServiceName"], how="anti"
    )
    plain = openinference.calls(pl.concat([openai, framework]), answers)

    calls = pl.concat(
        [
            gateway_calls.with_columns(pl.Series("Node", at), pl.Series("ClientNode", client)).select(CANONICAL),
            plain.with_columns(pl.col("Node").cast(pl.Int64), pl.lit(size, pl.Int64).alias("ClientNode")).select(CANONICAL),
        ]
    )
    return Joined(calls, tree)


def _locate(nodes: pl.DataFrame, calls: pl.DataFrame) -> Indices:
    """The nodes of calls' spans."""
    return _at(calls, nodes.select(_SPAN).with_row_index("node"))


def _at(spans: pl.DataFrame, index: pl.DataFrame) -> Indices:
    return spans.select(_SPAN).join(index, on=_SPAN, how="left", maintain_order="left")["node"].cast(pl.Int64).to_numpy()


def _clients(nodes: pl.DataFrame, tree: Forest, at: Indices) -> Indices:
    """The nearest openai-level span above each gateway call; tree.size where there is none."""
    return tree.nearest(nodes["IsOpenAI"].to_numpy())[at]


def _has_model_below(nodes: pl.DataFrame, tree: Forest) -> np.ndarray:
    """Whether a node has a framework's LLM span below it."""
    model = nodes["IsModel"].to_numpy()
    above = tree.nearest(model)[tree.parent[: tree.size][model]]
    found = np.zeros(tree.size + 1, dtype=np.bool_)
    found[above] = True
    return found[: tree.size]
