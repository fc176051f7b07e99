"""Notifies the tasks that wait for an event in a run.

Invariant: a task that takes the `asyncio.Event` before it reads the state misses nothing that happens later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")
_GATHER_SECONDS = 0.01
"""Time for which a read that waited for an event waits for others, in seconds: they come in bursts."""


class Notifier:
    """Events of one kind, by run; within one event loop."""

    def __init__(self) -> None:
        self._events = WeakValueDictionary[str, asyncio.Event]()
        """Events that a task holds, since it waits for them."""
        self.closed = False
        """True if no wait is worth while any more."""

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

    def close(self) -> None:
        """Notify all, and end every wait of `read_until` from now on."""
        self.closed = True
        self.notify()

    async def read_until(self, run_id: str, read: Callable[[], Awaitable[T]], enough: Callable[[T], bool], seconds: float) -> T:
        """Read, and again after each event of a run, until what was read is enough; after so many seconds return what there is."""
        end = time.monotonic() + seconds
        while True:
            event = self.of(run_id)
            state = await read()
            if enough(state) or self.closed or not await wait_for_event(event, end):
                return state
            await asyncio.sleep(_GATHER_SECONDS)


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
