"""Output of an action as it is read from a terminal: up to a marker or a pattern, of a long one the beginning and the end.

In: bytes, in pieces of any size. Out: text, and whether it has ended. Invariant: how the bytes are cut into pieces changes nothing, unless
a match is longer than `MATCH_BYTES`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MATCH_BYTES = 2**12
"""Bytes at the end of what was read in which a match of a pattern may begin."""
Patterns = Sequence[re.Pattern[bytes]]


class ActionOutput:
    """Output of an action: its beginning, its end, and the number of bytes that are left out between."""

    matched: str | None = None
    """Pattern that ended it. None: the marker did, or it has not ended."""
    unread: bytes = b""
    """Bytes that were read behind the match."""

    def __init__(self, most_bytes: int, marker: bytes, patterns: Patterns = ()) -> None:
        """`most_bytes` are kept; `marker`, or a match of one of the patterns, ends the output and is not part of it."""
        self._half = most_bytes // 2
        self._marker = marker
        self._patterns = patterns
        self._pending = b""
        """Last bytes, in which the marker or a match may begin."""
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> bool:
        """Add what was read, up to the marker or a match; return True if one is there. What follows the marker is of no action."""
        data = self._pending + data
        before, marker, _ = data.partition(self._marker)
        matches = [(match.start(), match.end(), pattern) for pattern in self._patterns if (match := pattern.search(before))]
        if matches:
            start, end, pattern = min(matches, key=lambda match: match[:2])
            self.matched, self.unread, self._pending = pattern.pattern.decode(), data[end:], b""
            self._keep(before[:start])
            return True
        window = max(len(self._marker) - 1, MATCH_BYTES if self._patterns else 0)
        kept = 0 if marker else min(len(before), window)
        self._pending = before[len(before) - kept :]
        self._keep(before[: len(before) - kept])
        return bool(marker)

    def pause(self) -> None:
        """Leave the beginning of a marker, if one is there, unread: what is printed next is added to another output."""
        begun = next((size for size in range(len(self._marker) - 1, 0, -1) if self._pending.endswith(self._marker[:size])), 0)
        self.unread = self._pending[len(self._pending) - begun :]
        self._pending = self._pending[: len(self._pending) - begun]

    def text(self) -> str:
        """Return the output, with a line that counts what is left out."""
        self._keep(self._pending)
        self._pending = b""
        left_out = f"\n[{self._dropped} bytes left out]\n".encode() if self._dropped else b""
        return (self._head + left_out + self._tail).decode(errors="replace")

    def _keep(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (more := len(self._tail) - self._half) > 0:
            self._dropped += more
            del self._tail[:more]


def shortened(text: str, most: int) -> str:
    """Return a text, or the beginning and the end of one that is longer than `most` characters."""
    half = most // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
