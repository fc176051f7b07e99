"""Sums of tensors in files and in memory, in the dtype in which an engine holds them.

In: words of tensors and the dtype of an engine. Out: sums by tensor (`spangrad.weights.shards`). Invariant: a cast rounds as PyTorch's
does, and what is held in memory meanwhile is a few chunks, whatever a tensor's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CheckpointError
from spangrad.weights.shards import MASK, MIX_A, MIX_B, ChecksumScope, TensorSums, sample_step

CHUNK_WORDS = 2**17
"""Words mixed at once, which fit a core's cache."""
THREADS = min(8, os.cpu_count() or 1)
WORD_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes that can be compared, with the size of a word in bytes."""
Words = NDArray[np.unsignedinteger]


def tensor_sums(
    words: Words, own: str, dtype: str, scope: ChecksumScope = ChecksumScope.FULL, *, first: int = 0, whole: int | None = None
) -> TensorSums:
    """Return the sums of a tensor as an engine holds it, or of consecutive words of one; those of parts add up to the tensor's.

    Args:
        words: its words in the order of the file, flat.
        own: dtype of the words.
        dtype: dtype of the engine.
        scope: all words, or a sample.
        first: number of the first of the words in the tensor.
        whole: number of words of the tensor. None: these are all.

    Raises:
        CheckpointError: one of the dtypes is not known.
    """
    step = sample_step(words.size if whole is None else whole) if scope is ChecksumScope.SAMPLED else 1
    ahead = -first % step
    taken = words[ahead::step]
    sums = list(_chunks(taken, partial(_chunk_sums, taken, own, dtype)))
    plain = sum(plain for plain, _ in sums)
    weighted = step * sum(weighted for _, weighted in sums) + (first + ahead) * plain
    return TensorSums(dtype, taken.size, plain & MASK, weighted & MASK)


def _chunks(words: Words, sums: Callable[[int], tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the sums of each chunk; several threads sum a large tensor, since NumPy lets others run meanwhile."""
    starts = range(0, words.size, CHUNK_WORDS)
    if len(starts) <= THREADS:
        yield from map(sums, starts)
        return
    # Threads of this tensor alone: a process that forks must leave none behind.
    with ThreadPoolExecutor(THREADS, "sums of weights") as threads:
        yield from threads.map(sums, starts)


def cast_words(words: Words, own: str, dtype: str) -> Words:
    """Return the words of another dtype, rounded to nearest even.

    Raises:
        CheckpointError: one of the dtypes is not known.
    """
    for name in (own, dtype):
        if name not in WORD_BYTES:
            raise CheckpointError(f"weights of dtype {name} cannot be compared: {', '.join(WORD_BYTES)} can.")
    if own == dtype:
        return words
    wide = _to_float32(words, own)
    if dtype == "float32":
        return wide
    if dtype == "bfloat16":
        # Carries out of the upper half are cut off with it, so that 32 bits are enough.
        return ((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        return wide.view(np.float32).astype(np.float16).view(np.uint16)


def scaled_words(words: Words, dtype: str, factor: float) -> Words:
    """Return words of a dtype multiplied by a factor in float32, and rounded."""
    if factor == 1:
        return words
    product = _to_float32(words, dtype).view(np.float32) * np.float32(factor)
    return cast_words(product.view(np.uint32), "float32", dtype)


def mix_words(words: NDArray[np.uint64]) -> int:
    """Return the sum of the mixed words, mod 2^64."""
    return int(_mixed(words).sum(dtype=np.uint64))


def _to_float32(words: Words, own: str) -> NDArray[np.uint32]:
    match own:
        case "bfloat16":
            return words.astype(np.uint32) << np.uint32(16)
        case "float16":
            return words.view(np.float16).astype(np.float32).view(np.uint32)
        case _:
            return words.astype(np.uint32, copy=False)


def _chunk_sums(words: Words, own: str, dtype: str, first: int) -> tuple[int, int]:
    """Return the plain and the weighted sum of the chunk that begins with the word number `first`."""
    mixed = _mixed(cast_words(words[first : first + CHUNK_WORDS], own, dtype))
    plain = int(mixed.sum(dtype=np.uint64))
    return plain, first * plain + int(np.dot(mixed, _numbers()[: mixed.size]))


def _mixed(words: Words) -> NDArray[np.uint64]:
    mixed = words.astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed *= np.uint64(MIX_A)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(MIX_B)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@cache
def _numbers() -> NDArray[np.uint64]:
    return np.arange(CHUNK_WORDS, dtype=np.uint64)
