"""Who waits for something to happen in a run, and how they are told.

In: what happens. Out: those who waited go on. Invariant: whoever takes the news before he looks misses nothing that happens after.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence


class News:
    """Of one kind; within one event loop."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._awaited: dict[str, asyncio.Event] = {}

    @property
    def awaited(self) -> Sequence[str]:
        """Runs of which news has been asked for, and none has come."""
        return list(self._awaited)

    def of(self, run_id: str) -> asyncio.Event:
        """What is set by the next news of a run."""
        return self._awaited.setdefault(run_id, asyncio.Event())

    def tell(self, run_id: str | None = None) -> None:
        """There is news of a run; None: of any."""
        for one in self.awaited if run_id is None else [run_id]:
            if event := self._awaited.pop(one, None):
                event.set()


async def within(news: asyncio.Event, end: float) -> bool:
    """Wait for news until then, by the monotonic clock; whether there was any."""
    left = end - time.monotonic()
    if left <= 0:
        return False
    try:
        await asyncio.wait_for(news.wait(), left)
    except TimeoutError:
        return False
    return True
