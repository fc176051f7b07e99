"""Receivers of weights: what a worker does with a trainer's plan, without vLLM, and what it holds then; and senders of wrong words."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.vllm_plugin.fetching import RankParts, buckets_of, fetch
from spangrad.weights.placements import Dimension, Placement
from spangrad.weights.shards import ChecksumScope, TensorSums
from spangrad.weights.sums import WORD_BYTES, cast_words, tensor_sums
from trainer.publish.offers import WeightSource
from trainer.publish.rank_sender import PartsService, RankSender
from trainer.publish.shared_file import FilePart
from trainer.publish.token_server import Binary


def sums_of_arrays(arrays: Mapping[str, NDArray[np.float32]], dtype: str, others: Mapping[str, str] | None = None) -> dict[str, TensorSums]:
    """Return the sums of weights in an engine that is sent `dtype`, and holds some as one of `others`."""
    held = {name: (others or {}).get(name, dtype) for name in arrays}
    sent = {name: dtype if name in (others or {}) else "float32" for name in arrays}
    words = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint32) for name, array in arrays.items()}
    return {
        name: tensor_sums(cast_words(words[name], "float32", sent[name]), sent[name], held[name], ChecksumScope.FULL) for name in arrays
    }


def ranks_of(plan: Mapping[str, Any]) -> list[RankParts]:
    """The parts of each rank, as the plugin reads them from a plan."""
    return [RankParts(rank["url"], [(plan["names"][name], first, words) for name, first, words in rank["parts"]]) for rank in plan["ranks"]]


def words_sent(plan: Mapping[str, Any]) -> dict[str, NDArray[np.unsignedinteger]]:
    """Whole tensors, put together from all ranks."""
    shapes = zip(plan["names"], plan["shapes"], strict=True)
    tensors = [Placement(name, prod(shape), 0, 0, (Dimension(prod(shape), 1, 1),)) for name, shape in shapes]
    size, ranks = WORD_BYTES[plan["dtype"]], ranks_of(plan)
    whole = {each.name: np.zeros(each.words, f"u{size}") for each in tensors}
    buckets = buckets_of([(each, False) for each in tensors], ranks, size)
    for fetched in fetch(buckets, ranks, key=plan["key"], version=plan["version"], dtype=plan["dtype"], word_bytes=size, base=""):
        words = np.frombuffer(fetched.data, f"u{size}")
        for piece in fetched.bucket.pieces:
            part, words = words[: piece.placement.count], words[piece.placement.count :]
            whole[piece.placement.name][piece.placement.source : piece.placement.source + part.size] = part
    return whole


def sums_sent(plan: Mapping[str, Any]) -> dict[str, TensorSums]:
    """Sums of what a trainer's ranks send."""
    return {name: tensor_sums(words, plan["dtype"], plan["dtype"]) for name, words in words_sent(plan).items()}


Named = Mapping[str, NDArray[np.float32]]
Changed = Callable[[dict[str, Any]], Named | None]
"""Function of a request, which returns the weights whose words it is sent. None: the right ones."""


@contextmanager
def source_of(weights: Named, changed: Changed = lambda _: None) -> Generator[WeightSource]:
    """Weights in the memory of one rank, as a publication takes them; the rank sends other words than it sums where they are `changed`."""
    rank = RankSender(lambda: whole_parts(weights), no_files, "127.0.0.1")
    rank.service = OtherWords(weights, changed)
    with closing(rank):
        yield WeightSource(lambda: iter(weights.items()), lambda: [rank.address])


def whole_parts(weights: Named) -> list[FilePart]:
    """Whole tensors, as the parts of a single rank."""
    return [FilePart(name, array.shape, 0, np.ascontiguousarray(array, np.float32)) for name, array in weights.items()]


def no_files(directory: Path) -> list[FilePart]:
    """A rank's share of a version's files, which is not to be read."""
    raise AssertionError(f"{directory} was read")


class OtherWords(PartsService):
    """Answers of a rank that sends other weights than it sums."""

    def __init__(self, weights: Named, changed: Changed) -> None:
        super().__init__(lambda: whole_parts(weights), no_files)
        self._changed = changed

    def words(self, body: Mapping[str, Any]) -> Binary:
        """Return words of other weights."""
        sent = self._changed(dict(body))
        if sent is None:
            return super().words(body)
        other = PartsService(lambda: whole_parts(sent), no_files)
        other.answer("/versions", {"version": body["version"], "dtype": body["dtype"], "key": "", "delta": False, "directory": ""})
        return other.words(body)
