"""A pipe between a statement's thread and the event loop: the database writes an answer, the loop reads it.

Invariant: no more bytes than the pipe's buffer wait between the two, so that a slow client slows the database down.
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
"""Linux's fcntl command that sets the size of a pipe's buffer."""


class Pipe:
    """A pipe with one writer, on a worker thread, and one reader, in the event loop."""

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()
        """File descriptors; `descriptor` is the writing end, which is passed to the database."""
        os.set_blocking(self._reading, False)
        self._open = True
        self._lock = threading.Lock()
        """Guards reads, so that bytes are either in the pipe or recorded in `_has_data`."""
        self._has_data = False
        try:
            # A buffer for most answers, whole: each switch between the two threads costs more than a copy.
            fcntl.fcntl(self._reading, _F_SETPIPE_SZ, PIECE)
        except OSError:
            # The kernel limits the total size of a user's pipes: then answers are slower.
            pass

    async def read(self) -> bytes:
        """Read the next piece; empty at the end."""
        while True:
            try:
                with self._lock:
                    piece = os.read(self._reading, PIECE)
                    self._has_data = self._has_data or bool(piece)
                return piece
            except BlockingIOError:
                await self._readable()

    def rest(self) -> bytes:
        """Read the rest of a pipe after its writer has finished."""
        return os.read(self._reading, size) if (size := _waiting(self._reading)) else b""

    def is_untouched(self) -> bool:
        """Return whether nothing was ever written; to be called by the writer."""
        with self._lock:
            return not self._has_data and not _waiting(self.descriptor)

    def close_writing(self) -> None:
        """Close the writing end. To be called once, by the thread that ran the statement or by the task that cancelled it."""
        os.close(self.descriptor)

    def close_reading(self) -> None:
        """Close the reading end; idempotent."""
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
