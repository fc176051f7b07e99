"""One environment of a service: an object of the user's class, in a thread of its own.

In: a factory. Out: calls of the object's methods, one after the other, each in bounded time. Invariant: a plain method runs in the one
thread in which the object was created; a call that does not return is abandoned with its thread, and never waited for.

The object has `begin(input)`, which returns what is passed to the agent (JSON), and may have `reset()`, `health()` (False: it is unhealthy)
and `close()`; each may be async.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import threading
from collections.abc import Callable
from typing import Any

from spangrad.episode.environment import is_environment
from spangrad.episode.user_calls import USER_ERRORS, plain_exceptions, thread_call
from spangrad.errors import EnvironmentsError

Factory = Callable[[], Any]


class UnhealthyError(Exception):
    """The instance is not fit for another attempt."""


class Instance:
    """An environment, and its thread."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self._seconds = seconds
        self._object: Any = None
        self._busy = False
        """True while its thread is in a call."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: one that hangs does not hold the end of the process.
        threading.Thread(target=self._serve, name=f"environment {name}", daemon=True).start()

    async def make(self, factory: Factory) -> None:
        """Create the object.

        Raises:
            EnvironmentsError: the object has no method `begin`.
            Exception: any of `USER_ERRORS` of the factory, or TimeoutError.
        """
        is_async = inspect.iscoroutinefunction(factory)
        self._object = await (self._call(factory) if is_async else self._call(self._created, factory))
        if not callable(getattr(self._object, "begin", None)):
            remedy = "Serve it with `spangrad env serve`." if is_environment(self._object) else "Write one."
            raise EnvironmentsError(f"the factory gave {type(self._object).__name__}, which has no method begin(input). {remedy}")

    async def begin(self, given: object) -> Any:
        """Prepare the object for a task; return what is passed to the agent.

        Raises:
            Exception: any of `USER_ERRORS` of the object, or TimeoutError.
        """
        environment = await self._call(self._object.begin, given)
        json.dumps(environment, allow_nan=False)
        return environment

    async def reset(self) -> None:
        """Reset the object for the next attempt, and check its health.

        Raises:
            UnhealthyError: it cannot be reset, or is unhealthy; no attempt may use it again.
        """
        if not hasattr(self._object, "reset"):
            raise UnhealthyError("it has no method reset()")
        try:
            await self._call(self._object.reset)
        except USER_ERRORS as error:
            raise UnhealthyError(f"reset: {_message(error)}") from error
        await self.check_health()

    async def check_health(self) -> None:
        """Check the object's health.

        Raises:
            UnhealthyError: it is unhealthy.
        """
        if not hasattr(self._object, "health"):
            return
        try:
            healthy = await self._call(self._object.health)
        except USER_ERRORS as error:
            raise UnhealthyError(f"health: {_message(error)}") from error
        if healthy is False:
            raise UnhealthyError("health: it reports that it is unhealthy")

    async def close(self) -> str | None:
        """Close the object and end the thread; return why closing failed. None: it succeeded."""
        if self._busy:  # should the call return nevertheless, the thread closes the object, and ends
            self._work.put(self._close_late)
            self._work.put(None)
            return "its thread hangs, and is abandoned"
        try:
            if hasattr(self._object, "close"):
                await self._call(self._object.close)
        except USER_ERRORS as error:
            return f"close: {_message(error)}"
        finally:
            self._work.put(None)
        return None

    def _created(self, factory: Factory) -> Any:
        """Create the object in the thread, and keep it even where its time limit has passed meanwhile: `close` must find it."""
        self._object = factory()
        return self._object

    def _close_late(self) -> None:
        closing = getattr(self._object, "close", None)
        if closing is not None and not inspect.iscoroutinefunction(closing):
            closing()

    async def _call(self, function: Callable[..., Any], *given: object) -> Any:
        async with asyncio.timeout(self._seconds):
            with plain_exceptions():
                if inspect.iscoroutinefunction(function):
                    return await function(*given)
                result = await self._in_thread(thread_call(function, *given))
                return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def resolve(result: Any, error: BaseException | None) -> None:
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
            except USER_ERRORS as error:
                failed = error
            except BaseException as error:  # an interrupt that the user's code raises must not end this process
                failed = RuntimeError(f"{type(error).__name__}: {error}")
            self._busy = False
            try:
                loop.call_soon_threadsafe(resolve, result, failed)
            except RuntimeError:
                pass  # the loop has ended

        self._busy = True
        self._work.put(work)
        return await done

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:500]
