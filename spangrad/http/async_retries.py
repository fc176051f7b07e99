"""Repetition of aiohttp requests while a service is busy or away, up to a time limit.

In: a request. Out: its response. Invariant: only what a later try may fix is tried again: `retries.RETRIED_STATUSES`, and connections that
fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from spangrad.http.retries import RETRIED_STATUSES, retry_after

T = TypeVar("T")
_WAIT = wait_random_exponential(multiplier=0.1, max=2.0)


class AgainError(Exception):
    """The service is busy or away, and may be asked again."""

    def __init__(self, message: str, after_seconds: float | None = None) -> None:
        """Keep the service's message.

        Args:
            message: for people.
            after_seconds: pause that the service asks for, in seconds. None: it asks for none.
        """
        super().__init__(message)
        self.after_seconds = after_seconds


class TimeUpError(Exception):
    """The service stayed busy or away until the time limit; the message is that of the last try."""


async def again(work: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Call `work` until it succeeds.

    Args:
        work: raises AgainError where it may be tried again.
        seconds: time limit of all tries together.

    Raises:
        TimeUpError: no try succeeded within the time limit.
    """
    last = "it has not answered"

    def remember(state: RetryCallState) -> None:
        nonlocal last
        assert state.outcome is not None
        last = str(state.outcome.exception())

    async def once() -> T:  # tenacity awaits what it sees to be a coroutine function, and nothing else
        return await work()

    retrying = AsyncRetrying(retry=retry_if_exception_type(AgainError), wait=_pause, after=remember, sleep=asyncio.sleep)
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await retrying(once)
    except TimeoutError:
        if not timeout.expired():
            raise
        raise TimeUpError(last) from None


async def request_once(session: aiohttp.ClientSession, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Send a request once; return status and content of its response.

    Raises:
        AgainError: the connection failed, or the status is one of RETRIED_STATUSES.
    """
    try:
        async with session.request(method, url, data=body) as answer:
            content = await answer.read()
    except (aiohttp.ClientError, OSError) as error:
        raise away(error) from None
    if answer.status in RETRIED_STATUSES:
        raise AgainError(f"HTTP {answer.status}: {content.decode(errors='replace')[:300]}", retry_after(answer.headers.get("Retry-After")))
    return answer.status, content


def away(error: BaseException) -> AgainError:
    """Return the error of a failed connection as one that may be retried."""
    return AgainError(str(error) or type(error).__name__)


def _pause(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    after = error.after_seconds if isinstance(error, AgainError) else None
    return _WAIT(state) if after is None else after
