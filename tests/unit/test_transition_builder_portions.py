"""Portions of the builder: the rollouts that are built at a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.spans import SpanFactory
from transition_builder import batch_sizes
from transition_builder.batch_sizes import BuildBatches
from transition_builder.frames import empty
from transition_builder.schemas import ROLLOUTS

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def rollouts(calls: list[int | None]) -> pl.DataFrame:
    """Rollouts with that many calls, the last the oldest."""
    rows = [
        {"RunId": "run", "RolloutId": f"r{place}", "Calls": many, "IngestedAt": BEGIN - timedelta(seconds=place)}
        for place, many in enumerate(calls)
    ]
    return pl.concat([empty(ROLLOUTS), pl.DataFrame(rows, schema_overrides={"Calls": ROLLOUTS["Calls"]})], how="diagonal_relaxed")


@given(st.lists(st.none() | st.integers(0, 9000), max_size=30))
def test_portions_contain_every_rollout_once_oldest_first(calls: list[int | None]) -> None:
    cut = list(BuildBatches().of(rollouts(calls)))
    assert [name for portion in cut for name in portion["RolloutId"]] == [f"r{place}" for place in reversed(range(len(calls)))]
    first = batch_sizes.BYTES_A_BUILD // (20 * 2**10)
    for portion in cut:
        # Begun within the bound: the rollout that ends it may be as large as it is.
        assert sum((16 if many is None else many) + 1 for many in portion["Calls"].to_list()[:-1]) <= first


def test_portions_follow_measured_size_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = SpanFactory()
    spans.call(spans.root("r", calls=1), rollout="r", PromptIds=[1] * 10_000)
    frames = spans.frames()
    cut = BuildBatches()
    many = rollouts([9] * 100)
    assert [portion.height for portion in cut.of(many)] == [100]
    monkeypatch.setattr(batch_sizes, "BYTES_A_BUILD", 10 * 40_000)
    cut.record(frames)
    heights = [portion.height for portion in cut.of(many)]
    assert (sum(heights), max(heights) <= 3, len(heights) > 30) == (100, True, True)
