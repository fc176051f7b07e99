"""Journal: one file of the bodies that are acknowledged and in no table yet.

Invariant: a body is written to the operating system, whole, when `append` returns, and no part of it is read back when it raises.

The file has an epoch, and is overwritten after it was cleared: existing pages of a file cost a twentieth of newly allocated ones. A record
is its length in four bytes and its checksum (XXH3) in eight, little-endian, and the body; the epoch is the checksum's seed, so that the
remains of an earlier epoch are no records. A torn record (the process died, or the disk was full, in the middle of a write) was never
acknowledged: reading ends before it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from xxhash import xxh3_64_intdigest

from spangrad.errors import StoreError

_NAME = b"spangrad journal 3\n"
_EPOCH = struct.Struct("<I")
_HEAD = len(_NAME) + _EPOCH.size
_RECORD = struct.Struct("<IQ")
_PIECES = 512
"""Buffers that are passed to the operating system at once; its limit is 1024."""
KEPT_FREE = 256 * 2**20
"""Bytes of the disk that stay free, for the database, which writes the journal's spans into tables."""


class Journal:
    """A journal: one file, written by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            StoreError: the file is no journal of this version.
            OSError: it cannot be opened.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        head = os.pread(self._file, _HEAD, 0)
        if len(head) == _HEAD and head.startswith(_NAME):
            (self._epoch,) = _EPOCH.unpack_from(head, len(_NAME))
        elif (_NAME + bytes(_EPOCH.size)).startswith(head):
            self._epoch = 0
            self._write_head(self._epoch)
        else:
            os.close(self._file)
            raise StoreError(
                f"{path} is not a journal that this version reads. Start the version that wrote it once, or move the file away."
            )
        self._end = _HEAD
        for start, body in self.bodies():
            self._end = start + len(body)
        # Else the bytes behind a torn record of this epoch might be read as a record behind the next one.
        os.ftruncate(self._file, self._end)

    @property
    def size(self) -> int:
        """Return the bytes of records; 0: there are none."""
        return self._end - _HEAD

    def append(self, bodies: Sequence[bytes], others: int = 0) -> list[int]:
        """Append bodies, none of them empty: all of them, or none. Return the offset at which each begins.

        Other journals of this disk hold `others` bytes.

        Raises:
            OSError: there is no room, or the disk fails.
        """
        pieces: list[bytes] = []
        starts: list[int] = []
        size = 0
        for body in bodies:
            pieces += (_RECORD.pack(len(body), xxh3_64_intdigest(body, self._epoch)), body)
            starts.append(self._end + size + _RECORD.size)
            size += _RECORD.size + len(body)
        disk, growth = os.fstatvfs(self._file), max(0, self._end + size - os.fstat(self._file).st_size)
        # The content of the journals must fit into the tables as well.
        if disk.f_bavail * disk.f_frsize < KEPT_FREE + self.size + others + size + growth:
            raise OSError(errno.ENOSPC, "less than 256 MiB would be left of the disk with these spans in the tables", str(self.path))
        try:
            self._write(pieces)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += size
        return starts

    def bodies(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the content of all bodies, in the order in which they came.

        Raises:
            OSError: the disk fails.
        """
        at, end = _HEAD, os.fstat(self._file).st_size
        while at + _RECORD.size <= end:
            length, checksum = _RECORD.unpack(os.pread(self._file, _RECORD.size, at))
            at += _RECORD.size
            # Any bytes of an earlier epoch may stand here: as a length, they may name more than memory holds.
            body = os.pread(self._file, length, at) if at + length <= end else b""
            # No body is empty: a failure of the machine may leave zeros.
            if not body or xxh3_64_intdigest(body, self._epoch) != checksum:
                return
            yield at, body
            at += length

    def read(self, start: int, length: int) -> bytes:
        """Read a body at the offset where it begins.

        Raises:
            OSError: the disk fails, or the file was truncated.
        """
        body = os.pread(self._file, length, start)
        if len(body) != length:
            raise OSError(errno.EIO, f"of {length} bytes at {start} there are {len(body)}", str(self.path))
        return body

    def clear(self) -> None:
        """Remove all bodies, which are in the tables.

        Raises:
            OSError: the disk fails.
        """
        epoch = (self._epoch + 1) % 2**32
        # First: bodies that are appended after a failure belong to the epoch that the file names.
        self._write_head(epoch)
        self._epoch, self._end = epoch, _HEAD

    def close(self) -> None:
        """Close the file; bodies in it are kept."""
        if not self.size:
            os.ftruncate(self._file, _HEAD)
        os.close(self._file)

    def _write_head(self, epoch: int) -> None:
        os.pwrite(self._file, _NAME + _EPOCH.pack(epoch), 0)

    def _write(self, pieces: Sequence[bytes]) -> None:
        """Write pieces after the last record."""
        at, rest = self._end, iter(pieces)
        while group := list(islice(rest, _PIECES)):
            left = sum(map(len, group))
            written = os.pwritev(self._file, group, at)
            at, left = at + written, left - written
            while left:
                written = os.pwrite(self._file, b"".join(group)[-left:], at)
                at, left = at + written, left - written
