"""Canonical calls: one for each call, however many spans record it.

In: described spans, the gateway's calls, and the raw answers in spans. Out: canonical calls, each once. Invariant: a call that the
gateway recorded is the gateway's, and nothing that it saw is counted a second time; every other span of a call is part of
exactly one.

Spans of calls that lie directly inside each other (no agent's and no tool's span between) are one call group: the framework's above the
client's above the HTTP request's above the gateway's and the engine's, often with one or two missing. Unlinked groups of one call
are hung below each other by `span_matching`. In each group

- the gateway's spans are its calls; the spans above and below them belong to these calls;
- else each innermost client span is a call, else each innermost framework span, else the engine's, else the outermost suspect. Of the
  spans of that one call alone, the innermost that holds token ids gives the call its name;
- several calls below one client span are retries of one call (`retries`).

In an attempt that the gateway recorded, a group without a gateway span that ended in an error is no call: it never reached the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from transition_builder import dialects
from transition_builder.calls import lineage, retries, span_matching
from transition_builder.calls.call_groups import CallGroups
from transition_builder.calls.lineage import Forest, Indices, Mask
from transition_builder.completeness.resolve import NAMED
from transition_builder.frames import empty
from transition_builder.schemas import ATTEMPT, CALLS, DROPPED, SPAN

CANONICAL = [
    *ATTEMPT,
    *(name for name in CALLS if name not in {*ATTEMPT, "Mode", "RolloutKey", "RolloutKeySource"}),
    "Convention",
    "Unfinished",
    "ByGateway",
    "Node",
    "ClientNode",
    "TopNode",
]
"""Columns of a canonical call, a row a choice, before `retries` adds its own."""
UNKNOWN = "unknown"
"""Convention of a call that no dialect reads."""
_RESPONSE_FACTS = ["ResponseId", "Model", "InputTokens", "OutputTokens"]
_ANSWERING = ["Timestamp", "ServiceName", "SpanName", "ScopeName", "StatusCode", "StatusMessage", "Attributes"]
"""Columns that show whether a span holds a response, and where."""
_KINDS = ["IsClient", "IsModel", "IsEngine", "IsSuspect"]


@dataclass(frozen=True, slots=True)
class Joined:
    """Calls, and the spans that describe them."""

    calls: pl.DataFrame
    """Canonical calls, and
    Node: their span; ClientNode: the innermost client span above a gateway span, or framework span where there is no client
    (tree.size: neither, or no gateway); TopNode: the outermost span of the call.
    Retried (another retry under the same client span was the one used), DuplicateOf (the CallId of the same call, recorded twice),
    Dropped (a sender withheld attributes of one of the spans)."""
    tree: Forest
    """Forest with unlinked call groups hung below each other."""
    call_of: Indices
    """Node of the call that each node belongs to, with an entry for the virtual root; tree.size where of none."""
    call_like: Mask
    """Mask of the nodes that belong to calls."""


def uncovered(spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return openai-level spans without a gateway call below them, whose answers are worth reading: at least those that `join` needs.

    Args:
        spans: SPANS.
        calls: CALLS; those that do not name their rollout cover nothing here, because they may turn out to belong to no rollout.

    Returns:
        TraceId, SpanId, Timestamp, ServiceName and SpanName of each.
    """
    links = [*SPAN, "ParentSpanId"]
    recorded = calls.select("RolloutKeySource", *links).filter(NAMED).select(links)
    real = spans.select("RowKind", *SPAN).with_row_index("row").filter(pl.col("RowKind") == "span")
    # Usually nothing lies between the two; this check is cheap.
    rows = real.join(recorded.select("TraceId", SpanId="ParentSpanId"), on=SPAN, how="anti", maintain_order="left")["row"]
    apart = spans.select(*SPAN, *_ANSWERING)[rows]
    apart = apart.filter(dialects.holds_answer(apart))
    apart = apart.select(*SPAN, "Timestamp", "ServiceName", "SpanName").unique(SPAN, keep="first", maintain_order=True)
    if apart.is_empty():
        return apart
    holders = spans[real["row"]]
    holders = holders.filter(dialects.holds_answer(holders))
    recorded = recorded.unique(SPAN, maintain_order=True)
    own = spans.select("RowKind", *links).filter(pl.col("RowKind") == "span").select(links).unique(SPAN, keep="first", maintain_order=True)
    nodes = pl.concat([own, recorded.join(own, on=SPAN, how="anti")])
    at = nodes.select(SPAN).with_row_index("node")
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
    answers = answers.unique([*SPAN, "Choice"], keep="first", maintain_order=True) if answers.height else answers
    at = _at(gateway_calls, nodes.select(SPAN).with_row_index("node"))
    call_spans = _call_spans(nodes, tree, at)
    loose = np.flatnonzero(call_spans.tops & ~call_spans.above_gateway & ~call_spans.is_gateway)
    absorbed = np.zeros(len(call_spans.node), dtype=np.bool_)
    if len(loose):
        paired = _pair(nodes, tree, call_spans, gateway_calls, answers)
        absorbed[list(paired.absorbed)] = True
        if paired.below:
            lower, above = np.array(list(paired.below)), np.array(list(paired.below.values()))
            began = nodes.select(*SPAN, "ProcessId", "ServiceName", "Seq", start=pl.col("Timestamp").cast(pl.Int64))
            upper = call_spans.innermost(above, lambda numbers: [*map(_place, began[call_spans.node[numbers]].iter_rows(named=True))])
            tree = tree.with_parents(call_spans.node[lower], call_spans.node[upper])
            call_spans = call_spans.linked(lower, upper)

    wire, given = call_spans.calls(absorbed, _holders(nodes, call_spans, answers))
    plain = nodes[call_spans.node[given]].with_columns(
        Convention=pl.when(pl.Series(call_spans.suspect[wire], dtype=pl.Boolean)).then(pl.lit(UNKNOWN)).otherwise("Convention")
    )
    of_gateway, names = call_spans.number[at], np.append(call_spans.node, size)
    recorded = gateway_calls.with_columns(
        Node=at,
        ClientNode=names[call_spans.speaker(of_gateway)],
        TopNode=call_spans.node[call_spans.roots[of_gateway]],
        Convention=pl.lit("gateway"),
        Unfinished=pl.lit(False),
    ).select(CANONICAL)
    if plain.height:
        places = plain.select(SPAN).with_columns(Node=call_spans.node[given], TopNode=call_spans.node[call_spans.roots[given]])
        own = dialects.calls(plain, answers).join(places, on=SPAN, how="left", maintain_order="left")
        recorded = pl.concat([recorded, own.with_columns(ClientNode=pl.lit(size, pl.Int64)).select(CANONICAL)], how="vertical_relaxed")
    # A call without the gateway may be named after a span above the innermost one; the innermost one shows which client it is a retry of.
    inner = np.arange(len(call_spans.node) + 1)
    inner[given] = wire
    leaves = inner[call_spans.number[recorded["Node"].to_numpy()]]
    tried = call_spans.tried(leaves)
    answered = _answered(nodes, call_spans, np.unique(tried[tried != len(call_spans.node)]), answers)
    calls = retries.mark(recorded, nodes, tree, names[tried], names[call_spans.chained(leaves)], size, answered)
    call_of = np.full(size + 1, size, dtype=np.int64)
    owners = call_spans.owners(leaves, calls["Retried"].to_numpy(), _order(calls, nodes, tree, call_spans.roots[leaves]))
    outer = np.append(np.arange(len(call_spans.node)), len(call_spans.node))
    outer[wire] = given
    call_of[call_spans.node] = names[outer[owners]]
    withheld = _withheld(nodes, empty(DROPPED) if dropped is None else dropped, call_of)
    call_like = np.zeros(size, dtype=np.bool_)
    call_like[call_spans.node] = True
    return Joined(calls.with_columns(Dropped=withheld[calls["Node"].to_numpy()]), tree, call_of, call_like)


