"""One call, however many spans tell of it.

In: described spans, the gateway's calls, and what spans hold of raw answers. Out: canonical calls, each once. Invariant: a call that the
gateway recorded is the gateway's, and nothing that it saw is counted a second time; every other span that tells of a call is part of
exactly one.

Spans of calls that lie directly inside each other (no agent's and no tool's span between) are one family: the framework's above the
client's above the HTTP request's above the gateway's and the engine's, often with one or two missing. Families that are not linked and
tell of one call are put below each other by `twins`. In each family

- the gateway's spans are its calls; whatever is above them tells of them, and what is below belongs to them;
- else each innermost client span is a call, else each innermost framework span, else the engine's, else the outermost suspect. Of the
  spans that tell of that one call alone, the innermost that holds token ids gives the call its name;
- several calls below one client span are its tries of one call (`tries`).

In an attempt that the gateway recorded, a family without it that ended in an error is no call: it never reached the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from transition_builder import dialects
from transition_builder.calls import lineage, retries, span_matching
from transition_builder.calls.call_groups import Families
from transition_builder.calls.lineage import Forest, Indices, Mask
from transition_builder.completeness.resolve import NAMED
from transition_builder.frames import empty
from transition_builder.schemas import CALLS, DROPPED

_ATTEMPT = ["RunId", "RolloutId", "Attempt"]
_SPAN = ["TraceId", "SpanId"]
CANONICAL = [
    *_ATTEMPT,
    *(name for name in CALLS if name not in {*_ATTEMPT, "Mode", "RolloutKey", "RolloutKeySource"}),
    "Convention",
    "Unfinished",
    "ByGateway",
    "Node",
    "ClientNode",
    "TopNode",
]
"""Columns of a canonical call, a row a choice, before `tries` adds its own."""
UNKNOWN = "unknown"
"""Convention of a call that no dialect reads."""
_SAID = ["ResponseId", "Model", "InputTokens", "OutputTokens"]
_ANSWERING = ["Timestamp", "ServiceName", "SpanName", "ScopeName", "StatusCode", "StatusMessage", "Attributes"]
"""What tells whether a span holds an answer, and where that is."""
_KINDS = ["IsClient", "IsModel", "IsEngine", "IsSuspect"]


@dataclass(frozen=True, slots=True)
class Joined:
    """Calls, and the spans that tell of them."""

    calls: pl.DataFrame
    """Canonical calls, and
    Node: their span; ClientNode: the innermost client's span above a gateway's span, or framework's where there is no client
    (tree.size: neither, or no gateway); TopNode: the outermost span that tells of the call.
    Retried (another try of the same client span was the one used), DuplicateOf (the CallId of the same call, recorded twice),
    Dropped (a sender kept attributes of one of the spans back)."""
    tree: Forest
    """The forest, with unlinked families below each other."""
    call_of: Indices
    """For each node, and the one above all, the Node of the call that it tells of; tree.size where of none."""
    call_like: Mask
    """Which nodes tell of calls."""


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
    real = spans.select("RowKind", *_SPAN).with_row_index("row").filter(pl.col("RowKind") == "span")
    # Usually nothing lies between the two, and that is seen at little cost.
    rows = real.join(recorded.select("TraceId", SpanId="ParentSpanId"), on=_SPAN, how="anti", maintain_order="left")["row"]
    apart = spans.select(*_SPAN, *_ANSWERING)[rows]
    apart = apart.filter(dialects.holds_answer(apart))
    apart = apart.select(*_SPAN, "Timestamp", "ServiceName", "SpanName").unique(_SPAN, keep="first", maintain_order=True)
    if apart.is_empty():
        return apart
    holders = spans[real["row"]]
    holders = holders.filter(dialects.holds_answer(holders))
    recorded = recorded.unique(_SPAN, maintain_order=True)
    own = spans.select("RowKind", *links).filter(pl.col("RowKind") == "span").select(links).unique(_SPAN, keep="first", maintain_order=True)
    nodes = pl.concat([own, recorded.join(own, on=_SPAN, how="anti")])
    at = nodes.select(_SPAN).with_row_index("node")
    marked = np.zeros(nodes.height, dtype=np.bool_)
    marked[_at(holders, at)] = True
    covered = lineage.forest(nodes).nearest(marked)[_at(recorded, at)]
    return apart.filter(pl.Series(~np.isin(_at(apart, at), covered)))


def join(
    nodes: pl.DataFrame, tree: Forest, gateway_calls: pl.DataFrame, answers: pl.DataFrame, dropped: pl.DataFrame | None = None
) -> Joined:
    """Make canonical calls.

    Args:
        nodes: described, resolved spans of all attempts; the gateway's calls are among them.
        tree: over the same nodes.
        gateway_calls: canonical, resolved.
        answers: ANSWERS of (at least) the uncovered spans that may hold some.
        dropped: DROPPED.
    """
    size = tree.size
    answers = answers.unique([*_SPAN, "Choice"], keep="first", maintain_order=True) if answers.height else answers
    at = _at(gateway_calls, nodes.select(_SPAN).with_row_index("node"))
    family = _families(nodes, tree, at)
    loose = np.flatnonzero(family.tops & ~family.above_gateway & ~family.is_gateway)
    told = np.zeros(len(family.node), dtype=np.bool_)
    if len(loose):
        paired = _pair(nodes, tree, family, gateway_calls, answers)
        told[list(paired.told)] = True
        if paired.below:
            lower, above = np.array(list(paired.below)), np.array(list(paired.below.values()))
            began = nodes.select(*_SPAN, "ProcessId", "ServiceName", "Seq", start=pl.col("Timestamp").cast(pl.Int64))
            upper = family.innermost(above, lambda numbers: [*map(_place, began[family.node[numbers]].iter_rows(named=True))])
            tree = tree.with_parents(family.node[lower], family.node[upper])
            family = family.linked(lower, upper)

    wire, given = family.calls(told, _holders(nodes, family, answers))
    plain = nodes[family.node[given]].with_columns(
        Convention=pl.when(pl.Series(family.suspect[wire], dtype=pl.Boolean)).then(pl.lit(UNKNOWN)).otherwise("Convention")
    )
    of_gateway, names = family.number[at], np.append(family.node, size)
    recorded = gateway_calls.with_columns(
        Node=at,
        ClientNode=names[family.speaker(of_gateway)],
        TopNode=family.node[family.roots[of_gateway]],
        Convention=pl.lit("gateway"),
        Unfinished=pl.lit(False),
    ).select(CANONICAL)
    if plain.height:
        places = plain.select(_SPAN).with_columns(Node=family.node[given], TopNode=family.node[family.roots[given]])
        own = dialects.calls(plain, answers).join(places, on=_SPAN, how="left", maintain_order="left")
        recorded = pl.concat([recorded, own.with_columns(ClientNode=pl.lit(size, pl.Int64)).select(CANONICAL)], how="vertical_relaxed")
    # A plain call may be named after a span above the innermost one; that one tells of which client it is a try.
    inner = np.arange(len(family.node) + 1)
    inner[given] = wire
    leaves = inner[family.number[recorded["Node"].to_numpy()]]
    tried = family.tried(leaves)
    answered = _answered(nodes, family, np.unique(tried[tried != len(family.node)]), answers)
    calls = retries.mark(recorded, nodes, tree, names[tried], names[family.chained(leaves)], size, answered)
    call_of = np.full(size + 1, size, dtype=np.int64)
    owners = family.owners(leaves, calls["Retried"].to_numpy(), _order(calls, nodes, tree, family.roots[leaves]))
    outer = np.append(np.arange(len(family.node)), len(family.node))
    outer[wire] = given
    call_of[family.node] = names[outer[owners]]
    kept_back = _kept_back(nodes, empty(DROPPED) if dropped is None else dropped, call_of)
    call_like = np.zeros(size, dtype=np.bool_)
    call_like[family.node] = True
    return Joined(calls.with_columns(Dropped=kept_back[calls["Node"].to_numpy()]), tree, call_of, call_like)


def _place(span: Mapping[str, Any]) -> tuple[str, int, str]:
    """Process, sequence number or time there, span id: where a span began."""
    ours = bool(span["ProcessId"]) and not span["ProcessId"].startswith(lineage.FOREIGN)
    return (
        span["ProcessId"] or f"{lineage.FOREIGN}{span['ServiceName']}",
        span["Seq"] if ours else span["start"],
        span["TraceId"] + span["SpanId"],
    )


def _order(calls: pl.DataFrame, nodes: pl.DataFrame, tree: Forest, families: Indices) -> Indices:
    """The place of each call among those of its attempt; 0 where every family has one call, and nothing depends on it."""
    spans, first, span_of = np.unique(calls["Node"].to_numpy(), return_index=True, return_inverse=True)
    if len(np.unique(families)) == len(spans):
        return np.zeros(calls.height, dtype=np.int64)
    once = calls.select(*_ATTEMPT, *_SPAN, "ByGateway")[first]
    attempt = once.select(pl.struct(_ATTEMPT).rank("dense").cast(pl.Int64)).to_series().to_numpy()
    where = lineage.paths(nodes, tree, spans)
    return lineage.order(attempt, where, once["ByGateway"].to_numpy(), once.select(_SPAN))[span_of]


def _answered(nodes: pl.DataFrame, family: Families, clients: Indices, answers: pl.DataFrame) -> dict[int, set[str]]:
    """Response ids that clients' own spans name, those of clients inside of them included; by the outer ones' nodes."""
    if not len(clients):
        return {}
    heads = family.tree.topmost(family.client)[:-1]
    members = np.flatnonzero(family.client & np.isin(heads, clients))
    spans = nodes.select(*_SPAN, "ResponseId")[family.node[members]].with_columns(head=family.node[heads[members]])
    raw = spans.drop("ResponseId").join(answers.select(*_SPAN, "ResponseId"), on=_SPAN)
    found = dict[int, set[str]]()
    for head, said in pl.concat([spans.select("head", "ResponseId"), raw.select("head", "ResponseId")]).iter_rows():
        if said:
            found.setdefault(head, set()).add(said)
    return found


def _kept_back(nodes: pl.DataFrame, dropped: pl.DataFrame, call_of: Indices) -> Mask:
    """For each node whether it is the span of a call of which a sender kept attributes back."""
    found = np.zeros(len(call_of), dtype=np.bool_)
    if dropped.height:
        spans = nodes.select(_SPAN).with_row_index("node").join(dropped, on=_SPAN, how="semi")["node"].cast(pl.Int64).to_numpy()
        found[spans] = True
        found[call_of[spans]] = True
    return found


def _at(spans: pl.DataFrame, index: pl.DataFrame) -> Indices:
    """The nodes of spans."""
    return spans.select(_SPAN).join(index, on=_SPAN, how="left", maintain_order="left")["node"].cast(pl.Int64).to_numpy()


def _families(nodes: pl.DataFrame, tree: Forest, at: Indices) -> Families:
    """The spans of calls, linked to the nearest ones that they lie directly inside of."""
    kinds = nodes.select(*_KINDS, "IsTool", IsAgent=pl.col("AgentName").is_not_null())
    client, model, engine, suspect, tool, agent = (kinds[name].to_numpy() for name in kinds.columns)
    recorded = np.zeros(tree.size, dtype=np.bool_)
    recorded[at] = True
    call_like = client | model | engine | suspect | recorded
    node = np.flatnonzero(call_like)
    number = np.full(tree.size + 1, len(node), dtype=np.int64)
    number[node] = np.arange(len(node))
    return Families.of(
        node,
        number,
        Forest.of(number[tree.nearest(call_like | tool | agent)[tree.parent[node]]]),
        recorded[node],
        client[node] & ~recorded[node],
        model[node] & ~client[node] & ~recorded[node],
        suspect[node] & ~(client | model | engine | recorded)[node],
    )


def _holders(nodes: pl.DataFrame, family: Families, answers: pl.DataFrame) -> Mask:
    """Which of the families' spans hold token ids."""
    found = np.zeros(len(family.node), dtype=np.bool_)
    if answers.height:
        with_ids = answers.filter(pl.col("PromptIds").list.len() > 0).select(_SPAN).unique()
        node = nodes.select(_SPAN).with_row_index("node").join(with_ids, on=_SPAN, how="semi")["node"].cast(pl.Int64).to_numpy()
        number = family.number[node]
        found[number[number != len(found)]] = True
    return found


