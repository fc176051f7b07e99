"""A pipe between a statement's thread and the event loop: the engine writes an answer, the loop reads it.

In: what the engine writes. Out: pieces of it. Invariant: no more than the pipe's own bytes wait between the two, so that whoever
reads slowly slows the engine down.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import termios
import threading

PIECE = 1 << 20
_F_SETPIPE_SZ = 1031
"""Of Linux."""


class Pipe:
    """One pipe."""

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()
        """The second is the end to write to, given to the engine."""
        os.set_blocking(self._reading, False)
        self._open = True
        self._lock = threading.Lock()
        """Of what was read: it is in the pipe, or is counted."""
        self._came = False
        try:
            # Room for most answers, whole: each turn between the two threads costs more than a copy.
            fcntl.fcntl(self._reading, _F_SETPIPE_SZ, PIECE)
        except OSError:
            # A user's pipes may hold only so much in all: then it is slower.
            pass

    async def read(self) -> bytes:
        """The next piece; empty at the end."""
        while True:
            try:
                with self._lock:
                    piece = os.read(self._reading, PIECE)
                    self._came = self._came or bool(piece)
                return piece
            except BlockingIOError:
                await self._readable()

    def rest(self) -> bytes:
        """What is left of a pipe that is written no more."""
        return os.read(self._reading, size) if (size := _waiting(self._reading)) else b""

    def is_untouched(self) -> bool:
        """Whether nothing was written, and read meanwhile: for the writer, who alone could."""
        with self._lock:
            return not self._came and not _waiting(self.descriptor)

    def close_writing(self) -> None:
        """Say that all is written. Once, by whoever ran the statement, or kept it from running."""
        os.close(self.descriptor)

    def close_reading(self) -> None:
        """Read no more; idempotent."""
        if self._open:
            self._open = False
            os.close(self._reading)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        loop.add_reader(self._reading, wake, waiter)
        try:
            await waiter
        finally:
            loop.remove_reader(self._reading)


def wake(waiter: asyncio.Future[None]) -> None:
    """End a wait, once."""
    if not waiter.done():
        waiter.set_result(None)


def _waiting(descriptor: int) -> int:
    size = bytearray(4)
    fcntl.ioctl(descriptor, termios.FIONREAD, size)
    return int.from_bytes(size, sys.byteorder)
