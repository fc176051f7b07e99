"""Lines of an input, read beside the event loop.

In: a source of lines. Out: calls in the loop. Invariant: neither a cancelled episode nor the end of the process waits for a line.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def read_beside_loop(source: Iterable[T], on_line: Callable[[T], object]) -> None:
    """Read a source in a thread of its own, and call a function in the running event loop with each line.

    The thread is a daemon, unlike those of `asyncio.to_thread`, for which the process waits at its end.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in source:
            try:
                loop.call_soon_threadsafe(on_line, line)
            except RuntimeError:
                return  # the loop is closed, and with it ends what the lines were for

    threading.Thread(target=read, daemon=True).start()
