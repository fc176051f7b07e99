"""Stopping a long-running builder at once: nothing needs shielding, since every write is idempotent."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class _Stopped(BaseException):
    """SIGTERM or SIGINT arrived. Not an Exception, so that no handler of other code swallows it."""


@contextmanager
def stoppable() -> Generator[None]:
    """Leave the block on SIGTERM or SIGINT, at any point. Outside the main thread: do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        log.info("%s: stopped", signal.Signals(number).name)
        raise _Stopped

    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except _Stopped:
        pass
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
