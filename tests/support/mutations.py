"""Sound bodies made unsound: bits flipped, pieces cut, doubled, moved, lengths made to lie; the same for the same seed.

In: sound bodies and chance. Out: bodies that are mostly broken, some of which are still sound. Invariant: none is much longer than
the longest it was made from, so that a run's time is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_ODD_BYTES = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x22, 0x27, 0x5C, 0x7B)
_ODD_LENGTHS = (b"\x00", b"\x7f", b"\xff\x01", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01", b"\xff" * 12)
_ODD_TEXTS = (
    b"\x00",
    b"\xc3\x28",
    b"NaN",
    b"-1",
    b"1e999",
    b"null",
    b"{}",
    b"[[[[",
    b'"',
    b"'",
    b"`",
    b"\xed\xa0\x80",
    b"99999999999999999999",
)
_LONGEST = 1 << 16


class Mutator:
    """Makes bodies out of a corpus."""

    def __init__(self, random: Random, corpus: Sequence[bytes]) -> None:
        self._random = random
        self._corpus = corpus
        self._ways: tuple[Callable[[bytearray], None], ...] = (
            *(self._flip, self._flip, self._set, self._cut, self._drop, self._double, self._move, self._splice, self._lie, self._odd),
        )

    def body(self) -> bytes:
        """One body."""
        made = bytearray(self._random.choice(self._corpus))
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 8))):
            if made:
                self._random.choice(self._ways)(made)
        return bytes(made[:_LONGEST])

    def _at(self, made: bytearray) -> int:
        return self._random.randrange(len(made))

    def _piece(self, made: bytearray) -> slice:
        at = self._at(made)
        return slice(at, at + self._random.choice((1, 2, 8, 64)))

    def _flip(self, made: bytearray) -> None:
        made[self._at(made)] ^= 1 << self._random.randrange(8)

    def _set(self, made: bytearray) -> None:
        made[self._at(made)] = self._random.choice(_ODD_BYTES)

    def _cut(self, made: bytearray) -> None:
        del made[self._at(made) :]

    def _drop(self, made: bytearray) -> None:
        del made[self._piece(made)]

    def _double(self, made: bytearray) -> None:
        piece = self._piece(made)
        made[piece] = made[piece] * 2

    def _move(self, made: bytearray) -> None:
        piece = self._piece(made)
        moved = made[piece]
        del made[piece]
        at = self._random.randint(0, len(made))
        made[at:at] = moved

    def _splice(self, made: bytearray) -> None:
        other = self._random.choice(self._corpus)
        at = self._random.randrange(len(other) or 1)
        made[self._at(made) :] = other[at:]

    def _lie(self, made: bytearray) -> None:
        at = self._at(made)
        made[at : at + 1] = self._random.choice(_ODD_LENGTHS)

    def _odd(self, made: bytearray) -> None:
        at = self._at(made)
        made[at:at] = self._random.choice(_ODD_TEXTS)
