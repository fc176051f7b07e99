"""Late spans: number of rows of each rollout, and the rollouts that have more rows than their build read."""

from __future__ import annotations

from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tests.support.spans import SpanFactory
from transition_builder.schemas import BUILT
from transition_builder.source import late_spans

TIME = SpanFactory.time
Row = tuple[str, str, str, str]
"""RunId, RolloutKey, RolloutKeySource, TraceId."""
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["", "one", "two"]),
        st.sampled_from(["a", "b", "t1"]),
        st.sampled_from(["rollout", "session", "trace"]),
        st.sampled_from(["t1", "t2", ""]),
    ),
    max_size=12,
)


def counts(rows: list[Row]) -> dict[tuple[str, str], int]:
    frame = pl.DataFrame(
        rows, schema=["RunId", "RolloutKey", "RolloutKeySource", "TraceId"], orient="row", schema_overrides={"RunId": pl.String}
    )
    rollouts = pl.DataFrame(
        [(run, key) for run in ("", "one", "two") for key in ("a", "b", "t1")], schema=["RunId", "RolloutId"], orient="row"
    )
    counted = late_spans.count(late_spans.tally(frame.cast(pl.String)), rollouts)
    return {(run, rollout): rows for run, rollout, rows in counted.rows()}


@given(ROWS)
def test_late_spans_count_rows_of_rollout_and_unnamed_rows_of_its_traces(rows: list[Row]) -> None:
    expected = dict[tuple[str, str], int]()
    for run in ("", "one", "two"):
        for rollout in ("a", "b", "t1"):
            of_key = {n for n, row in enumerate(rows) if row[1] == rollout and row[0] in {"", run}}
            named = {n for n in of_key if rows[n][2] == "rollout"}
            own = named or of_key
            traces = {rows[n][3] for n in own} - {""}
            of_rollout = own | {n for n, row in enumerate(rows) if row[2] != "rollout" and row[3] in traces}
            if of_rollout:
                expected[run, rollout] = len(of_rollout)
    assert counts(rows) == expected


def built(rollout: str, *, watermark: float, at: float, read: int = 1) -> dict[str, Any]:
    row = {"RunId": "run", "RolloutId": rollout, "Revision": 0, "Content": 1}
    return row | {"Watermark": TIME(watermark), "RowsRead": read, "IngestedAt": TIME(at)}


def test_late_spans_doubtful_are_recent_builds_soon_after_arrival() -> None:
    rows = [
        built("of old", watermark=999, at=1000),
        built("long there", watermark=0, at=2000),
        built("fresh", watermark=1990, at=2000),
        built("a little before", watermark=1900, at=1901),
    ]
    assert late_spans.maybe_incomplete(pl.DataFrame(rows, schema=dict(BUILT)))["RolloutId"].to_list() == ["fresh", "a little before"]


def test_late_spans_more_lists_rollouts_with_more_rows_than_read() -> None:
    rows = pl.DataFrame([built(name, watermark=0, at=1, read=3) for name in ("same", "more", "expired", "gone")], schema=dict(BUILT))
    there = pl.DataFrame({"RunId": ["run"] * 3, "RolloutId": ["same", "more", "expired"], "Rows": [3, 4, 2]})
    assert late_spans.with_new_rows(rows, there).rows() == [("run", "more", 4)]