def _pair(nodes: pl.DataFrame, tree: Forest, family: Families, gateway_calls: pl.DataFrame, answers: pl.DataFrame) -> span_matching.Paired:
    """Pair the families of every attempt in which there is anything to pair."""
    tops = np.flatnonzero(family.tops)
    attempts = nodes.select(_ATTEMPT)[family.node[tops]].with_columns(
        top=pl.Series(tops), bare=pl.Series(~(family.above_gateway | family.is_gateway)[tops])
    )
    worth = attempts.filter(pl.col("bare").any().over(_ATTEMPT) & (pl.len().over(_ATTEMPT) > 1))
    # One bare family alone is what it is; a bare one beside linked ones may have ended in an error before it reached the gateway.
    if worth.is_empty():
        return span_matching.Paired({}, frozenset())
    below, told = dict[int, int](), set[int]()
    kin = _kin(nodes, tree, family, gateway_calls, answers, worth["top"].to_numpy())
    for some in worth.group_by(_ATTEMPT, maintain_order=True).agg("top")["top"].to_list():
        found = span_matching.pair([kin[top] for top in some])
        below.update(found.below)
        told.update(found.told)
    return span_matching.Paired(below, frozenset(told))


def _kin(
    nodes: pl.DataFrame, tree: Forest, family: Families, gateway_calls: pl.DataFrame, answers: pl.DataFrame, tops: Indices
) -> dict[int, span_matching.Kin]:
    """What each family says of itself."""
    members = np.flatnonzero(np.isin(family.roots, tops))
    facts = nodes.select(
        *_SPAN, "ProcessId", "ServiceName", "Seq", "Timestamp", "Duration", "StatusCode", "Convention", "ScopeName", *_SAID
    )[family.node[members]].with_columns(
        top=pl.Series(family.roots[members]),
        rank=pl.Series(family.distance[members]),
        own=pl.Series(members),
        depth=pl.Series(family.tree.depth[members]),
    )
    raw = answers.select(
        *_SPAN, Answered=pl.col("ResponseId").replace("", None), **{name: pl.col(name) for name in ("PromptIds", "ResponseIds")}
    )
    recorded = gateway_calls.select(
        *_SPAN, "PromptIds", "ResponseIds", Answered=pl.col("ResponseId").replace("", None), Asked=pl.col("Model").replace("", None)
    )
    held = pl.concat([raw, recorded], how="diagonal").join(facts.select(*_SPAN, "top", "own"), on=_SPAN)
    ids = dict[int, set[tuple[bytes, bytes]]]()
    responses, tokens = dict[int, set[str]](), dict[int, tuple[int, int]]()
    asked_of, models = dict[int, str | None](), dict[int, str]()
    for top, one, prompt, response, answered, asked in (
        held.sort("own")
        .select("top", "own", "PromptIds", "ResponseIds", "Answered", "Asked" if "Asked" in held.columns else pl.lit(None).alias("Asked"))
        .iter_rows()
    ):
        if answered:
            responses.setdefault(top, set()).add(answered)
        if prompt and response:
            ids.setdefault(top, set()).add((np.array(prompt, np.uint32).tobytes(), np.array(response, np.uint32).tobytes()))
        if family.is_gateway[one]:
            tokens.setdefault(top, (len(prompt or ()), len(response or ())))
            asked_of.setdefault(top, asked)
    kin = dict[int, span_matching.Kin]()
    inside = family.inside(tree, tops)
    named = facts.sort("depth", *_SPAN).with_columns(
        start=pl.col("Timestamp").cast(pl.Int64), lasted=pl.col("Duration").cast(pl.Int64, strict=False).fill_null(0)
    )
    for (top,), some in named.group_by("top", maintain_order=True):
        assert isinstance(top, int)
        rows = some.to_dicts()
        first = next(row for row in rows if row["own"] == top)
        responses.setdefault(top, set()).update(row["ResponseId"] for row in rows if row["ResponseId"])
        for row in rows:
            if row["Model"]:
                models.setdefault(top, row["Model"])
            if row["InputTokens"] is not None and row["OutputTokens"] is not None:
                tokens.setdefault(top, (row["InputTokens"], row["OutputTokens"]))
        ranks = [row["rank"] for row in rows]
        wire = [rank for rank in ranks if rank not in (span_matching.REQUEST, span_matching.ENGINE)]
        kin[top] = span_matching.Kin(
            name=top,
            top=first["rank"],
            bottom=min(wire or ranks),
            place=_place(first),
            start=first["start"],
            end=first["start"] + first["lasted"],
            convention=f"{first['Convention']} {first['ScopeName']}",
            failed=first["StatusCode"] == "Error",
            engine=span_matching.ENGINE in ranks,
            responses=frozenset(responses[top]),
            ids=frozenset(ids.get(top, ())),
            # What the agent asked for goes before what a gateway in between may have made of it.
            model=models.get(top, asked_of.get(top)),
            tokens=tokens.get(top),
            inside=inside.get(top, frozenset()),
        )
    return kin
