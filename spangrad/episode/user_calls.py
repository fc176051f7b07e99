"""Calls of users' functions by an event loop: what they raise reaches the loop's own handlers.

In: a function, or the work that awaits it. Out: its result, or an exception. Invariant: no exception of a user's code is lost in a
future, or passes for one of the event loop itself.

Only the standard library: agents' processes import this.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

USER_ERRORS = (Exception, SystemExit)
"""Exceptions of a user's code that end nothing but its call: `plain_exceptions` turns all others into these, save for interrupts."""


def thread_call(function: Callable[..., Any], /, *arguments: object, **keywords: object) -> Callable[[], Any]:
    """Return a call of a function for a thread of a pool, in a copy of the current context.

    The call raises RuntimeError where the function raises StopIteration: no future of asyncio takes that, so its result would never come.
    """
    context = contextvars.copy_context()

    def call() -> Any:
        try:
            return context.run(function, *arguments, **keywords)
        except StopIteration as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise RuntimeError(f"{name} raised StopIteration") from error

    return call


async def user_call(executor: Executor | None, function: Callable[..., Any], /, *arguments: object, **keywords: object) -> Any:
    """Call a function, and wait for its result where it is awaitable; a plain one in a thread of a pool, None: the event loop's own.

    Raises:
        RuntimeError: the plain function raised StopIteration.
        Exception: any of the function's.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    result = await asyncio.get_running_loop().run_in_executor(executor, thread_call(function, *arguments, **keywords))
    return await result if inspect.isawaitable(result) else result


@contextmanager
def plain_exceptions() -> Generator[None]:
    """Replace an exception that `except Exception` does not catch by a RuntimeError with that cause; exits and interrupts stay.

    Raises:
        CancelledError: the task that runs this was cancelled.
        RuntimeError: another task was, of the user's code; or something else that is no `Exception` was raised, as by extensions
            that panic.
    """
    try:
        yield
    except (*USER_ERRORS, KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise RuntimeError("cancelled by the user's code itself, in a task of its own") from error
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _is_cancelled() -> bool:
    """Return whether the current task is being cancelled; False in a thread without an event loop, which runs none."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0
