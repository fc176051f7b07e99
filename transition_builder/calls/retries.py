"""Retries of one call, and calls that were recorded twice.

In: canonical calls and what they are retries of. Out: the same calls with Retried and DuplicateOf. Invariant: of several retries of one
call exactly one is not Retried, and of several recordings exactly one is no duplicate; choices of one span are neither.

A client that retries makes several calls below one span of its own. The one whose response id is the client's answer's was used;
else the last, in order, that was answered well; else the last. The agent never saw the others.

A call is a duplicate of another where two chained gateways recorded it (one's span lies below the other's), or where
both have the same response id and the same token ids in one attempt. The outer one counts, unless it has no ids and the other has; of
two that are not linked the one that the agent's spans lead to, else the first by span id.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np
import polars as pl

from transition_builder.calls import lineage
from transition_builder.calls.lineage import Forest, Indices, Mask
from transition_builder.schemas import ATTEMPT, SPAN


def mark(
    calls: pl.DataFrame, nodes: pl.DataFrame, tree: Forest, tried: Indices, chained: Indices, none: int, answered: Mapping[int, Set[str]]
) -> pl.DataFrame:
    """Add Retried and DuplicateOf.

    Args:
        calls: canonical calls.
        nodes: described spans.
        tree: over the same nodes.
        tried: for each row of `calls` the client's span of which it is one of several retries.
        chained: for each row the gateway's span above it.
        none: value in place of either where there is none.
        answered: response ids of the answers of those clients.
    """
    retried = np.zeros(calls.height, dtype=np.bool_)
    rows = np.flatnonzero(tried != none)
    if len(rows):
        retried[rows] = _unused(calls[rows], nodes, tree, tried[rows], answered)
    return calls.with_columns(Retried=retried, DuplicateOf=_duplicates(calls, chained, none))


def _unused(calls: pl.DataFrame, nodes: pl.DataFrame, tree: Forest, tried: Indices, answered: Mapping[int, Set[str]]) -> Mask:
    spans, first, row = np.unique(calls["Node"].to_numpy(), return_index=True, return_inverse=True)
    _, group = np.unique(tried[first], return_inverse=True)
    facts = calls.select(*SPAN, "ResponseId", "ByGateway", good=~failed() & ~pl.col("Aborted"))[first]
    where = lineage.paths(nodes, tree, spans)
    order = lineage.order(group, where, facts["ByGateway"].to_numpy(), facts)
    is_clients_answer = np.array(
        [response_id in answered.get(head, ()) for response_id, head in zip(facts["ResponseId"], tried[first].tolist(), strict=True)]
    )
    best = np.lexsort((order, facts["good"].to_numpy(), is_clients_answer, group))
    used = np.zeros(len(spans), dtype=np.bool_)
    used[best[np.append(np.flatnonzero(np.diff(group[best])), len(best) - 1)]] = True
    return ~used[row]


def failed() -> pl.Expr:
    """Return whether a call was answered with an error, or not at all."""
    return (pl.col("ErrorType") != "") | (pl.col("HttpStatus") >= 400)


def _duplicates(calls: pl.DataFrame, chained: Indices, none: int) -> pl.Series:
    """Return the CallId that each call is a duplicate of; empty for the others."""
    repeated = calls["ResponseId"].set(calls["Choice"] != 0, "")
    twice = repeated.is_duplicated() & (repeated != "")
    linked = chained != none
    if not twice.any() and not linked.any():
        return pl.Series("DuplicateOf", [""]).new_from_index(0, calls.height)
    slim = (
        calls.select(
            *ATTEMPT, *SPAN, "Choice", "ResponseId", "Node", ids=pl.col("PromptIds").list.len() > 0, apart=pl.col("ClientNode") == none
        )
        .with_columns(row=pl.int_range(pl.len()), outer=pl.Series(chained))
        .sort("apart", *SPAN, "Choice")
    )
    original = dict[int, int]()
    among = slim.filter(pl.col("ResponseId").is_in(repeated.filter(twice).unique().implode()))
    for rows in among.group_by(*ATTEMPT, "ResponseId", "Choice", maintain_order=True).agg("row")["row"].to_list():
        seen = dict[tuple[bytes, bytes], int]()
        for row in rows:
            ids = _bytes(calls["PromptIds"][row]), _bytes(calls["ResponseIds"][row])
            if ids[1] and (first := seen.setdefault(ids, row)) != row:
                original[row] = first
    if linked.any():
        _link(slim, none, original)
    names, copied = calls["CallId"], [""] * calls.height
    for row, first in original.items():
        while first in original:
            first = original[first]
        copied[row] = names[first]
    return pl.Series("DuplicateOf", copied, dtype=pl.String)


def _bytes(ids: pl.Series) -> bytes:
    return ids.to_numpy().tobytes()


def _link(slim: pl.DataFrame, none: int, original: dict[int, int]) -> None:
    """Mark duplicates among calls of chained gateways; `outer` is the node of the outer span."""
    at = {(node, choice): row for row, node, choice in slim.select("row", "Node", "Choice").iter_rows()}
    ids = dict(slim.select("row", "ids").iter_rows())
    for row, choice, node in slim.filter(pl.col("outer") != none).select("row", "Choice", "outer").iter_rows():
        outer = at.get((node, choice))
        if outer is None:
            continue
        kept, other = (row, outer) if ids[row] and not ids[outer] else (outer, row)
        while kept in original:
            kept = original[kept]
        if other not in original and kept != other:
            original[other] = kept
