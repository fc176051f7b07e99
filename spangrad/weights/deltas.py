"""Lossless differences between two versions of the same words: which words changed, and by how much.

In: positions and differences of changed words. Out: bytes, and back. Invariant: a base plus its decoded differences is the new words, bit
by bit; differences are of the words as integers, which wrap, so that a float that moved to its neighbour is a 1.

Form: a byte for the kind of positions, the number of changed words, and two deflated planes, positions and differences. Positions are gaps
between changed words, or a bit a word, whichever is smaller. Numbers have 7 bits a byte, the lowest first; differences are zigzag.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CheckpointError
from spangrad.weights.sums import Words

Positions = NDArray[np.int64]
_HEAD = struct.Struct("<BQQQ")
_GAPS, _BITS = 0, 1


def encode_delta(positions: Positions, differences: Words, words: int) -> bytes:
    """Return the bytes of a delta.

    Args:
        positions: numbers of the changed words, ascending.
        differences: new minus old word of each, wrapped.
        words: number of words of the base.
    """
    gaps = _numbers_to_bytes(np.diff(positions, prepend=-1).astype(np.uint64) - np.uint64(1))
    kind, plane = _GAPS, gaps
    if len(gaps) > (words + 7) // 8:
        changed = np.zeros(words, np.bool_)
        changed[positions] = True
        kind, plane = _BITS, np.packbits(changed, bitorder="little")
    planes = [_deflated(plane), _deflated(_numbers_to_bytes(_zigzag(differences)))]
    return _HEAD.pack(kind, positions.size, words, len(planes[0])) + b"".join(planes)


def decode_delta(data: bytes | memoryview, dtype: np.dtype[np.unsignedinteger]) -> tuple[Positions, Words]:
    """Return the positions and the differences of a delta, whose words are unsigned integers of a dtype.

    Raises:
        CheckpointError: the bytes are no delta.
    """
    try:
        kind, changed, words, size = _HEAD.unpack_from(data)
        body = memoryview(data)[_HEAD.size :]
        plane = np.frombuffer(zlib.decompress(body[:size], wbits=-15), np.uint8)
        differences = _unzigzag(_bytes_to_numbers(np.frombuffer(zlib.decompress(body[size:], wbits=-15), np.uint8)), dtype)
        if kind == _GAPS:
            positions = np.cumsum(_bytes_to_numbers(plane).astype(np.int64) + 1) - 1
        else:
            positions = np.flatnonzero(np.unpackbits(plane, count=words, bitorder="little")).astype(np.int64)
    except (struct.error, zlib.error, ValueError) as error:
        raise CheckpointError(f"a delta of weights is damaged ({error}). Publish again, with trainer.weight_sync.delta = false.") from error
    if not positions.size == differences.size == changed or (changed and positions[-1] >= words):
        raise CheckpointError("a delta of weights is damaged. Publish again, with trainer.weight_sync.delta = false.")
    return positions, differences


def _deflated(plane: NDArray[np.uint8]) -> bytes:
    # Gaps and differences do not repeat one another: matches cost time and find nothing, codes of few bits do.
    deflate = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return deflate.compress(plane.tobytes()) + deflate.flush()


def _zigzag(differences: Words) -> NDArray[np.uint64]:
    signed = differences.view(np.dtype(f"i{differences.itemsize}")).astype(np.int64)
    return ((signed << 1) ^ (signed >> 63)).astype(np.uint64)


def _unzigzag(numbers: NDArray[np.uint64], dtype: np.dtype[np.unsignedinteger]) -> Words:
    signed = (numbers >> np.uint64(1)).astype(np.int64) ^ -(numbers & np.uint64(1)).astype(np.int64)
    return signed.astype(dtype)


def _numbers_to_bytes(numbers: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return numbers with 7 bits a byte; the highest bit says that more follow."""
    long = np.flatnonzero(numbers > 0x7F)
    if not long.size:
        return numbers.astype(np.uint8)
    # Most numbers have one byte: what longer ones need beside it is done for them alone.
    more, rest = np.zeros(long.size, np.int64), numbers[long] >> np.uint64(7)
    while rest.any():
        more += rest > 0
        rest >>= np.uint64(7)
    sizes = np.ones(numbers.size, np.int64)
    sizes[long] += more
    out = np.repeat(numbers.astype(np.uint8), sizes)
    starts = long + np.cumsum(more) - more
    for place in range(int(more.max()) + 1):
        has = more >= place
        piece = (numbers[long[has]] >> np.uint64(7 * place)) & np.uint64(0x7F)
        out[starts[has] + place] = piece.astype(np.uint8) | ((more[has] > place).astype(np.uint8) << 7)
    return out


def _bytes_to_numbers(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    ends = np.flatnonzero(data < 0x80)
    if ends.size == data.size:
        return data.astype(np.uint64)
    if not ends.size or ends[-1] != data.size - 1:
        raise ValueError("its last number is cut off")
    more = np.diff(ends, prepend=-1) - 1
    long = np.flatnonzero(more)
    numbers, more, ends = data[ends].astype(np.uint64), more[long], ends[long]
    if more.max() > 9:
        raise ValueError("a number has more than 64 bits")
    value = np.zeros(long.size, np.uint64)
    for place in range(int(more.max()) + 1):
        has = more >= place
        piece = (data[ends[has] - more[has] + place] & 0x7F).astype(np.uint64)
        value[has] |= piece << np.uint64(7 * place)
    numbers[long] = value
    return numbers
