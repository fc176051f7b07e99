"""Asks a service over HTTP again while it is busy or away, as long as whoever asks is patient.

In: a request. Out: its answer, when it is one. Invariant: only what a later try may mend is tried again: 429, 503, and connections that
fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

T = TypeVar("T")
_WAIT = wait_random_exponential(multiplier=0.1, max=2.0)
_RETRY_AFTER_MOST = 30.0


class AgainError(Exception):
    """The service is busy or away."""

    def __init__(self, said: str, after_seconds: float | None = None) -> None:
        """Say what.

        Args:
            said: for people.
            after_seconds: when the service wants to be asked again. None: it does not say.
        """
        super().__init__(said)
        self.after_seconds = after_seconds


class TimeUpError(Exception):
    """It stayed busy or away for as long as there was time; with what was said last."""


async def again(work: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Do a piece of work until it is done.

    Args:
        work: raises AgainError where it may be tried again.
        seconds: for all tries together.

    Raises:
        TimeUpError: it was not done in time.
    """
    last = "it has not answered"

    def note(state: RetryCallState) -> None:
        nonlocal last
        assert state.outcome is not None
        last = str(state.outcome.exception())

    async def once() -> T:  # tenacity awaits what it sees to be a coroutine function, and nothing else
        return await work()

    retrying = AsyncRetrying(retry=retry_if_exception_type(AgainError), wait=_pause, after=note, sleep=asyncio.sleep)
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await retrying(once)
    except TimeoutError:
        if not timeout.expired():
            raise
        raise TimeUpError(last) from None


async def checked(answer: aiohttp.ClientResponse) -> bytes:
    """The content of an answer.

    Raises:
        AgainError: it is 429 or 503.
    """
    content = await answer.read()
    if answer.status in {429, 503}:
        raise AgainError(f"HTTP {answer.status}: {content.decode(errors='replace')[:300]}", _after(answer.headers.get("Retry-After")))
    return content


def away(error: BaseException) -> AgainError:
    """What a connection that failed is."""
    return AgainError(str(error) or type(error).__name__)


def _pause(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    after = error.after_seconds if isinstance(error, AgainError) else None
    return _WAIT(state) if after is None else after


def _after(text: str | None) -> float | None:
    try:
        return min(max(float(text or ""), 0.0), _RETRY_AFTER_MOST)
    except ValueError:
        return None  # none, or a date: our own pauses do
