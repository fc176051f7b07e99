"""Event loop with a clock that only jumps, to the next timer: time limits pass at once, and a deadlock is seen at once.

Invariant: nothing that runs in it uses threads; while it waits for one, its clock would jump. How long anything takes does not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class DeadlockError(AssertionError):
    """Everything waits, and no timer will wake it."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop of one test."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            times = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            if not times:
                raise DeadlockError
            self._now = max(self._now, min(times))
        super()._run_once()


def run_in_virtual_time(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
