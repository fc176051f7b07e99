"""Ids of the runner: in order within a series, and unique across series."""

from __future__ import annotations

from itertools import islice

import pytest

from runner.ids import ordered_ids


def test_ordered_ids_are_sorted_and_unique_across_series() -> None:
    first, second = (list(islice(ordered_ids(), 1000)) for _ in range(2))

    assert first == sorted(first)
    assert len({*first, *second}) == 2000
    assert {len(one) for one in first} == {32}


def test_ordered_ids_later_series_sorts_after(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000_000_000_000
    monkeypatch.setattr("runner.ids.time.time_ns", lambda: now)
    earlier = next(ordered_ids())
    now += 1_000_000

    assert earlier[:12] == f"{1_800_000_000_000:012x}"
    assert earlier < next(ordered_ids())
