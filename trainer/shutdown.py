"""SIGTERM and SIGINT as one exception that never interrupts a transaction.

Invariant: inside `shielded()` nothing is raised; a signal that arrives there is raised as soon as the shield ends.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_SLICE_SECONDS = 0.1
"""Longest single sleep, in seconds: a signal that a shield holds back ends no sleep by itself."""


class Stopped(BaseException):
    """Request to this process to end; not an Exception, so that no library's handler swallows it."""


class Shutdown:
    """Handler that turns the two signals into `Stopped` while it is entered."""

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the signal that arrived. None: none did."""
        self._shield_depth = 0
        self._ended = False

    @property
    def is_ending(self) -> bool:
        """Return whether a signal arrived, or the process is ending: nothing is waited for any more."""
        return self._ended or self.requested is not None

    @contextmanager
    def listening(self) -> Generator[None]:
        """Handle the signals; outside the main thread, where Python delivers none, leave them alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    @contextmanager
    def shielded(self) -> Generator[None]:
        """Hold signals back until the block ends; another thread than the main one receives none, and holds back none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._shield_depth += 1
        try:
            yield
        finally:
            self._shield_depth -= 1
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if a shield, or code that swallowed it, has held it back.

        Raises:
            Stopped: a signal arrived, and nothing is shielded.
        """
        if self.requested and not self._shield_depth:
            raise Stopped

    def end(self) -> None:
        """Raise nothing from here on: the process is ending, and cleans up."""
        self._shield_depth += 1
        self._ended = True

    def sleep(self, seconds: float) -> None:
        """Sleep, at most until a signal arrives.

        Raises:
            Stopped: one arrived, and nothing is shielded.
        """
        end = time.monotonic() + seconds
        while not self.is_ending and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_SECONDS))
        self.check()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested is None:  # a second signal must not interrupt the clean-up
            self.requested = signal.Signals(number).name
            self.check()
