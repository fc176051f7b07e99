"""Facts that arrivals give of their rollouts, on hand-made rows."""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from tests.support.spans import SpanFactory
from transition_builder.completeness.complete import facts
from transition_builder.schemas import ARRIVALS, COUNTS, PRESENCE, ROOTS


def test_facts_count_each_span_once_and_date_last_delivery() -> None:
    spans = SpanFactory()
    failed = spans.root(attempt=0, calls=1, final=False, failure="crash")
    spans.call(failed, attempt=0)
    root = spans.root(attempt=1, calls=2)
    spans.evaluation(root, 0.5)
    spans.evaluation(root, name="style", kind="evaluation_log", Attributes={"gen_ai.evaluation.label": "no score"})
    calls = [spans.call(root, attempt=1, choices=2) for _ in range(2)]
    begin = spans.time(0)
    rows = [row | {"IngestedAt": begin + timedelta(seconds=place)} for place, row in enumerate(spans.spans)]
    again = [row | {"IngestedAt": begin + timedelta(seconds=100)} for row in rows if row["SpanId"] in (root, calls[1])]
    tables = facts(pl.DataFrame(rows + again, schema=dict(ARRIVALS)))

    def at(seconds: int) -> datetime:
        return begin + timedelta(seconds=seconds)

    first, second = (spans.trace(f"run.r.{attempt}") for attempt in (0, 1))
    same = ("run", "r", "rollout")
    known = ("g", 2, "t")
    assert tables.roots.schema == pl.Schema(dict(ROOTS))
    assert tables.roots.sort("Attempt").rows() == [
        ("run", "train", "r", 0, *known, 1, False, "crash", first, failed, at(0)),
        ("run", "train", "r", 1, *known, 2, True, "", second, root, at(2)),
    ]
    assert tables.presence.schema == pl.Schema(dict(PRESENCE))
    assert tables.presence.sort("Attempt").rows() == [(*same, 0, first, 2, 0, at(1)), (*same, 1, second, 9, 1, at(100))]
    assert tables.counts.schema == pl.Schema(dict(COUNTS))
    assert tables.counts.sort("Attempt").rows() == [(*same, 0, first, 1), (*same, 1, second, 2)]


def arrived(spans: SpanFactory) -> pl.DataFrame:
    """All of them, a second apart."""
    rows = [row | {"IngestedAt": spans.time(place)} for place, row in enumerate(spans.spans)]
    return pl.DataFrame(rows, schema=dict(ARRIVALS))


def test_facts_count_gateway_calls_of_attempt_only() -> None:
    """It counts those that name it. Of two gateways behind each other, the outer one's span is the call's."""
    spans = SpanFactory()
    root = spans.root(calls=2)
    outer = spans.call(spans.client(root), process="outer gateway")
    spans.call(outer, process="inner gateway")
    spans.call(spans.span("POST", outer), process="inner gateway")
    spans.call(root)
    spans.spans[-1] |= {"RunId": "", "RolloutKey": spans.trace("run.r.0"), "RolloutKeySource": "trace"}
    counts = facts(arrived(spans)).counts
    assert counts.rows() == [("run", "r", "rollout", 0, spans.trace("run.r.0"), 1)]


def test_facts_two_deliveries_of_root_use_final_one() -> None:
    spans = SpanFactory()
    spans.root(final=False, failure="exception")
    again = spans.spans[0] | {"Attributes": {"spangrad.rollout.final": "true", "spangrad.rollout.failure": "cancelled"}}
    spans.spans.append(again)
    assert facts(arrived(spans)).roots.select("Final", "Failure", "IngestedAt").rows() == [(True, "cancelled", spans.time(1))]


def test_facts_of_no_arrivals_are_empty() -> None:
    tables = facts(pl.DataFrame(schema=dict(ARRIVALS)))
    assert [frame.height for frame in (tables.roots, tables.presence, tables.counts)] == [0, 0, 0]
