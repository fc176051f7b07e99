"""Environments that raise what `except Exception` does not catch: in a step on the action "raise", or when they are created."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from itertools import count
from typing import Any

from spangrad.episode.environment import StepResult


class Panic(BaseException):
    """Exception as extensions raise it that panic."""


class PlainPanics:
    """Plain methods, in a thread of the session."""

    def reset(self, task: Any) -> str:
        return "Begin."

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        if action == "raise":
            self.fail()
        return StepResult(action)

    def fail(self) -> None:
        raise Panic("broken")


class RefusesTasks(PlainPanics):
    def reset(self, task: Any) -> str:
        raise ValueError("no such task")


class PlainCancels(PlainPanics):
    def fail(self) -> None:
        raise asyncio.CancelledError


class PlainInterrupts(PlainPanics):
    def fail(self) -> None:
        raise KeyboardInterrupt


class AwaitedPanics(PlainPanics):
    """A plain step that returns a coroutine, which runs in the event loop of the process."""

    def step(self, action: str) -> Awaitable[StepResult]:
        return self._later(action)

    async def _later(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        if action == "raise":
            self.fail()
        return StepResult(action)


class AwaitedExits(AwaitedPanics):
    def fail(self) -> None:
        raise SystemExit(3)


class AsyncPanics(AwaitedPanics):
    """Async methods, in the event loop of the process."""

    async def reset(self, task: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "Begin."

    async def step(self, action: str) -> StepResult:  # pyright: ignore[reportIncompatibleMethodOverride]
        return await self._later(action)


class AsyncInterrupts(AsyncPanics):
    def fail(self) -> None:
        raise KeyboardInterrupt


class AsyncCancels(AsyncPanics):
    """Awaits a task of its own that it has cancelled."""

    async def step(self, action: str) -> StepResult:
        if action == "raise":
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        return StepResult(action)


class AsyncCancelsItself(AsyncPanics):
    """Cancels the task in which it is called."""

    def fail(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def step(self, action: str) -> StepResult:
        result = await self._later(action)
        await asyncio.sleep(0)
        return result


class AsyncExitsInTask(AsyncPanics):
    """Starts tasks and callbacks that exit, and awaits none of them."""

    def fail(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [asyncio.create_task(self._exit()) for _ in range(2)]
        loop.call_soon(sys.exit, 4)
        loop.call_later(0.01, sys.exit, 5)

    async def _exit(self) -> None:
        sys.exit(3)


class PanicsWhenCreated(PlainPanics):
    """Serves one session; the first object is the one that describes the environment."""

    objects = count(1)

    def __init__(self) -> None:
        if next(self.objects) == 3:
            self.fail()


class AsyncPanicsWhenCreated(AsyncPanics):
    objects = count(1)

    def __init__(self) -> None:
        if next(self.objects) == 3:
            self.fail()
