"""Copy of one rank's own parts of the weights in main memory, in the dtype of the engines, with what changed since the version before.

In: parts in float32, of each version anew. Out: words of any pieces, or their differences from the version before; sums by tensor.
Invariant: a rank has one copy of its share, which the next version's words replace in place, and of the version before the changed
words alone: their numbers in two bytes and their differences in a word each, as long as they are an eighth of a part at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from spangrad.errors import TrainerError
from spangrad.weights.deltas import Positions, Words, encode_delta
from spangrad.weights.shards import ChecksumScope, TensorSums
from spangrad.weights.sums import WORD_BYTES, cast_words, replaced_sums, tensor_sums
from trainer.publish.shared_file import FilePart

_BLOCK_WORDS = 2**16
"""Words whose numbers within their block have two bytes."""
_MOST_CHANGED = 1 / 8
"""Share of a part's words from which on differences are not kept."""
Piece = tuple[int, int, Sequence[tuple[int, int]]]
"""Number of a part, number of the piece's first word in it, and size and stride of each dimension, the largest stride first."""


Parts = Callable[[], Iterable[FilePart]]
"""Function that yields a rank's own parts in float32, in the same order each time; their words may be the parameters' memory."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """Words of a part that differ from the version before."""

    starts: NDArray[np.int64]
    """Number of changed words before each block."""
    places: NDArray[np.uint16]
    """Number of each within its block."""
    differences: Words

    def between(self, first: int, end: int) -> tuple[Positions, Words]:
        """Return the positions, ascending, and the differences of those with numbers `first` to `end` - 1."""
        blocks = np.arange(first // _BLOCK_WORDS, -(-end // _BLOCK_WORDS))
        if not blocks.size:
            return np.empty(0, np.int64), self.differences[:0]
        low, high = self.starts[blocks[0]], self.starts[blocks[-1] + 1]
        counts = self.starts[blocks + 1] - self.starts[blocks]
        positions = np.repeat(blocks * _BLOCK_WORDS, counts) + self.places[low:high]
        cut = slice(*np.searchsorted(positions, [first, end]))
        return positions[cut], self.differences[low:high][cut]


@dataclass(slots=True)
class _HeldPart:
    """Words of one part, and what changed in them."""

    name: str
    shape: tuple[int, ...]
    first: int
    words: Words
    changes: _Changes | None = None
    """None: they are not known, or too many."""
    known: TensorSums | None = None
    """Sums of all words in the dtype that they have. None: they were not asked for, or too many have changed since."""

    @property
    def whole(self) -> int:
        """Number of words of the whole tensor."""
        return prod(self.shape)

    def take(self, part: FilePart, dtype: str, *, keep_changes: bool) -> None:
        """Replace the words by those of the next version."""
        own = part.words.reshape(-1).view(np.uint32)
        blocks, places, differences = [0], list[NDArray[np.uint16]](), list[Words]()
        keep, known = keep_changes, self.known
        for begin in range(0, self.words.size, _BLOCK_WORDS):
            held = self.words[begin : begin + _BLOCK_WORDS]
            new = cast_words(own[begin : begin + _BLOCK_WORDS], "float32", dtype)
            if keep:
                changed = np.flatnonzero(new != held)
                before, after = held[changed], new[changed]
                places.append(changed.astype(np.uint16))
                differences.append(after - before)
                blocks.append(blocks[-1] + changed.size)
                keep = blocks[-1] <= _MOST_CHANGED * self.words.size
                known = replaced_sums(known, self.first + begin + changed, before, after) if known and keep else None
            held[:] = new
        self.changes, self.known = None, known if keep else None
        if keep:
            empty = self.words[:0]
            self.changes = _Changes(
                np.array(blocks), np.concatenate([*places, empty.astype(np.uint16)]), np.concatenate([*differences, empty])
            )

    def sums(self, own: str, dtype: str, scope: ChecksumScope) -> TensorSums:
        """Return the sums of the words, which have the dtype `own`, as an engine holds them."""
        if scope is not ChecksumScope.FULL or own != dtype:
            return tensor_sums(self.words, own, dtype, scope, first=self.first, whole=self.whole)
        self.known = self.known or tensor_sums(self.words, own, own, first=self.first)
        return self.known


class HeldParts:
    """A rank's parts of the newest version in one dtype."""

    def __init__(self, dtype: str) -> None:
        """Hold nothing yet.

        Raises:
            TrainerError: weights of that dtype are not sent.
        """
        if dtype not in WORD_BYTES:
            raise TrainerError(f"weights are sent as {', '.join(WORD_BYTES)}, not as {dtype}. Set engine.dtype to one of them.")
        self.dtype = dtype
        self.version = ""
        """Name of the version. Empty: there is none, or it is being replaced."""
        self.base = ""
        """Name of the version before, from which the changes are known. Empty: of none."""
        self._parts: list[_HeldPart] = []

    def take(self, parts: Iterable[FilePart], version: str, *, keep_changes: bool) -> None:
        """Replace all words by those of a version, whose parts are in the order of the version before.

        With `keep_changes` its differences from that version are known afterwards.
        """
        before, self.version, self.base = self.version, "", ""
        held, self._parts = self._parts, []
        for number, part in enumerate(part for part in parts if part.words.size):
            same = number < len(held) and (held[number].name, held[number].shape, held[number].first, held[number].words.size) == (
                *(part.name, part.shape, part.first, part.words.size),
            )
            word = np.dtype(np.uint32 if WORD_BYTES[self.dtype] == 4 else np.uint16)
            own = held[number] if same else _HeldPart(part.name, part.shape, part.first, np.empty(part.words.size, word))
            own.take(part, self.dtype, keep_changes=keep_changes and same and bool(before))
            self._parts.append(own)
        self.version, self.base = version, before if keep_changes else ""

    def listed(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Return name, shape, first word and number of words of each part."""
        return [(part.name, part.shape, part.first, part.words.size) for part in self._parts]

    def sums(self, others: dict[str, str], scope: ChecksumScope) -> dict[str, TensorSums]:
        """Return the sums of the parts by tensor, as an engine holds them that keeps some tensors in one of `others`."""
        sums: dict[str, TensorSums] = {}
        for part in self._parts:
            own = part.sums(self.dtype, others.get(part.name, self.dtype), scope)
            sums[part.name] = sums[part.name] + own if part.name in sums else own
        return sums

    def delta(self, pieces: Sequence[Piece]) -> bytes | None:
        """Return the differences of pieces from the version before. None: they are not known, or no smaller than the words."""
        positions, differences, begin = list[Positions](), list[Words](), 0
        for number, offset, dimensions in pieces:
            part = self._piece(number, offset, dimensions)
            if part.changes is None:
                return None
            changed, difference = part.changes.between(offset, offset + _extent(dimensions))
            inside, places = _row_by_row(changed - offset, dimensions)
            positions.append(places[inside] + begin)
            differences.append(difference[inside])
            begin += _count(dimensions)
        if not positions:
            return None
        delta = encode_delta(np.concatenate(positions), np.concatenate(differences), begin)
        return delta if len(delta) < begin * WORD_BYTES[self.dtype] else None

    def words(self, pieces: Sequence[Piece]) -> list[Words]:
        """Return the words of each piece, row by row; consecutive ones are not copied."""
        views = list[Words]()
        for number, offset, dimensions in pieces:
            words = self._piece(number, offset, dimensions).words
            strides = [stride * words.itemsize for _, stride in dimensions]
            views.append(np.ascontiguousarray(as_strided(words[offset:], [size for size, _ in dimensions], strides, writeable=False)))
        return views

    def size(self, pieces: Sequence[Piece]) -> int:
        """Return the number of bytes of the words of pieces."""
        return sum(_count(dimensions) for _, _, dimensions in pieces) * WORD_BYTES[self.dtype]

    def _piece(self, number: int, offset: int, dimensions: Sequence[tuple[int, int]]) -> _HeldPart:
        if not 0 <= number < len(self._parts):
            raise TrainerError(f"there is no part {number}.")
        part = self._parts[number]
        is_region = all(size > 0 and stride > 0 for size, stride in dimensions)
        if not is_region or offset < 0 or offset + _extent(dimensions) > part.words.size:
            raise TrainerError(f"a piece ends beyond part {number} of {part.name}.")
        return part


def _extent(dimensions: Sequence[tuple[int, int]]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in dimensions)


def _count(dimensions: Sequence[tuple[int, int]]) -> int:
    return prod(size for size, _ in dimensions)


def _row_by_row(positions: Positions, dimensions: Sequence[tuple[int, int]]) -> tuple[NDArray[np.bool_], Positions]:
    """Return which words belong to a piece, and the number of each when its words are counted row by row."""
    inside, places = np.ones(positions.size, np.bool_), np.zeros_like(positions)
    for place, (size, stride) in enumerate(dimensions):
        at = positions // stride  # NumPy divides by one number faster than `divmod` does
        positions = positions - at * stride
        inside &= at < size
        places += at * _count(dimensions[place + 1 :])
    return inside & (positions == 0), places
