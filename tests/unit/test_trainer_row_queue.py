"""Rows of a batch that are written to the queue between the trainer and its ranks, before each pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.support.policies import transition_row
from trainer.data.batch import Batch, layout, take
from trainer.data.merge import separate
from trainer.distributed import row_queue
from trainer.distributed.row_queue import LeasedRows

ROW = {"prompts", "responses", "response_length", "response_mask", "temperature_of_row"}
"""Columns that every pass reads."""


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Columns by the key that they were written for, in the place of TransferQueue."""
    stored: dict[str, set[str]] = {}

    def put(keys: list[str], partition_id: str, fields: Any, tags: Any) -> None:
        for key in keys:
            stored[key] = stored.get(key, set()) | set(fields.keys())

    monkeypatch.setattr(row_queue.transfer_queue, "async_kv_batch_put", put)
    monkeypatch.setattr(row_queue.RowQueue, "call", lambda _: None)
    return stored


def leased() -> tuple[LeasedRows, Batch]:
    """Rows of a batch for two ranks that needs no no-op row."""
    calls = pl.DataFrame([transition_row(name) for name in "abcd"])
    batch = layout(separate(calls, pl.Series(np.linspace(-1, 1, 4))), lineage=[0], divisor=2).numbered()
    rows = LeasedRows()
    rows.hold(batch)
    rows.sample(1, "train", 4)
    return rows, batch


def test_rows_of_smaller_part_without_loss_are_all_stored(stored: dict[str, set[str]]) -> None:
    rows, batch = leased()
    assert len(stored) == 4
    part = take(batch, np.array([2]), divisor=2)
    keys = rows.metadata(part, "policy", "log_probs", compute_loss=False).keys
    assert (keys[1:], set(keys) - set(stored)) == (["no-op-0"], set())
    assert stored["no-op-0"] == ROW


def test_rows_of_part_with_loss_after_pass_without_are_complete(stored: dict[str, set[str]]) -> None:
    rows, batch = leased()
    part = take(batch, np.array([0, 1, 3]), divisor=2)
    rows.metadata(part, "policy", compute_loss=False)
    before = {key: stored.pop(key) for key in list(stored)}
    rows.metadata(part, "policy", compute_loss=False)
    assert not stored, "rows are written once"
    weighted = replace(part, weights=np.ones_like(part.logprobs))
    read = rows.metadata(weighted, "policy")
    assert read.fields
    assert all(set(read.fields) <= before[key] | stored[key] for key in read.keys)
    assert "rollout_is_weights" in stored["no-op-0"]
