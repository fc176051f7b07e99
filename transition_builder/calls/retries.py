"""Retries of one call, and calls that were recorded twice: which are no calls of their own.

Invariant: of several retries of one call exactly one was used, and of several recordings exactly one is no duplicate; choices of one span
are neither.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from transition_builder.calls.call_groups import CLIENT, CallGroups
from transition_builder.calls.forest import Indices, Mask
from transition_builder.schemas import ATTEMPT, CHOICE, SPAN


def failed() -> pl.Expr:
    """Return whether a call was answered with an error, or not at all."""
    return (pl.col("ErrorType") != "") | (pl.col("HttpStatus") >= 400)


def unused(nodes: pl.DataFrame, groups: CallGroups, calls: Indices, outcome: pl.DataFrame, answers: pl.DataFrame) -> Mask:
    """Return a mask of the retries that the agent never saw, among calls in order, given by their innermost spans.

    The one whose response id is the client's answer's was used; else the last that was answered well; else the last. `outcome` has the
    ResponseId of each call, and whether it was answered well (`good`).
    """
    heads, best = groups.retried(calls), dict[int, tuple[bool, bool, int]]()
    unused_calls = heads != groups.tree.size
    answered = _answered(nodes, groups, heads[unused_calls], answers) if unused_calls.any() else set()
    for call in np.flatnonzero(unused_calls).tolist():
        head = int(heads[call])
        key = ((head, outcome["ResponseId"][call]) in answered, outcome["good"][call], call)
        best[head] = max(best.get(head, key), key)
    unused_calls[[call for *_, call in best.values()]] = False
    return unused_calls


def _answered(nodes: pl.DataFrame, groups: CallGroups, heads: Indices, answers: pl.DataFrame) -> set[tuple[int, str]]:
    """Return the response ids that clients' spans name, nested clients included, each with the outer client's node."""
    clients = np.flatnonzero((groups.distance == CLIENT) & np.isin(groups.clients[:-1], heads))
    spans = nodes[[*SPAN, "ResponseId"]][clients].with_columns(head=groups.clients[clients])
    raw = spans.drop("ResponseId").join(answers[[*SPAN, "ResponseId"]], on=SPAN)
    named = pl.concat([part[["head", "ResponseId"]] for part in (spans, raw)])
    return {*named.filter(pl.col("ResponseId") != "").iter_rows()}


def duplicates(calls: pl.DataFrame, chained: Indices, none: int) -> pl.Series:
    """Return the CallId that each call is a duplicate of; empty for the others.

    A call is a duplicate of another where two chained gateways recorded it (one's span lies below the other's), or where both have the
    same response id and the same token ids in one attempt. The outer one counts, unless it has no ids and the other has; of two that are
    not linked the one that the agent's spans lead to, else the first by span id. `calls` has a row a choice, `chained` the gateway's span
    above each; `none` is the value of that and of ClientNode where there is none.
    """
    repeated = calls["ResponseId"].set(calls["ChoiceIndex"] != 0, "")
    is_repeated = repeated.is_duplicated() & (repeated != "")
    if not is_repeated.any() and (chained == none).all():
        return pl.repeat("", calls.height, eager=True)
    numbered = calls.with_columns(row=pl.int_range(pl.len()), outer=chained, has_ids=pl.col("PromptIds").list.len() > 0)
    in_order = [pl.col("ClientNode") == none, *CHOICE]

    may_repeat = pl.col("ResponseId").is_in(repeated.filter(is_repeated).implode()) & (pl.col("ResponseIds").list.len() > 0)
    recording = [*ATTEMPT, "ResponseId", "ChoiceIndex", "PromptIds", "ResponseIds"]
    recordings = numbered.filter(may_repeat).sort(in_order).select("row", first=pl.col("row").first().over(recording))
    original = dict(recordings.filter(pl.col("row") != pl.col("first")).iter_rows())

    def first_of(row: int) -> int:
        while row in original:
            row = original[row]
        return row

    links = numbered.select(*CHOICE, "ClientNode", "Node", "row", "outer", "has_ids")
    outer_rows = links.select("ChoiceIndex", "has_ids", outer="Node", outer_row="row")
    linked = links.join(outer_rows, on=["outer", "ChoiceIndex"]).sort(in_order)
    for row, outer, row_has_ids, outer_has_ids in linked.select("row", "outer_row", "has_ids", "has_ids_right").iter_rows():
        counts, other = (row, outer) if row_has_ids and not outer_has_ids else (outer, row)
        counts = first_of(counts)
        if other not in original and counts != other:
            original[other] = counts
    return pl.Series([calls["CallId"][first_of(row)] if row in original else "" for row in range(calls.height)], dtype=pl.String)
