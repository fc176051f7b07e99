"""Micro-batches of padded rows: nothing lost, nothing torn, and no more padded tokens than a device takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.errors import TrainerError
from trainer.optim.micro_batches import padded_partition, split_to


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(64, 400))
def test_padded_partition_of_any_rows_keeps_each_row_once_and_the_bound(lengths: list[int], limit: int):
    parts = padded_partition(lengths, limit)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[row] for row in part) <= limit for part in parts)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 6)), min_size=1, max_size=40), st.integers(64, 400))
def test_padded_partition_with_units_tears_none_apart(rows: list[tuple[int, int]], limit: int):
    lengths, units = [length for length, _ in rows], [unit for _, unit in rows]
    parts = padded_partition(lengths, limit, units)
    homes = {unit: {at for at, part in enumerate(parts) for row in part if units[row] == unit} for unit in units}
    assert all(len(home) == 1 for home in homes.values())
    crowded = [part for part in parts if len({units[row] for row in part}) > 1]
    assert all(len(part) * max(lengths[row] for row in part) <= limit for part in crowded), "one unit alone may exceed it"


def test_padded_partition_of_few_rows_makes_as_few_micro_batches_as_can_be():
    lengths = [5, 9, 2, 9, 4]
    parts = padded_partition(lengths, 18)
    assert sorted(row for part in parts for row in part) == [0, 1, 2, 3, 4]
    assert all(len(part) * max(lengths[row] for row in part) <= 18 for part in parts)
    assert len(parts) == 2


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(0, 10))
def test_split_to_makes_as_many_micro_batches_as_the_other_ranks_have(lengths: list[int], more: int):
    parts = padded_partition(lengths, 256)
    count = min(len(parts) + more, len(lengths))
    split = split_to(parts, count)
    assert (len(split), sorted(row for part in split for row in part)) == (count, list(range(len(lengths))))
    assert all(split)


def test_split_to_beyond_number_of_units_raises():
    with pytest.raises(TrainerError, match=r"make 2 micro-batches at most, and another worker needs 3"):
        split_to([[0, 1, 2]], 3, units=[0, 0, 1])


@pytest.mark.parametrize("kind", ["lognormal", "one long row"])
def test_padded_partition_at_real_lengths_wastes_little(kind: str):
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(3000) - 0.32, 0.8, 256) if kind == "lognormal" else np.r_[16000, np.full(255, 300)]
    lengths = np.clip(lengths, 50, 16384).astype(int).tolist()
    parts = padded_partition(lengths, 16384)
    padded = [len(part) * max(lengths[row] for row in part) for part in parts]
    assert max(padded) <= 16384
    assert sum(padded) <= 1.1 * sum(lengths), "rows of like lengths lie together"
