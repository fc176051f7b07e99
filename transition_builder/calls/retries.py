"""Retries of one call, and calls that were recorded twice: which are no calls of their own.

Invariant: of several retries of one call exactly one was used, and of several recordings exactly one is no duplicate; choices of one span
are neither.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from transition_builder.calls.call_groups import CallGroups
from transition_builder.calls.forest import Indices, Mask
from transition_builder.schemas import ATTEMPT, CHOICE, SPAN


def failed() -> pl.Expr:
    """Return whether a call was answered with an error, or not at all."""
    return (pl.col("ErrorType") != "") | (pl.col("HttpStatus") >= 400)


def unused(nodes: pl.DataFrame, groups: CallGroups, calls: Indices, outcome: pl.DataFrame, answers: pl.DataFrame) -> Mask:
    """Return a mask of the retries that the agent never saw.

    The one whose response id is the client's answer's was used; else the last that was answered well; else the last.

    Args:
        nodes: described spans.
        groups: of the same.
        calls: the innermost span of each call, in order.
        outcome: ResponseId of each call, and `good`: it was answered well.
        answers: ANSWERS.
    """
    heads, best = groups.retried(calls), dict[int, tuple[bool, bool, int]]()
    unused_calls = heads != groups.tree.size
    answered = _answered(nodes, groups, heads[unused_calls], answers) if unused_calls.any() else {}
    for call in np.flatnonzero(unused_calls).tolist():
        head = int(heads[call])
        key = (outcome["ResponseId"][call] in answered.get(head, ()), outcome["good"][call], call)
        best[head] = max(best.get(head, key), key)
    unused_calls[[call for *_, call in best.values()]] = False
    return unused_calls


def _answered(nodes: pl.DataFrame, groups: CallGroups, heads: Indices, answers: pl.DataFrame) -> dict[int, set[str]]:
    """Return response ids that clients' spans name, nested clients included, by the outer client's node."""
    outer = groups.tree.outermost(groups.client)[:-1]
    clients = np.flatnonzero(groups.client & np.isin(outer, heads))
    spans = nodes.select(*SPAN, "ResponseId")[clients].with_columns(head=outer[clients])
    raw = spans.drop("ResponseId").join(answers.select(*SPAN, "ResponseId"), on=SPAN)
    response_ids = dict[int, set[str]]()
    for head, response_id in pl.concat([part.select("head", "ResponseId") for part in (spans, raw)]).iter_rows():
        if response_id:
            response_ids.setdefault(head, set()).add(response_id)
    return response_ids


def duplicates(calls: pl.DataFrame, chained: Indices, none: int) -> pl.Series:
    """Return the CallId that each call is a duplicate of; empty for the others.

    A call is a duplicate of another where two chained gateways recorded it (one's span lies below the other's), or where both have the
    same response id and the same token ids in one attempt. The outer one counts, unless it has no ids and the other has; of two that are
    not linked the one that the agent's spans lead to, else the first by span id.

    Args:
        calls: canonical calls, a row a choice.
        chained: for each row the gateway's span above it.
        none: the value of `chained` and ClientNode where there is none.
    """
    repeated = calls["ResponseId"].set(calls["ChoiceIndex"] != 0, "")
    is_repeated = repeated.is_duplicated() & (repeated != "")
    linked = np.flatnonzero(chained != none)
    if not is_repeated.any() and not len(linked):
        return pl.repeat("", calls.height, eager=True)
    original = dict[int, int]()

    def first_of(row: int) -> int:
        while row in original:
            row = original[row]
        return row

    order = calls.select(*ATTEMPT, *CHOICE, "ResponseId", row=pl.int_range(pl.len()), apart=pl.col("ClientNode") == none)
    among = order.filter(pl.col("ResponseId").is_in(repeated.filter(is_repeated).unique().implode())).sort("apart", *CHOICE)
    seen = dict[tuple[object, ...], int]()
    for row, *key in among.select("row", *ATTEMPT, "ResponseId", "ChoiceIndex").iter_rows():
        ids = [calls[name][row].to_numpy().tobytes() for name in ("PromptIds", "ResponseIds")]
        if ids[1] and (first := seen.setdefault((*key, *ids), row)) != row:
            original[row] = first
    spans = calls.select("Node", "ChoiceIndex", ids=pl.col("PromptIds").list.len() > 0)
    at = {(node, choice): row for row, (node, choice, _) in enumerate(spans.iter_rows())} if len(linked) else {}
    for row in order[linked].sort("apart", *CHOICE)["row"].to_list():
        outer = at.get((int(chained[row]), spans["ChoiceIndex"][row]))
        if outer is None:
            continue
        counts, other = (row, outer) if spans["ids"][row] and not spans["ids"][outer] else (outer, row)
        counts = first_of(counts)
        if other not in original and counts != other:
            original[other] = counts
    names = calls["CallId"]
    return pl.Series([names[first_of(row)] if row in original else "" for row in range(calls.height)], dtype=pl.String)
