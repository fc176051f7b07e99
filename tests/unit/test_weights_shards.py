"""The law of sums: any split of any tensors adds up to the sums of the files; one changed word in one shard is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.errors import CheckpointError
from spangrad.weights import sums as sums_module
from spangrad.weights.shards import (
    MASK,
    ChecksumScope,
    EngineReports,
    Shard,
    TensorSums,
    WorkerReport,
    combine,
    difference,
    region_of,
    sample_step,
)
from spangrad.weights.sums import cast_words, tensor_sums

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the workers that hold it."""

    name: str
    box: tuple[slice, ...]
    workers: frozenset[int]


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return {f"w{place}": generator.integers(1, 2**32, shape, dtype=np.uint32) for place, shape in enumerate(shapes)}


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Tensors, int, list[Piece]]:
    """Tensors, a number of workers, and for each tensor a grid of boxes, each held by one worker or more."""
    split = draw(tensors())
    workers = draw(st.integers(1, 4))
    pieces: list[Piece] = []
    for name, tensor in split.items():
        cuts = [sorted(draw(st.sets(st.integers(1, size), max_size=3)) | {0, size}) for size in tensor.shape]
        for box in itertools.product(*([slice(*pair) for pair in itertools.pairwise(cut)] for cut in cuts)):
            holders = draw(st.frozensets(st.integers(0, workers - 1), min_size=1))
            pieces.append(Piece(name, box, holders))
    return split, workers, pieces


