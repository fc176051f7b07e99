"""One environment of a service: an object of somebody's class, in a thread of its own.

In: a factory. Out: calls of the object's methods, one after the other, each in bounded time. Invariant: a plain method runs in the one
thread in which the object was made; what does not come back is left behind with its thread, and never waited for.

The object has `begin(input)`, which gives what the agent is handed (JSON), and may have `reset()`, `health()` (False: it is ill) and
`close()`; each may be async.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import threading
from collections.abc import Callable
from typing import Any

from spangrad.errors import EnvironmentsError

Factory = Callable[[], Any]


class IllError(Exception):
    """The instance is not fit for another user."""


class Instance:
    """An environment, and its thread."""

    def __init__(self, name: str, seconds: float) -> None:
        """Nothing is made yet.

        Args:
            name: for people.
            seconds: that each call may take.
        """
        self.name = name
        self._seconds = seconds
        self._object: Any = None
        self._busy = False
        """Whether its thread is in a call."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: one that hangs does not hold the end of the process.
        threading.Thread(target=self._serve, name=f"environment {name}", daemon=True).start()

    async def make(self, factory: Factory) -> None:
        """Make the object.

        Raises:
            EnvironmentsError: it is none that can be leased.
            Exception: whatever the factory raises, or TimeoutError.
        """
        self._object = await self._call(factory)
        if not callable(getattr(self._object, "begin", None)):
            raise EnvironmentsError(f"the factory gave {type(self._object).__name__}, which has no method begin(input). Write one.")

    async def begin(self, given: object) -> Any:
        """Make it ready for a task, and give what the agent is handed.

        Raises:
            Exception: whatever it raises, or TimeoutError.
        """
        environment = await self._call(self._object.begin, given)
        json.dumps(environment, allow_nan=False)
        return environment

    async def clean(self) -> None:
        """Make it as if nobody had used it.

        Raises:
            IllError: it cannot be; then nobody may use it again.
        """
        if not hasattr(self._object, "reset"):
            raise IllError("it has no method reset()")
        try:
            await self._call(self._object.reset)
        except Exception as error:  # somebody's code
            raise IllError(f"reset: {_said(error)}") from error
        await self.look()

    async def look(self) -> None:
        """Ask for its health.

        Raises:
            IllError: it is ill.
        """
        if not hasattr(self._object, "health"):
            return
        try:
            healthy = await self._call(self._object.health)
        except Exception as error:
            raise IllError(f"health: {_said(error)}") from error
        if healthy is False:
            raise IllError("health: it says that it is ill")

    async def close(self) -> str | None:
        """Let it go; why that failed. None: it did not."""
        if self._busy:
            return "its thread hangs, and is left behind"
        try:
            if hasattr(self._object, "close"):
                await self._call(self._object.close)
        except Exception as error:
            return f"close: {_said(error)}"
        finally:
            self._work.put(None)
        return None

    async def _call(self, function: Callable[..., Any], *given: object) -> Any:
        async with asyncio.timeout(self._seconds):
            if inspect.iscoroutinefunction(function):
                return await function(*given)
            result = await self._in_thread(lambda: function(*given))
            return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def work() -> None:
            result, failed = None, None
            try:
                result = function()
            except Exception as error:
                failed = error
            except BaseException as error:  # sys.exit() in somebody's code is not our end
                failed = RuntimeError(f"{type(error).__name__}: {error}")
            self._busy = False
            try:
                loop.call_soon_threadsafe(tell, result, failed)
            except RuntimeError:
                pass  # the loop has ended

        self._busy = True
        self._work.put(work)
        return await done

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:500]
