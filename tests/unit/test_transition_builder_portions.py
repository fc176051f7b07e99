"""Portions of the builder: the rollouts that are built at a time."""

from __future__ import annotations

from dataclasses import replace
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


def rollouts(sizes: list[int]) -> pl.DataFrame:
    """Rollouts with that many rows, the last the oldest."""
    rows = [
        {"RunId": "run", "RolloutId": f"r{place}", "Rows": size, "IngestedAt": BEGIN - timedelta(seconds=place)}
        for place, size in enumerate(sizes)
    ]
    return pl.concat([empty(ROLLOUTS), pl.DataFrame(rows, schema_overrides={"Rows": ROLLOUTS["Rows"]})], how="diagonal_relaxed")


@given(st.lists(st.integers(0, 50_000), max_size=30))
def test_portions_contain_every_rollout_once_oldest_first(sizes: list[int]) -> None:
    cut = list(BuildBatches().of(rollouts(sizes)))
    assert [name for portion in cut for name in portion["RolloutId"]] == [f"r{place}" for place in reversed(range(len(sizes)))]
    for portion in cut:
        # Begun within the bound: the rollout that ends it may be as large as it is.
        assert sum(size + 1 for size in portion["Rows"].to_list()[:-1]) <= batch_sizes.ROWS_A_BUILD


def test_portions_follow_measured_size_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = SpanFactory()
    spans.call(spans.root("r", calls=1), rollout="r", PromptIds=[1] * 10_000)
    frames = spans.frames()
    cut = BuildBatches()
    many = rollouts([9] * 100)  # 1,000 with the rollouts themselves
    assert [portion.height for portion in cut.of(many)] == [100]
    monkeypatch.setattr(batch_sizes, "BYTES_A_BUILD", 10 * 40_000)
    # A rollout of one row, its root's, holds the call's 40,000 bytes of prompt.
    cut.record(replace(frames, rollouts=frames.rollouts.with_columns(Rows=pl.lit(0, pl.UInt64))))
    heights = [portion.height for portion in cut.of(many)]
    assert (sum(heights), max(heights) <= 3, len(heights) > 30) == (100, True, True)
