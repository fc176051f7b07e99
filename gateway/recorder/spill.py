"""Spill of spans to disk until the store has acknowledged them: a directory of segments that outlives the process.

In: serialized spans, one `append` each. Out: the same spans in the same order, read back from any offset. Invariant: a
span that was appended is there after a kill of the process (not after a loss of power: nothing is synced), whole or not
at all, until it is released; one process owns a directory.

A segment is named by its offset in the endless file that all segments form together, and holds frames: length and CRC-32 of
a span as little-endian uint32, then the span.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from spangrad.errors import GatewayError
from spangrad.processes import lock_alone, make_private

log = logging.getLogger(__name__)

SEGMENT_BYTES = 8 * 2**20
"""Size at which a segment is full; up to this many bytes of released spans are sent again after a kill."""
SUFFIX = ".spill"
_HEADER = struct.Struct("<II")
_CHECKSUM_OF_NOTHING = 0x5350414E
"""Initial value of the CRC-32, so that a tail of zeros, which some file systems leave behind, is no valid frame."""


@dataclass(frozen=True, slots=True)
class SpilledSpan:
    """A span on its way to the store."""

    span: bytes
    end: int
    """Offset behind it."""
    due: float = 0
    """Time (monotonic) before which it is not sent."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Spans that were read at once."""

    spans: list[SpilledSpan] = field(default_factory=list[SpilledSpan])
    end: int = 0
    """Offset at which to continue reading."""
    damaged: int = 0
    """Number of bytes that are no whole frames: a write that was cut by a kill, or a fault of the disk."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Range of bytes within one segment."""

    path: Path
    segment: int
    """Offset of the segment's first byte."""
    begin: int
    end: int

    def read(self, limit: int) -> Piece:
        """Read spans from the beginning of the extent: at least one, and more only within `limit` bytes. Blocks.

        Raises:
            OSError: the disk fails.
        """
        left = self.end - self.begin
        with self.path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), min(max(limit, _HEADER.size), left), self.begin - self.segment)
            if (needed := min(_first_frame(data), left)) > len(data):
                data = os.pread(file.fileno(), needed, self.begin - self.segment)
        spans, end, damaged = frames(data)
        if not end or len(data) == left:
            # A length that leads beyond the end, or the rest at the end: it never becomes a frame.
            damaged += left - end
            end = left
        return Piece([SpilledSpan(span, self.begin + behind) for span, behind in spans], self.begin + end, damaged)


@dataclass(slots=True)
class _Segment:
    path: Path
    begin: int
    end: int
    """Offset behind its last byte; grows while it is the last segment."""


class Spill:
    """The segments of a directory, owned until `close`."""

    def __init__(self, directory: Path) -> None:
        """Take over a directory, with what an earlier process left in it.

        Raises:
            GatewayError: another process owns it, or it cannot be made or written.
        """
        self._directory = directory
        self._lock = _own(directory)
        self._segments: deque[_Segment] = deque(_left_segments(directory))
        self._file: int | None = None
        self.begin = self._segments[0].begin if self._segments else 0
        """Offset of the first span that is not released."""
        self.end = self._segments[-1].end if self._segments else 0
        """Offset behind the last span."""

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes that are not released. The disk holds up to a segment more."""
        return self.end - self.begin

    def append(self, span: bytes) -> int:
        """Write a span, and return the offset behind it.

        Raises:
            OSError: it was not written, and no part of it is left (the disk is full, say).
        """
        size = len(span)
        frame = (_HEADER.pack(size, zlib.crc32(span, _CHECKSUM_OF_NOTHING)), span)
        try:
            if self._file is None or self.end - self._segments[-1].begin >= SEGMENT_BYTES:
                self._file = self._next_segment()
            written = os.writev(self._file, frame)
            if written != _HEADER.size + size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._cut()
            raise
        self.end += written
        self._segments[-1].end = self.end
        return self.end

    def extent(self, begin: int) -> Extent:
        """Return the rest of the segment that holds an offset, which lies before `end`."""
        segment = next(segment for segment in self._segments if begin < segment.end)
        return Extent(segment.path, segment.begin, max(begin, segment.begin), segment.end)

    def release(self, end: int) -> None:
        """Release the spans up to an offset, which the store has acknowledged; delete segments that hold nothing else."""
        self.begin = end
        while len(self._segments) > 1 and self._segments[0].end <= end:
            _delete(self._segments.popleft().path)

    def close(self) -> None:
        """Give up the directory; spans that are not released stay for the next owner."""
        self._close_file()
        if self.begin == self.end:
            self._drop_all()
        os.close(self._lock)

    def _next_segment(self) -> int:
        self._close_file()
        if self.begin == self.end:
            self._drop_all()
        if self._segments and self._segments[-1].begin == self.end:
            # Nothing was ever written to it: the new one takes its name.
            self._segments.pop()
        path = self._directory / f"{self.end:020}{SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._segments.append(_Segment(path, self.end, self.end))
        return file

    def _cut(self) -> None:
        """Remove the bytes that a failed write has left, and all segments if no span waits."""
        if self._file is None:
            return
        try:
            os.ftruncate(self._file, self.end - self._segments[-1].begin)
        except OSError:
            # Left for a reader to skip: the next span begins a segment.
            self._close_file()
        if self.begin == self.end:
            self._close_file()
            self._drop_all()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _drop_all(self) -> None:
        while self._segments:
            _delete(self._segments.popleft().path)


def frames(data: bytes) -> tuple[list[tuple[bytes, int]], int, int]:
    """Read the whole frames at the head of `data`.

    Returns:
        The spans, each with the offset behind it; the offset behind the last frame; bytes of frames that do not match their checksum.
    """
    spans: list[tuple[bytes, int]] = []
    at = damaged = 0
    while len(data) - at >= _HEADER.size:
        size, checksum = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + size
        if end > len(data):
            break
        span = data[at + _HEADER.size : end]
        if zlib.crc32(span, _CHECKSUM_OF_NOTHING) == checksum:
            spans.append((span, end))
        else:
            damaged += end - at
        at = end
    return spans, at, damaged


def _first_frame(data: bytes) -> int:
    """Return the number of bytes of the first frame, header included."""
    return _HEADER.size + (_HEADER.unpack_from(data)[0] if len(data) >= _HEADER.size else 0)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be deleted (%s): its spans go to the store once more after the next start", path, error.strerror)


def _own(directory: Path) -> int:
    """Lock the directory until the process ends; return the lock's file descriptor."""
    try:
        make_private(directory)
        lock = os.open(directory / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise GatewayError(
            f"gateway.spill_path = {directory} cannot be used: {error.strerror}. Set it to a directory that may be written."
        ) from None
    if not lock_alone(lock, f"gateway.spill_path = {directory}", GatewayError):
        owner = os.read(lock, 32).decode().strip()
        os.close(lock)
        raise GatewayError(
            f"gateway.spill_path = {directory} is in use by the gateway of process {owner or 'unknown'}. "
            "Stop that one, or set gateway.spill_path to another directory."
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _left_segments(directory: Path) -> list[_Segment]:
    """Return the segments that an earlier owner left, in order."""
    paths = sorted(path for path in directory.glob(f"*{SUFFIX}") if path.stem.isdecimal())
    segments = [_Segment(path, int(path.stem), int(path.stem) + path.stat().st_size) for path in paths]
    for segment, following in pairwise(segments):
        # The bytes that a failed write left overlap the beginning of the next segment.
        segment.end = min(segment.end, following.begin)
    return segments
