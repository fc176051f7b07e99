"""Sums of tensors in files and in memory, in the dtype in which an engine holds them.

In: words of tensors and the dtype of an engine. Out: sums by tensor (`spangrad.weights.shards`). Invariant: a cast rounds as PyTorch's
does, and what is held in memory meanwhile is a few chunks, whatever a tensor's size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CheckpointError
from spangrad.weights.shards import MASK, MIX_A, MIX_B, ChecksumScope, TensorSums, sample_step

CHUNK_WORDS = 2**15
"""Words mixed at once, which fit a core's cache."""
THREADS = min(8, os.cpu_count() or 1)
THREADED_CHUNKS = 64
"""Chunks of a tensor from which on several threads sum it: between any two operations they wait for one another."""
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
    sums = list(_spans(taken.size, partial(_span_sums, taken, own, dtype)))
    plain = sum(plain for plain, _ in sums)
    weighted = step * sum(weighted for _, weighted in sums) + (first + ahead) * plain
    return TensorSums(dtype, taken.size, plain & MASK, weighted & MASK)


def replaced_sums(sums: TensorSums, numbers: NDArray[np.int64], before: Words, after: Words) -> TensorSums:
    """Return the sums of a tensor, or of a part of one, after some of its words were replaced.

    The words, of the dtype of the sums, have these numbers in the tensor.
    """
    added = mixed_words(after).copy()
    added -= mixed_words(before)
    plain, weighted = int(added.sum()), int(np.dot(added, numbers.view(np.uint64)))
    return TensorSums(sums.dtype, sums.words, (sums.plain + plain) & MASK, (sums.weighted + weighted) & MASK)


def _spans(words: int, sums: Callable[[range], tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the sums of consecutive chunks; several threads sum a large tensor, since NumPy lets others run meanwhile."""
    starts = range(0, words, CHUNK_WORDS)
    if len(starts) < THREADED_CHUNKS:
        yield sums(starts)
        return
    each = -(-len(starts) // THREADS)
    # Threads of this tensor alone: a process that forks must leave none behind.
    with ThreadPoolExecutor(THREADS, "sums of weights") as threads:
        yield from threads.map(sums, [starts[begin : begin + each] for begin in range(0, len(starts), each)])


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
        rounded = wide >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += wide
        rounded += np.uint32(0x7FFF)
        rounded >>= np.uint32(16)
        return rounded.astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        return wide.view(np.float32).astype(np.float16).view(np.uint16)


def scaled_words(words: Words, dtype: str, factor: float) -> Words:
    """Return words of a dtype multiplied by a factor in float32, and rounded."""
    product = _to_float32(words, dtype).view(np.float32) * np.float32(factor)
    return cast_words(product.view(np.uint32), "float32", dtype)


class _Memory(threading.local):
    """Memory in which one thread mixes words, kept from one chunk and tensor to the next: taking it anew costs more than the mixing."""

    mixed = shifted = np.empty(0, np.uint64)


_memory = _Memory()


def mixed_words(words: Words) -> NDArray[np.uint64]:
    """Return each word of 16 or 32 bits mixed (`spangrad.weights.checksums`), in the same shape; valid until the thread's next call."""
    if _memory.mixed.size < words.size:
        _memory.mixed, _memory.shifted = (np.empty(words.size, np.uint64) for _ in range(2))
    mixed = _memory.mixed[: words.size].reshape(words.shape)
    if words.itemsize == 2:
        # No word is out of the table's range: clipping spares a check and a copy of the result.
        return np.take(_table(), words, out=mixed, mode="clip")
    mixed[...] = words
    return _mix(mixed, _memory.shifted[: words.size].reshape(words.shape))


@cache
def _table() -> NDArray[np.uint64]:
    """Return all words of 16 bits, mixed: looking a word up costs a third of mixing it."""
    words = np.arange(2**16, dtype=np.uint64)
    return _mix(words, np.empty_like(words))


def _mix(words: NDArray[np.uint64], shifted: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for factor, shift in ((MIX_A, 32), (MIX_B, 29)):
        words *= np.uint64(factor)
        np.right_shift(words, np.uint64(shift), out=shifted)
        words ^= shifted
    return words


def _to_float32(words: Words, own: str) -> NDArray[np.uint32]:
    match own:
        case "bfloat16":
            return words.astype(np.uint32) << np.uint32(16)
        case "float16":
            return words.view(np.float16).astype(np.float32).view(np.uint32)
        case _:
            return words.astype(np.uint32, copy=False)


def _span_sums(words: Words, own: str, dtype: str, starts: range) -> tuple[int, int]:
    """Return the plain and the weighted sum of the chunks that begin with these words."""
    plain = weighted = 0
    for first in starts:
        mixed = mixed_words(cast_words(words[first : first + CHUNK_WORDS], own, dtype))
        total = int(mixed.sum())
        plain += total
        weighted += first * total + int(np.dot(mixed, _numbers()[: mixed.size]))
    return plain, weighted


@cache
def _numbers() -> NDArray[np.uint64]:
    return np.arange(CHUNK_WORDS, dtype=np.uint64)
