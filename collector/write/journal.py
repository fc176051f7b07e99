"""Bodies that are acknowledged and in no table yet, in one file.

In: bodies, many at a time. Out: after a restart, the same bodies. Invariant: a body is in the operating system's hands, whole, when
`append` returns, and none of it is found again when it raises.

The file has an epoch, and is written over when it was emptied: memory that is there already costs a twentieth of memory that must be
given for new pages of a file. A record is its length in four bytes and its checksum (XXH3) in eight, little-endian, and the body; the
epoch is the checksum's seed, so that what an earlier epoch left is no record. What is torn (the process died, or the disk was full, in
the middle of a write) was never acknowledged: reading ends before it.
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
"""Handed to the operating system at once; it takes 1024."""
KEPT_FREE = 256 * 2**20
"""Bytes of the disk that are not taken, as the engine does not: it writes into tables what stands here."""


class Journal:
    """One file, written by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            StoreError: it is something else.
            OSError: it is not to be had.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        head = os.pread(self._file, _HEAD, 0)
        if len(head) == _HEAD and head.startswith(_NAME):
            (self._epoch,) = _EPOCH.unpack_from(head, len(_NAME))
        elif (_NAME + bytes(_EPOCH.size)).startswith(head):
            self._epoch = 0
            self._write_head()
        else:
            os.close(self._file)
            raise StoreError(
                f"{path} is not a journal that this version reads. Start the version that wrote it once, or move the file away."
            )
        self._end = _HEAD
        for start, body in self.bodies():
            self._end = start + len(body)
        # Else what stands behind a torn record of this epoch might be found again, behind the next one.
        os.ftruncate(self._file, self._end)

    @property
    def size(self) -> int:
        """Bytes of records; 0: there are none."""
        return self._end - _HEAD

    def append(self, bodies: Sequence[bytes], others: int = 0) -> list[int]:
        """Write bodies, none of them empty, behind the others: all of them, or none.

        Args:
            bodies: what to write.
            others: bytes that stand in other journals of this disk.

        Returns:
            Where each body begins.

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
        # What stands in journals must fit into tables, too.
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
        """All bodies, in the order in which they came, and where each begins.

        Raises:
            OSError: the disk fails.
        """
        at = _HEAD
        while True:
            record = os.pread(self._file, _RECORD.size, at)
            length, checksum = _RECORD.unpack(record) if len(record) == _RECORD.size else (0, 0)
            at += _RECORD.size
            body = os.pread(self._file, length, at)
            # No body is empty: zeros are what a machine's failure may leave.
            if not body or len(body) != length or xxh3_64_intdigest(body, self._epoch) != checksum:
                return
            yield at, body
            at += length

    def read(self, start: int, length: int) -> bytes:
        """A body, by where it begins.

        Raises:
            OSError: the disk fails, or somebody has cut the file.
        """
        body = os.pread(self._file, length, start)
        if len(body) != length:
            raise OSError(errno.EIO, f"of {length} bytes at {start} there are {len(body)}", str(self.path))
        return body

    def clear(self) -> None:
        """Forget all bodies: they are in the tables.

        Raises:
            OSError: the disk fails.
        """
        self._epoch = (self._epoch + 1) % 2**32
        self._write_head()
        self._end = _HEAD

    def close(self) -> None:
        """Close the file; bodies that are in it stay."""
        if not self.size:
            os.ftruncate(self._file, _HEAD)
        os.close(self._file)

    def _write_head(self) -> None:
        os.pwrite(self._file, _NAME + _EPOCH.pack(self._epoch), 0)

    def _write(self, pieces: Sequence[bytes]) -> None:
        """Write pieces behind the records."""
        at, rest = self._end, iter(pieces)
        while some := list(islice(rest, _PIECES)):
            left = sum(map(len, some))
            written = os.pwritev(self._file, some, at)
            at, left = at + written, left - written
            while left:
                written = os.pwrite(self._file, b"".join(some)[-left:], at)
                at, left = at + written, left - written
