"""Places: how many attempts may be in a stage at once, and how long each was there.

In: attempts that come and go. Out: places, one an attempt. Invariant: never more are taken than there are; a place that is freed twice is
freed once; whoever is cancelled while it waits has none; the wait is no stage's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from spangrad.types import Stage


class Place:
    """One place, taken; a context manager that frees it."""

    def __init__(self, free: Callable[[], object]) -> None:
        """`free` gives it to somebody else."""
        self._free = free
        self.freed = False

    def free(self) -> None:
        """Let somebody else have it; idempotent."""
        if not self.freed:
            self.freed = True
            self._free()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Free it."""
        self.free()


class Places:
    """A fixed number of places; who waits first is served first."""

    def __init__(self, count: int) -> None:
        """All are free."""
        self._semaphore = asyncio.Semaphore(count)
        self.taken = 0

    async def take(self) -> Place:
        """Wait for a place."""
        await self._semaphore.acquire()
        self.taken += 1
        return Place(self._give)

    def _give(self) -> None:
        self.taken -= 1
        self._semaphore.release()


class StageClock:
    """How long one attempt was in each stage."""

    def __init__(self) -> None:
        self._over: dict[Stage, float] = {}
        self._began: dict[Stage, float] = {}

    @contextmanager
    def counting(self, stage: Stage) -> Generator[None]:
        """The attempt is in a stage."""
        self._began[stage] = time.monotonic()
        try:
            yield
        finally:
            self._over[stage] = time.monotonic() - self._began.pop(stage)

    def seconds(self, stage: Stage) -> float:
        """In a stage, so far; 0 before it."""
        began = self._began.get(stage)
        return self._over.get(stage, 0.0) if began is None else time.monotonic() - began

    def taken(self) -> dict[Stage, float]:
        """In each stage that is over, in the order of the stages."""
        return {stage: self._over[stage] for stage in Stage if stage in self._over}
