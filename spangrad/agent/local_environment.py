"""Environments in the agent host's own process: made by an initialiser for one attempt, closed with it.

In: a task's input. Out: the initialiser's value, for the agent and its evaluator. Invariant: an environment is closed once, however the
attempt ended, and in bounded time.

An initialiser is a callable `factory(input)`, plain or async. Where its value is an async context manager, it is entered, and the value
of that is the environment; else the value itself is, and is closed by its `aclose()` or `close()`, where it has one. Or it is a class with
reset and step (`spangrad.episode.environment.Environment`), or a function of `spangrad.episode.adapters` that creates such objects, called
without arguments: the environment is its `EnvironmentCalls`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from spangrad.episode.adapters.references import is_factory
from spangrad.episode.environment import EnvironmentCalls
from spangrad.episode.user_calls import USER_ERRORS, plain_exceptions, user_call

Call = Callable[..., Awaitable[Any]]
_CLOSE_SECONDS = 4.0
"""Time limit of closing, in seconds; shorter than a runner waits for an attempt that it has cancelled."""


class LocalEnvironment:
    """The environment of one attempt."""

    def __init__(self, initialiser: Callable[..., Any] | None, threads: ThreadPoolExecutor) -> None:
        """Make nothing yet. Without an initialiser `value` stays what the host has assigned; a plain `close()` runs in `threads`."""
        self._initialiser = initialiser
        self._threads = threads
        self._close: Callable[[], Any] | None = None
        self._closed_in_time = True
        self.value: Any = None

    async def open(self, call: Call, given: object) -> None:
        """Make the environment of a task's input; `call` calls a function, plain or async, as initialisers are run."""
        if self._initialiser is None:
            return
        if is_factory(self._initialiser):
            self.value = await EnvironmentCalls.create(self._initialiser)
            self._close = self.value.aclose
            return
        value = await call(self._initialiser, given)
        if hasattr(value, "__aenter__"):
            self.value = await value.__aenter__()
            self._close = partial(value.__aexit__, None, None, None)
            return
        self.value = value
        self._close = getattr(value, "aclose", None) or getattr(value, "close", None)

    async def close(self) -> bool:
        """Close it, in the task that opened it; False when that exceeds its time limit, so that its thread may still run. Idempotent."""
        close, self._close = self._close, None
        if close is None:
            return self._closed_in_time
        self._closed_in_time = False  # a cancellation may leave it half closed
        timeout = asyncio.timeout(_CLOSE_SECONDS)
        try:
            async with timeout:
                with plain_exceptions():
                    await user_call(self._threads, close)
        except USER_ERRORS:  # whatever it raises, the attempt's result is known
            traceback.print_exc()
        self._closed_in_time = not timeout.expired()
        return self._closed_in_time
