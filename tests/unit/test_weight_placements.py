"""Placements in pieces, and deltas: laws for any shard of any tensor, and any words."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spangrad.errors import CheckpointError
from spangrad.weights.deltas import decode_delta, encode_delta
from spangrad.weights.placements import Dimension, Placement, clip, is_ascending, simplified, split
from spangrad.weights.shards import ChecksumScope
from spangrad.weights.sums import tensor_sums


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """A slice of a row-major tensor of up to three dimensions, and any place of it in a worker's memory."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - begin)) for size, begin in zip(shape, begins, strict=True)]
    targets = draw(st.permutations([1, 10, 100][: len(shape)]))
    dimensions = tuple(Dimension(*each) for each in zip(sizes, strides, targets, strict=True))
    source = sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
    return Placement("w", prod(shape), source, draw(st.integers(0, 9)), dimensions)


def pairs(placement: Placement) -> list[tuple[int, int]]:
    """Numbers of each word in the tensor and in the worker's memory, in the order of the copy."""
    numbers = [(placement.source, placement.target)]
    for each in placement.dimensions:
        numbers = [(source + row * each.source, target + row * each.target) for source, target in numbers for row in range(each.size)]
    return numbers


@given(placements(), st.integers(0, 220), st.integers(0, 220), st.integers(1, 40))
def test_clip_and_split_keep_each_word_of_the_range_once_in_order(placement: Placement, first: int, end: int, words: int) -> None:
    assert is_ascending(placement)
    short = simplified(placement)
    assert pairs(short) == pairs(placement)
    for whole in (placement, short):
        parts = [part for clipped in clip(whole, first, end) for part in split(clipped, words)]
        assert [pair for part in parts for pair in pairs(part)] == [pair for pair in pairs(placement) if first <= pair[0] < end]
        assert all(part.count <= words and part.count == len(pairs(part)) for part in parts)


def test_is_ascending_placements_that_repeat_words_are_not() -> None:
    placement = Placement("w", 12, 0, 0, (Dimension(3, 4, 4), Dimension(4, 1, 1)))
    assert is_ascending(placement)
    assert not is_ascending(replace(placement, dimensions=(Dimension(3, 2, 4), Dimension(4, 1, 1))))
    assert not is_ascending(replace(placement, dimensions=(Dimension(4, 1, 1), Dimension(3, 0, 4))))


@st.composite
def versions(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any]]:
    """Words before and after a step in which few or many of them change, by little or by much."""
    dtype = np.dtype(draw(st.sampled_from([np.uint16, np.uint32])))
    size = draw(st.integers(0, 400))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = generator.integers(0, 2 ** (8 * dtype.itemsize), size, dtype, endpoint=False)
    changed = generator.random(size) < draw(st.sampled_from([0, 0.01, 0.3, 1]))
    by = generator.integers(0, draw(st.sampled_from([2, 300, 2**16])), size).astype(dtype)
    return base, base + by * changed * generator.choice(np.array([1, -1]).astype(dtype), size)


@given(versions())
def test_delta_on_its_base_gives_the_new_words(pair: tuple[NDArray[Any], NDArray[Any]]) -> None:
    base, new = pair
    positions = np.flatnonzero(new != base)
    data = encode_delta(positions, (new - base)[positions], base.size)
    decoded, differences = decode_delta(data, base.dtype)
    rebuilt = base.copy()
    rebuilt[decoded] += differences
    assert np.array_equal(rebuilt, new)


def test_delta_of_few_neighbours_is_far_smaller_than_the_words() -> None:
    generator = np.random.default_rng(0)
    positions = np.flatnonzero(generator.random(2**18) < 0.01)
    assert len(encode_delta(positions, generator.choice(np.uint16([1, 2**16 - 1]), positions.size), 2**18)) < 0.008 * 2 * 2**18


@pytest.mark.parametrize("harm", [lambda data: data[:9], lambda data: data[:-3], lambda data: b"\1" + data[1:]])
def test_delta_that_is_damaged_raises(harm: Any) -> None:
    data = encode_delta(np.array([1, 500, 30000]), np.uint16([1, 2, 3]), 40000)
    with pytest.raises(CheckpointError, match="damaged"):
        decode_delta(harm(data), np.dtype(np.uint16))


@given(st.integers(1, 20000), st.lists(st.integers(0, 20000), max_size=4), st.sampled_from(list(ChecksumScope)[:2]))
def test_tensor_sums_of_parts_add_up_to_those_of_the_tensor(size: int, cuts: list[int], scope: ChecksumScope) -> None:
    words = np.random.default_rng(size).integers(0, 2**16, size, np.uint16)
    ends = [*sorted(min(cut, size) for cut in cuts), size]
    whole = tensor_sums(words, "bfloat16", "bfloat16", scope)
    parts = [
        tensor_sums(words[first:end], "bfloat16", "bfloat16", scope, first=first, whole=size)
        for first, end in zip([0, *ends], ends, strict=False)
    ]
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total == whole