def _place(span: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return where a span began: process, sequence number or time there, trace and span id."""
    ours = bool(span["ProcessId"]) and not span["ProcessId"].startswith(lineage.FOREIGN)
    return (
        span["ProcessId"] or f"{lineage.FOREIGN}{span['ServiceName']}",
        span["Seq"] if ours else span["start"],
        span["TraceId"] + span["SpanId"],
    )


def _order(calls: pl.DataFrame, nodes: pl.DataFrame, tree: Forest, group_roots: Indices) -> Indices:
    """Return each call's place among those of its attempt; 0 where every group has one call, and nothing depends on it."""
    spans, first, span_of = np.unique(calls["Node"].to_numpy(), return_index=True, return_inverse=True)
    if len(np.unique(group_roots)) == len(spans):
        return np.zeros(calls.height, dtype=np.int64)
    once = calls.select(*ATTEMPT, *SPAN, "ByGateway")[first]
    attempt = once.select(pl.struct(ATTEMPT).rank("dense").cast(pl.Int64)).to_series().to_numpy()
    where = lineage.paths(nodes, tree, spans)
    return lineage.order(attempt, where, once["ByGateway"].to_numpy(), once.select(SPAN))[span_of]


def _answered(nodes: pl.DataFrame, call_spans: CallGroups, clients: Indices, answers: pl.DataFrame) -> dict[int, set[str]]:
    """Return response ids that clients' spans name, nested clients included, by the outer client's node."""
    if not len(clients):
        return {}
    heads = call_spans.tree.topmost(call_spans.client)[:-1]
    members = np.flatnonzero(call_spans.client & np.isin(heads, clients))
    spans = nodes.select(*SPAN, "ResponseId")[call_spans.node[members]].with_columns(head=call_spans.node[heads[members]])
    raw = spans.drop("ResponseId").join(answers.select(*SPAN, "ResponseId"), on=SPAN)
    response_ids = dict[int, set[str]]()
    for head, response_id in pl.concat([spans.select("head", "ResponseId"), raw.select("head", "ResponseId")]).iter_rows():
        if response_id:
            response_ids.setdefault(head, set()).add(response_id)
    return response_ids


def _withheld(nodes: pl.DataFrame, dropped: pl.DataFrame, call_of: Indices) -> Mask:
    """Return, for each node, whether it is the span of a call of which a sender withheld attributes."""
    withheld = np.zeros(len(call_of), dtype=np.bool_)
    if dropped.height:
        spans = nodes.select(SPAN).with_row_index("node").join(dropped, on=SPAN, how="semi")["node"].cast(pl.Int64).to_numpy()
        withheld[spans] = True
        withheld[call_of[spans]] = True
    return withheld


def _at(spans: pl.DataFrame, index: pl.DataFrame) -> Indices:
    """Return the nodes of spans."""
    return spans.select(SPAN).join(index, on=SPAN, how="left", maintain_order="left")["node"].cast(pl.Int64).to_numpy()


def _call_spans(nodes: pl.DataFrame, tree: Forest, at: Indices) -> CallGroups:
    """Return the spans of calls, linked to the nearest ones that they lie directly inside of."""
    kinds = nodes.select(*_KINDS, "IsTool", IsAgent=pl.col("AgentName").is_not_null())
    client, model, engine, suspect, tool, agent = (kinds[name].to_numpy() for name in kinds.columns)
    recorded = np.zeros(tree.size, dtype=np.bool_)
    recorded[at] = True
    call_like = client | model | engine | suspect | recorded
    node = np.flatnonzero(call_like)
    number = np.full(tree.size + 1, len(node), dtype=np.int64)
    number[node] = np.arange(len(node))
    return CallGroups.of(
        node,
        number,
        Forest.of(number[tree.nearest(call_like | tool | agent)[tree.parent[node]]]),
        recorded[node],
        client[node] & ~recorded[node],
        model[node] & ~client[node] & ~recorded[node],
        suspect[node] & ~(client | model | engine | recorded)[node],
    )


def _holders(nodes: pl.DataFrame, call_spans: CallGroups, answers: pl.DataFrame) -> Mask:
    """Return a mask of the groups' spans that hold token ids."""
    holds = np.zeros(len(call_spans.node), dtype=np.bool_)
    if answers.height:
        with_ids = answers.filter(pl.col("PromptIds").list.len() > 0).select(SPAN).unique()
        node = nodes.select(SPAN).with_row_index("node").join(with_ids, on=SPAN, how="semi")["node"].cast(pl.Int64).to_numpy()
        number = call_spans.number[node]
        holds[number[number != len(holds)]] = True
    return holds


def _pair(
    nodes: pl.DataFrame, tree: Forest, call_spans: CallGroups, gateway_calls: pl.DataFrame, answers: pl.DataFrame
) -> span_matching.Paired:
    """Match the call groups of every attempt in which there is anything to match."""
    tops = np.flatnonzero(call_spans.tops)
    attempts = nodes.select(ATTEMPT)[call_spans.node[tops]].with_columns(
        top=pl.Series(tops), bare=pl.Series(~(call_spans.above_gateway | call_spans.is_gateway)[tops])
    )
    worth = attempts.filter(pl.col("bare").any().over(ATTEMPT) & (pl.len().over(ATTEMPT) > 1))
    # A single bare group needs no matching; a bare one beside linked ones may have ended in an error before it reached the gateway.
    if worth.is_empty():
        return span_matching.Paired({}, frozenset())
    below, absorbed = dict[int, int](), set[int]()
    groups = _call_groups(nodes, tree, call_spans, gateway_calls, answers, worth["top"].to_numpy())
    for attempt_tops in worth.group_by(ATTEMPT, maintain_order=True).agg("top")["top"].to_list():
        matched = span_matching.pair([groups[top] for top in attempt_tops])
        below.update(matched.below)
        absorbed.update(matched.absorbed)
    return span_matching.Paired(below, frozenset(absorbed))


def _call_groups(
    nodes: pl.DataFrame, tree: Forest, call_spans: CallGroups, gateway_calls: pl.DataFrame, answers: pl.DataFrame, tops: Indices
) -> dict[int, span_matching.CallSpans]:
    """Return the facts of each call group that `span_matching` compares."""
    members = np.flatnonzero(np.isin(call_spans.roots, tops))
    facts = nodes.select(
        *SPAN, "ProcessId", "ServiceName", "Seq", "Timestamp", "Duration", "StatusCode", "Convention", "ScopeName", *_RESPONSE_FACTS
    )[call_spans.node[members]].with_columns(
        top=pl.Series(call_spans.roots[members]),
        rank=pl.Series(call_spans.distance[members]),
        own=pl.Series(members),
        depth=pl.Series(call_spans.tree.depth[members]),
    )
    raw = answers.select(
        *SPAN, Answered=pl.col("ResponseId").replace("", None), **{name: pl.col(name) for name in ("PromptIds", "ResponseIds")}
    )
    recorded = gateway_calls.select(
        *SPAN, "PromptIds", "ResponseIds", Answered=pl.col("ResponseId").replace("", None), Asked=pl.col("Model").replace("", None)
    )
    held = pl.concat([raw, recorded], how="diagonal").join(facts.select(*SPAN, "top", "own"), on=SPAN)
    ids = dict[int, set[tuple[bytes, bytes]]]()
    responses, tokens = dict[int, set[str]](), dict[int, tuple[int, int]]()
    requested_model, models = dict[int, str | None](), dict[int, str]()
    for top, number, prompt, response, answered, requested in (
        held.sort("own")
        .select("top", "own", "PromptIds", "ResponseIds", "Answered", "Asked" if "Asked" in held.columns else pl.lit(None).alias("Asked"))
        .iter_rows()
    ):
        if answered:
            responses.setdefault(top, set()).add(answered)
        if prompt and response:
            ids.setdefault(top, set()).add((np.array(prompt, np.uint32).tobytes(), np.array(response, np.uint32).tobytes()))
        if call_spans.is_gateway[number]:
            tokens.setdefault(top, (len(prompt or ()), len(response or ())))
            requested_model.setdefault(top, requested)
    groups = dict[int, span_matching.CallSpans]()
    inside = call_spans.inside(tree, tops)
    named = facts.sort("depth", *SPAN).with_columns(
        start=pl.col("Timestamp").cast(pl.Int64), lasted=pl.col("Duration").cast(pl.Int64, strict=False).fill_null(0)
    )
    for (top,), spans_of_top in named.group_by("top", maintain_order=True):
        assert isinstance(top, int)
        rows = spans_of_top.to_dicts()
        first = next(row for row in rows if row["own"] == top)
        responses.setdefault(top, set()).update(row["ResponseId"] for row in rows if row["ResponseId"])
        for row in rows:
            if row["Model"]:
                models.setdefault(top, row["Model"])
            if row["InputTokens"] is not None and row["OutputTokens"] is not None:
                tokens.setdefault(top, (row["InputTokens"], row["OutputTokens"]))
        ranks = [row["rank"] for row in rows]
        wire = [rank for rank in ranks if rank not in (span_matching.REQUEST, span_matching.ENGINE)]
        groups[top] = span_matching.CallSpans(
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
            # The model that the agent requested takes precedence over the one that a gateway in between may have set.
            model=models.get(top, requested_model.get(top)),
            tokens=tokens.get(top),
            inside=inside.get(top, frozenset()),
        )
    return groups
