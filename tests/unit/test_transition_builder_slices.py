"""Slices of production: whole rollouts, oldest first, as many as time and backlog allow."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import polars as pl

from transition_builder.slices import (
    BACKLOG_SLICE_SECONDS,
    FIRST_SLICE,
    LARGEST_SLICE,
    SLICE_SECONDS,
    SMALLEST_SLICE,
    SPANS_OF_BACKLOG,
    SlicePace,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def drained(pace: SlicePace, backlog: int, slice_cost: float, rollout_cost: float, spans: int = 0) -> list[int]:
    """Build a backlog by a pace, where slices and rollouts take so many seconds; return the sizes of slices."""
    sizes, left = list[int](), backlog
    while left:
        size = pace.begin(left, backlog, SLICE_SECONDS)
        pace.count(size, size * spans)
        pace.done(slice_cost + size * rollout_cost)
        sizes.append(size)
        left -= size
    return sizes


def test_slices_hold_whole_rollouts_oldest_first() -> None:
    names = [f"r{age:03}" for age in range(300, 0, -1)]
    arrived = [{"RolloutId": name, "IngestedAt": NOW - timedelta(seconds=300 - at)} for at, name in enumerate(names)]
    rows = pl.DataFrame([*arrived, *({**row, "IngestedAt": NOW} for row in arrived)])
    sizes, built_before, seen = list[int](), list[int](), list[str]()

    def look() -> None:
        built_before.append(len(seen))

    for rollouts in SlicePace().slices(rows, "RolloutId", lambda: SLICE_SECONDS, look):
        seen += rollouts["RolloutId"].unique(maintain_order=True).to_list()
        sizes.append(rollouts.height)
    assert (seen, sizes, built_before) == (names, [2 * FIRST_SLICE, 2 * (300 - FIRST_SLICE)], [FIRST_SLICE, 300])
    assert list(SlicePace().slices(rows.clear(), "RolloutId", lambda: SLICE_SECONDS, lambda: None)) == []


def test_slices_of_each_backlog_begin_with_few_rollouts() -> None:
    pace = SlicePace()
    drained(pace, 20_000, 0.2, 0.0005)
    rows = pl.DataFrame({"RolloutId": [f"r{at}" for at in range(8 * FIRST_SLICE)], "IngestedAt": [NOW] * 8 * FIRST_SLICE})
    sizes = [part.height for part in pace.slices(rows, "RolloutId", lambda: SLICE_SECONDS, lambda: None)]
    assert sizes[:2] == [FIRST_SLICE, 2 * FIRST_SLICE]


def test_slices_are_paced_by_their_own_time_alone() -> None:
    pace = SlicePace()
    rows = pl.DataFrame({"RolloutId": [f"r{at}" for at in range(FIRST_SLICE)], "IngestedAt": [NOW] * FIRST_SLICE})
    # The builder builds training between two slices.
    assert len(list(pace.slices(rows, "RolloutId", lambda: SLICE_SECONDS, lambda: time.sleep(2 * SLICE_SECONDS)))) == 1
    assert pace.begin(2 * FIRST_SLICE, 2 * FIRST_SLICE, SLICE_SECONDS) == 2 * FIRST_SLICE


def test_slices_without_a_backlog_take_their_time() -> None:
    pace = SlicePace()
    drained(pace, FIRST_SLICE, 0.05, 0.001)
    size = 0
    for _ in range(20):
        size = pace.begin(SMALLEST_SLICE * 4, SMALLEST_SLICE * 4, SLICE_SECONDS)
        pace.done(0.05 + size * 0.002)
    # 100 rollouts take 0.25 s.
    assert 80 <= size <= 110


def test_slices_of_a_backlog_grow_up_to_their_largest() -> None:
    sizes = drained(SlicePace(), 20_000, 0.2, 0.0005)
    assert sizes[:4] == [FIRST_SLICE, 2 * FIRST_SLICE, 4 * FIRST_SLICE, LARGEST_SLICE]
    assert max(sizes) == LARGEST_SLICE
    # In slices that take 0.25 s, it would be 200.
    assert len(sizes) < 40


def test_slices_of_a_backlog_are_a_quarter_of_it_to_its_end() -> None:
    pace = SlicePace()
    drained(pace, 20_000, 0.2, 0.0005)
    # 100 rollouts take 0.25 s.
    assert drained(pace, 2000, 0.2, 0.0005) == [500] * 4


def test_slices_of_a_backlog_on_a_slow_machine_take_seconds_at_most() -> None:
    # A slice takes four times SLICE_SECONDS without a single rollout.
    sizes = drained(SlicePace(), 20_000, 1.0, 0.0025)
    assert max(sizes) <= 420
    assert all(1.0 + size * 0.0025 <= BACKLOG_SLICE_SECONDS * 1.05 for size in sizes)
    assert sum(sizes) / sum(1.0 + size * 0.0025 for size in sizes) > 0.9 * 400 / BACKLOG_SLICE_SECONDS


def test_slices_of_a_slow_backlog_hold_4096_spans() -> None:
    sizes = drained(SlicePace(), 20_000, 10.0, 0.025, spans=8)
    assert max(sizes) == SPANS_OF_BACKLOG // 8
    assert sizes.count(SPANS_OF_BACKLOG // 8) > 30
    assert max(drained(SlicePace(), 20_000, 10.0, 0.025, spans=1000)[1:]) == SMALLEST_SLICE


def test_slice_after_waiting_rollouts_is_sized_by_spans_of_those_built() -> None:
    pace = SlicePace()
    pace.begin(20_000, 20_000, SLICE_SECONDS)
    # All others wait.
    pace.count(1, 1000)
    pace.done(30.0)
    assert pace.begin(20_000, 20_000, SLICE_SECONDS) == SMALLEST_SLICE


def test_slices_that_take_too_long_shrink_to_the_smallest() -> None:
    assert drained(SlicePace(), 2000, 30.0, 0.1)[1:-1] == [SMALLEST_SLICE] * 58


def test_slice_after_one_that_failed_has_half_as_many() -> None:
    pace = SlicePace()
    drained(pace, 20_000, 0.1, 0.0005)
    failed = [pace.begin(20_000, 20_000, SLICE_SECONDS) for _ in range(20)]
    assert all(after == max(1, before // 2) for before, after in pairwise(failed))
    assert failed[-1] == 1
    # Once the failure is over, they grow again.
    assert drained(pace, 5000, 0.1, 0.0005)[:3] == [1, 2, 4]
    assert LARGEST_SLICE // 2 < pace.begin(20_000, 20_000, SLICE_SECONDS) <= LARGEST_SLICE


def test_pace_of_a_backlog_after_a_slow_slice_of_few_rollouts_is_unchanged() -> None:
    pace, before = SlicePace(), 0
    for _ in range(10):
        before = pace.begin(20_000, 20_000, SLICE_SECONDS)
        pace.done(0.1 + before * 0.0005)
    assert pace.begin(3, 3, SLICE_SECONDS) == 3
    pace.done(2 * SLICE_SECONDS)
    assert pace.begin(20_000, 20_000, SLICE_SECONDS) == before == LARGEST_SLICE
