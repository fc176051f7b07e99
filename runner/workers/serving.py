"""Runs one worker of a queue server, until it is stopped or cannot go on.

Invariant: what the worker holds when it ends has been reported or released, as far as store and queue can be reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

from runner.queue.client import QueueClient
from runner.runner import open_handlers
from runner.workers.agents import AgentsBySource, AgentSpec
from runner.workers.attempts import RunServices, StoppedError, unless_stopped
from runner.workers.lost_attempts import LOST
from runner.workers.worker import Worker
from spangrad.errors import SpangradError
from spangrad.settings import Settings

_logger = logging.getLogger(__name__)

T = TypeVar("T")
_QUEUE_RETRY_SECONDS = 600.0
"""Time for which requests are retried while the queue is away, in seconds: leases expire meanwhile, and late reports are refused."""
_STORE_RETRY_SECONDS = 300.0
_LONG_POLL_SECONDS = 20.0
_RETRY_SECONDS = 2.0
"""Pause before the root spans of lost attempts are tried again, in seconds, when the gateway or the queue was away."""
_REPORT_SECONDS = 30.0
"""Pause between two reports of closed endings, in seconds: a worker that starts goes through those since the last one."""
_PAGE = 1000
_GATHER_SECONDS = 0.2
"""Pause between two looks at rollouts that ended, in seconds: most succeeded, and concern no lost worker."""


async def serve(settings: Settings, agent: AgentSpec | AgentsBySource, ending: asyncio.Event, ready: Callable[[], object]) -> None:
    """Work until `ending` is set, then drain; end at once if that is before `ready`, which is called when the agent is loaded.

    Raises:
        SpangradError: the store, the gateway, the queue or the agent is away for too long; all leases have been released.
    """
    async with AsyncExitStack() as stack:

        async def queue() -> QueueClient:
            client = await stack.enter_async_context(QueueClient.of(settings.queue, retry_seconds=_QUEUE_RETRY_SECONDS))
            await client.run(settings.runner.run_id)
            return client

        stopping = asyncio.create_task(ending.wait())
        stack.callback(stopping.cancel)
        try:
            handlers = await unless_stopped(stopping, open_handlers(settings, agent, stack, queue))
        except StoppedError:
            return
        starting = Worker(settings.runner.run_id, handlers, store_retry_seconds=_STORE_RETRY_SECONDS)
        worker = await stack.enter_async_context(starting)
        closing = asyncio.create_task(LostAttemptCloser(handlers.services, worker, settings.runner.run_id).run())
        ready()
        try:
            await asyncio.wait([stopping, worker.failed], return_when=asyncio.FIRST_COMPLETED)
            error = worker.failed.result() if worker.failed.done() else None
            try:
                await worker.drain(0 if error else settings.runner.drain_seconds)
            except SpangradError:
                if error is None:
                    raise
            if error is not None:
                raise error
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


class LostAttemptCloser:
    """Writes the root spans of rollouts that ended without a living worker, in the order in which they ended.

    Invariant: an ending is reported as closed once the store has acknowledged every root span that this process writes for its attempts;
    a worker that starts goes on from the furthest report, so what one wrote and did not report is written again.
    """

    def __init__(self, services: RunServices, worker: Worker, run_id: str) -> None:
        self._services = services
        self._worker = worker
        self._run_id = run_id
        self._cursor = self._reported = 0
        self._closed: set[str] = set()
        """Rollouts that died or were cancelled, since the last report was begun."""

    async def run(self) -> None:
        """Close lost attempts until cancelled."""
        self._cursor = self._reported = await _until_done(partial(self._services.queue.close_endings, self._run_id))
        reporting = asyncio.create_task(self._report_periodically())
        try:
            while True:
                await _until_done(self._close_next)
                await asyncio.sleep(_GATHER_SECONDS)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)

    async def _close_next(self) -> None:
        page = await self._services.queue.ended(self._run_id, after=self._cursor, limit=_PAGE, wait_seconds=_LONG_POLL_SECONDS)
        for rollout in page.rollouts:
            await self._services.lost.close(rollout)
        self._closed.update(rollout.rollout_id for rollout in page.rollouts if rollout.state in LOST)
        self._cursor = page.cursor

    async def _report_periodically(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            try:
                await self.report()
            except Exception as error:
                reason = "%s Endings whose lost attempts have root spans are reported later."
                _logger.warning(reason, error, exc_info=not isinstance(error, SpangradError))

    async def report(self) -> None:
        """Report the endings that are closed so far, once their root spans are in the store.

        Raises:
            SpangradError: the store or the queue is away, or the worker cannot go on.
        """
        cursor, closed, self._closed = self._cursor, self._closed, set()
        if cursor == self._reported:
            return
        try:
            # Those that this worker holds are its own to write: it has been told to stop them, and has not yet.
            await self._worker.without(closed)
            await self._services.roots.acknowledged(_STORE_RETRY_SECONDS)
            await self._services.queue.close_endings(self._run_id, cursor)
        except BaseException:
            self._closed |= closed
            raise
        self._reported = cursor


async def _until_done(work: Callable[[], Awaitable[T]]) -> T:
    """Retry `work` until it succeeds: each root span is written once, however often it is tried."""
    while True:
        try:
            return await work()
        except Exception as error:  # also for want of threads: without these root spans the builder waits
            reason = "%s Root spans of attempts whose workers are lost wait for it."
            _logger.warning(reason, error, exc_info=not isinstance(error, SpangradError))
            await asyncio.sleep(_RETRY_SECONDS)
