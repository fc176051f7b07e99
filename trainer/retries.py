"""Outages of services: requests are retried with back-off until the service answers.

In: a request to a service, and a predicate of its transient errors. Out: the answer, later. Invariant: an outage costs time and never a
result; it is logged once when it begins and once when it ends; no retry waits once the process is asked to stop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import tenacity

from trainer.shutdown import Shutdown

logger = logging.getLogger(__name__)

T = TypeVar("T")
_at_once: ContextVar[bool] = ContextVar("at_once", default=False)
"""True: requests of this thread, and of work that copies its context, are made once."""
_BACK_OFF = tenacity.wait_exponential_jitter(multiplier=0.2, max=10.0, jitter=0.2)
"""Wait between a failed attempt and the next, in seconds."""


class Outage:
    """Outage of one service, as seen by one of its clients."""

    def __init__(self, service: str) -> None:
        """Begin with a service that answers, named as at the beginning of a sentence, such as `the gateway`."""
        self._service = service
        self._lock = threading.Lock()
        self._began: float | None = None
        self._retries = 0
        self._failures = 0

    @property
    def is_under_way(self) -> bool:
        """Return whether the last attempt failed."""
        return self._began is not None

    def note(self, state: tenacity.RetryCallState) -> None:
        """Count a failed attempt that tenacity is about to repeat."""
        error = state.outcome.exception() if state.outcome else None
        if error is not None:
            self.failed(error)

    def failed(self, error: BaseException, *, is_retry: bool = True) -> None:
        """Count a failed attempt, as a retry if it is repeated, and log the error of the first as a warning."""
        with self._lock:
            self._retries += is_retry
            self._failures += 1
            if self._began is not None:
                return
            self._began = time.monotonic()
        logger.warning("%s Trying again until %s answers; nothing is lost meanwhile.", error, self._service)

    def over(self) -> None:
        """Log the end of an outage, if one was under way."""
        with self._lock:
            began, failures, self._began, self._failures = self._began, self._failures, None, 0
        if began is not None:
            logger.info("%s answers again after %.1f s (%d failed attempts)", self._service, time.monotonic() - began, failures)

    def take_retries(self) -> int:
        """Return the number of retries since the last call."""
        with self._lock:
            retries, self._retries = self._retries, 0
        return retries


@contextmanager
def without_retries() -> Generator[None]:
    """Let the first error of each request in this context be raised, until the block ends: its caller tries again by itself."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def call_with_retries(work: Callable[[], T], is_transient: Callable[[BaseException], bool], outage: Outage, shutdown: Shutdown) -> T:
    """Repeat a request until it succeeds or its error is not transient, with back-off; once only inside `without_retries`.

    A shutdown ends the wait: then the last error is raised, or `Stopped` where no shield holds it back.
    """
    if _at_once.get():
        return work()
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=_BACK_OFF,
        stop=lambda _: shutdown.is_ending,
        sleep=shutdown.sleep,
        before_sleep=outage.note,
        reraise=True,
    )
    result = attempts(work)
    outage.over()
    return result
