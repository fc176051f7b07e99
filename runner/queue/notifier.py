"""Notifies the tasks that wait for an event in a run.

Invariant: a task that takes the `asyncio.Event` before it reads the state misses nothing that happens later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence


class Notifier:
    """Events of one kind, by run; within one event loop."""

    def __init__(self) -> None:
        """Start without waiting tasks."""
        self._events: dict[str, asyncio.Event] = {}

    @property
    def awaited(self) -> Sequence[str]:
        """Runs whose next event is awaited."""
        return list(self._events)

    def of(self, run_id: str) -> asyncio.Event:
        """Return what is set at the next event of a run."""
        return self._events.setdefault(run_id, asyncio.Event())

    def notify(self, run_id: str | None = None) -> None:
        """Notify those who wait for a run; None: for any run."""
        for run in self.awaited if run_id is None else [run_id]:
            if event := self._events.pop(run, None):
                event.set()


async def wait_for_event(event: asyncio.Event, end: float) -> bool:
    """Wait for an event until a time of the monotonic clock; return whether it happened."""
    left = end - time.monotonic()
    if left <= 0:
        return False
    try:
        await asyncio.wait_for(event.wait(), left)
    except TimeoutError:
        return False
    return True
