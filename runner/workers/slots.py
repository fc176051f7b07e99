"""Slots: limits how many attempts are in a stage at once, and measures how long each was there.

In: attempts that enter and leave stages. Out: slots, one per attempt. Invariant: the number of taken slots never exceeds the limit; a slot
that is freed twice counts once; an attempt that is cancelled while it waits takes none; the wait counts for no stage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from spangrad.types import Stage


class Slot:
    """One taken slot; a context manager that frees it."""

    def __init__(self, free: Callable[[], object]) -> None:
        self._free = free
        self.freed = False

    def free(self) -> None:
        """Make the slot available to another attempt; idempotent."""
        if not self.freed:
            self.freed = True
            self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.free()


class Slots:
    """A fixed number of slots, taken in the order of the requests."""

    def __init__(self, count: int) -> None:
        self._semaphore = asyncio.Semaphore(count)

    async def take(self) -> Slot:
        """Wait for a slot, and take it."""
        await self._semaphore.acquire()
        return Slot(self._semaphore.release)


@dataclass(frozen=True, slots=True)
class StageTime:
    """Interval of an attempt in one stage, the wait for a slot excluded."""

    stage: Stage
    started_at: int
    """Unix time, in nanoseconds."""
    seconds: float


class StageClock:
    """Times of one attempt in its stages."""

    def __init__(self) -> None:
        self.times: list[StageTime] = []
        """Completed stages, in order."""
        self._began: dict[Stage, float] = {}

    @contextmanager
    def counting(self, stage: Stage) -> Generator[None]:
        """Measure a stage for as long as the block."""
        started_at = time.time_ns()
        self._began[stage] = time.monotonic()
        try:
            yield
        finally:
            self.times.append(StageTime(stage, started_at, time.monotonic() - self._began.pop(stage)))

    def seconds(self, stage: Stage) -> float:
        """Return the seconds in a stage so far; 0 before it."""
        began = self._began.get(stage)
        current = 0.0 if began is None else time.monotonic() - began
        return current + sum(part.seconds for part in self.times if part.stage is stage)
