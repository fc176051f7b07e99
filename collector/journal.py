"""Bodies that are acknowledged and in no table yet, in one file.

In: bodies, many at a time. Out: after a restart, the same bodies. Invariant: a body is in the operating system's hands, whole, when
`append` returns, and none of it is left behind when it raises.

A record is its length and its CRC-32, four bytes each, little-endian, and the body. What is torn (the process died, or the disk was
full, in the middle of a write) was never acknowledged: reading ends before it.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from spangrad.errors import StoreError

logger = logging.getLogger(__name__)

_HEAD = b"spangrad journal 1\n"
_RECORD = struct.Struct("<II")
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
        self._end = os.fstat(self._file).st_size
        if self._end < len(_HEAD):
            self._cut(0)
            os.pwrite(self._file, _HEAD, 0)
            self._end = len(_HEAD)
        elif os.pread(self._file, len(_HEAD), 0) != _HEAD:
            os.close(self._file)
            raise StoreError(
                f"{path} is not a journal that this version reads. Start the version that wrote it once, or move the file away."
            )

    @property
    def size(self) -> int:
        """Bytes of records; 0: there are none."""
        return self._end - len(_HEAD)

    def append(self, bodies: Sequence[bytes]) -> None:
        """Write bodies, none of them empty, behind the others: all of them, or none.

        Raises:
            OSError: there is no room, or the disk fails.
        """
        pieces: list[bytes] = []
        for body in bodies:
            pieces += (_RECORD.pack(len(body), zlib.crc32(body)), body)
        data = memoryview(b"".join(pieces))
        disk = os.fstatvfs(self._file)
        # What stands here must fit into tables, too.
        if disk.f_bavail * disk.f_frsize < KEPT_FREE + self.size + 2 * len(data):
            raise OSError(errno.ENOSPC, "less than 256 MiB would be left of the disk with these spans in the tables", str(self.path))
        at = self._end
        try:
            while data:
                written = os.pwrite(self._file, data, at)
                data, at = data[written:], at + written
        except OSError:
            self._cut(self._end)
            raise
        self._end = at

    def bodies(self) -> Iterator[bytes]:
        """All bodies, in the order in which they came.

        Raises:
            OSError: the disk fails.
        """
        at = len(_HEAD)
        while at < self._end:
            record = os.pread(self._file, _RECORD.size, at)
            length, checksum = _RECORD.unpack(record) if len(record) == _RECORD.size else (0, 0)
            body = os.pread(self._file, length, at + _RECORD.size)
            # No body is empty: zeros are what a machine's failure may leave.
            if not body or len(body) != length or zlib.crc32(body) != checksum:
                logger.warning("%s: %d bytes behind byte %d are no whole body and are cut off", self.path, self._end - at, at)
                self._cut(at)
                self._end = at
                return
            at += _RECORD.size + length
            yield body

    def clear(self) -> None:
        """Forget all bodies: they are in the tables.

        Raises:
            OSError: the disk fails.
        """
        self._cut(len(_HEAD))
        self._end = len(_HEAD)

    def close(self) -> None:
        """Close the file; what is in it stays."""
        os.close(self._file)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