def reports(split: Tensors, workers: int, pieces: Sequence[Piece], sum_box: Callable[..., TensorSums]) -> EngineReports:
    """Return the reports of the workers about their pieces."""
    shards: list[list[Shard]] = [[] for _ in range(workers)]
    for piece in pieces:
        tensor = split[piece.name]
        strides = [int(stride) // tensor.itemsize for stride in tensor.strides]
        first = sum(part.start * stride for part, stride in zip(piece.box, strides, strict=True))
        region = region_of(first, [(part.stop - part.start, stride) for part, stride in zip(piece.box, strides, strict=True)])
        for worker in piece.workers:
            shards[worker].append(Shard(piece.name, region, sum_box(tensor, piece.box)))
    return EngineReports([[WorkerReport(each) for each in shards]])


def sums_of_box(tensor: np.ndarray, box: tuple[slice, ...], scope: ChecksumScope = ChecksumScope.FULL) -> TensorSums:
    """The sums by their definition, a word at a time."""
    numbers = np.arange(tensor.size).reshape(tensor.shape)[box].reshape(-1)
    step = sample_step(tensor.size) if scope is ChecksumScope.SAMPLED else 1
    words = [(int(number), int(word)) for number, word in zip(numbers, tensor[box].reshape(-1), strict=True) if number % step == 0]
    mixed = [(number, tensor_sums(np.array([word], np.uint32), "float32", "float32").plain) for number, word in words]
    return TensorSums("float32", len(words), sum(mix for _, mix in mixed) & MASK, sum(number * mix for number, mix in mixed) & MASK)


def plan(split: Tensors) -> dict[str, TensorSums]:
    return {name: tensor_sums(tensor.reshape(-1), "float32", "float32") for name, tensor in split.items()}


@given(sharded())
def test_combine_any_sharding_gives_sums_of_files(case: tuple[Tensors, int, list[Piece]]) -> None:
    split, workers, pieces = case
    held = combine(reports(split, workers, pieces, sums_of_box))
    assert held.tensors == plan(split)
    assert difference(plan(split), held) == ""


@given(sharded(), st.data())
def test_combine_one_changed_word_in_one_shard_is_noticed(case: tuple[Tensors, int, list[Piece]], data: st.DataObject) -> None:
    """A changed word is noticed in one copy of a shard that several workers hold, and in the only copy of another."""
    split, workers, pieces = case
    place = data.draw(st.integers(0, len(pieces) - 1))
    piece = pieces[place]
    changed = split[piece.name].copy()
    box = changed[piece.box]
    index = data.draw(st.integers(0, box.size - 1))
    box[np.unravel_index(index, box.shape)] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    worker = data.draw(st.sampled_from(sorted(piece.workers)))
    reported = reports(split, workers, pieces, sums_of_box)
    shards = reported.replicas[0][worker].shards
    (at,) = [
        number
        for number, shard in enumerate(shards)
        if shard == reports(split, workers, [piece], sums_of_box).replicas[0][worker].shards[0]
    ]
    shards[at] = replace_sums(shards[at], sums_of_box(changed, piece.box))
    if len(piece.workers) > 1:
        with pytest.raises(CheckpointError, match=rf"hold different copies of {piece.name}\."):
            combine(reported)
    else:
        assert difference(plan(split), combine(reported)) == f"it holds other values of {piece.name}"


def replace_sums(shard: Shard, sums: TensorSums) -> Shard:
    return Shard(shard.name, shard.region, sums)


@given(tensors(), st.data())
def test_difference_exchanged_words_are_noticed(split: Tensors, data: st.DataObject) -> None:
    """The plain sum does not see it: a worker that holds another's shard has the same words in all."""
    name = data.draw(st.sampled_from(sorted(split)))
    words = split[name].reshape(-1)
    first, second = data.draw(st.tuples(st.integers(0, words.size - 1), st.integers(0, words.size - 1)))
    exchanged = words.copy()
    exchanged[[first, second]] = words[[second, first]]
    sums = tensor_sums(exchanged, "float32", "float32")
    assert sums.plain == plan(split)[name].plain
    assert (sums == plan(split)[name]) == (words[first] == words[second] or first == second)


def test_combine_gaps_overlaps_and_missing_tensors_are_named() -> None:
    split = {"w0": np.arange(1, 13, dtype=np.uint32).reshape(3, 4), "w1": np.ones(2, np.uint32), "w2": np.ones(2, np.uint32)}
    whole, first, later = (slice(0, 2),), (slice(0, 2), slice(0, 4)), (slice(1, 3), slice(0, 4))
    pieces = [Piece("w0", first, frozenset({0})), Piece("w0", later, frozenset({1})), Piece("w1", whole, frozenset({0}))]
    held = combine(reports(split, 2, pieces, sums_of_box))
    assert difference(plan(split), held) == "it lacks w2; it does not hold each word once of w0 (16 of 12 words)"
    assert difference({"w1": plan(split)["w1"]}, held) == "it has beside the version's w0"


def test_combine_replica_that_did_not_load_is_named() -> None:
    """A replica that kept the old weights is named, which the first element of vLLM's results would not show."""
    old, new = {"w": np.arange(8, dtype=np.uint32)}, {"w": np.arange(8, dtype=np.uint32) + 1}
    pieces = [Piece("w", (slice(0, 4),), frozenset({0})), Piece("w", (slice(4, 8),), frozenset({1}))]
    replicas = [reports(weights, 2, pieces, sums_of_box).replicas[0] for weights in (new, old)]
    with pytest.raises(CheckpointError, match="data-parallel replica 1 holds other weights than replica 0: it holds other values of w"):
        combine(EngineReports(replicas))
    with pytest.raises(CheckpointError, match="no worker reported its parameters"):
        combine(EngineReports([]))


def test_difference_tensors_in_another_form_are_not_compared_and_named() -> None:
    held = combine(EngineReports([[WorkerReport([], {"w": "vLLM holds it as float8_e4m3fn"})]]))
    assert (difference({"w": TensorSums("bfloat16", 4, 1, 2)}, held), held.unread) == ("", {"w": "vLLM holds it as float8_e4m3fn"})
    assert difference({"v": TensorSums("bfloat16", 4, 1, 2)}, held) == "it lacks v"


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("scope", [ChecksumScope.FULL, ChecksumScope.SAMPLED])
def test_tensor_sums_of_large_tensor_add_up_over_shards(own: str, scope: ChecksumScope, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk, in several threads, and as a sample."""
    monkeypatch.setattr(sums_module, "CHUNK_WORDS", 997)
    monkeypatch.setattr(sums_module, "THREADED_CHUNKS", 2)
    sums_module._numbers.cache_clear()
    kind = np.uint32 if own == "float32" else np.uint16
    tensor = np.random.default_rng(0).integers(0, 2 ** (8 * np.dtype(kind).itemsize), (90, 150), dtype=kind)
    whole = tensor_sums(tensor.reshape(-1), own, own, scope)
    parts = [sums_of_box(tensor, (slice(0, 90), slice(start, start + 50)), scope) for start in (0, 50, 100)]
    assert (whole.words, whole.plain, whole.weighted) == (
        sum(part.words for part in parts),
        sum(part.plain for part in parts) & MASK,
        sum(part.weighted for part in parts) & MASK,
    )
    assert replace_dtype(whole, own).words == (13_500 if scope is ChecksumScope.FULL else 4500)
    sums_module._numbers.cache_clear()


def replace_dtype(sums: TensorSums, dtype: str) -> TensorSums:
    return TensorSums(dtype, sums.words, sums.plain, sums.weighted)


def test_cast_words_of_unknown_dtype_raises() -> None:
    with pytest.raises(CheckpointError, match="weights of dtype float8_e4m3fn cannot be compared"):
        cast_words(np.ones(1, np.uint32), "float32", "float8_e4m3fn")


@given(st.integers(0, 50), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_region_of_equal_shards_is_equal(first: int, sizes: list[int]) -> None:
    """A block without gaps is one run of words, however many dimensions it has."""
    strides = list(np.cumprod([1, *sizes[::-1]])[:-1][::-1])
    dimensions = [(size, int(stride)) for size, stride in zip(sizes, strides, strict=True)]
    words = int(np.prod(sizes))
    assert region_of(first, dimensions) == region_of(first, dimensions[::-1]) == (first, ((words, 1),) if words > 1 else ())
