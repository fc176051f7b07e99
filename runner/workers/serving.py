"""Runs one worker of a queue server, until it is stopped or cannot go on.

Invariant: what the worker holds when it ends has been reported or released, as far as store and queue can be reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from runner.queue.client import QueueClient
from runner.queue.wire import RolloutState
from runner.runner import open_handlers
from runner.workers.agents import AgentsBySource, AgentSpec
from runner.workers.attempts import RunServices
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
_PAGE = 1000
_GATHER_SECONDS = 0.2
"""Pause between two looks at rollouts that ended, in seconds: most succeeded, and concern no lost worker."""


async def serve(settings: Settings, agent: AgentSpec | AgentsBySource, ending: asyncio.Event, ready: Callable[[], object]) -> None:
    """Work until `ending` is set, then drain; if it is set before the worker is ready, end at once.

    Args:
        settings: addresses of store, gateway and queue, and the run.
        agent: the agent to run, or agents by data source.
        ending: event that ends the work.
        ready: called when the agent is loaded.

    Raises:
        SpangradError: the store, the gateway, the queue or the agent is away for too long; all leases have been released.
    """

    async def queue() -> QueueClient:
        client = QueueClient.of(settings.queue, retry_seconds=_QUEUE_RETRY_SECONDS)
        await client.run(settings.runner.run_id)
        return client

    async with AsyncExitStack() as stack:
        stopping = asyncio.create_task(ending.wait())
        stack.callback(stopping.cancel)
        handlers = await _run_unless_stopped(stopping, open_handlers(settings, agent, stack, queue))
        if handlers is None:
            return
        starting = Worker(settings.runner.run_id, handlers, store_retry_seconds=_STORE_RETRY_SECONDS)
        worker = await stack.enter_async_context(starting)
        closing = asyncio.create_task(_close_lost_attempts(handlers.services, settings.runner.run_id))
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


async def _run_unless_stopped(stopping: asyncio.Task[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the value of `work`, or None: `stopping` was done first, and `work` is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([stopping, task], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _close_lost_attempts(services: RunServices, run_id: str) -> None:
    """Write the root spans of rollouts that ended without a living worker: first of those in the queue, then of each new one."""
    cursor = await _until_done(partial(_close_earlier_lost, services, run_id))
    while True:
        cursor = await _until_done(partial(_close_next_lost, services, run_id, cursor))
        await asyncio.sleep(_GATHER_SECONDS)


async def _close_earlier_lost(services: RunServices, run_id: str) -> int:
    """Write those of rollouts that have ended; return the number of the ending up to which all are done."""
    cursor = (await services.queue.run(run_id)).cursor
    for state in (RolloutState.DEAD, RolloutState.CANCELLED):
        after = 0
        while (page := await services.queue.rollouts(run_id=run_id, state=state, after=after, limit=_PAGE)).rollouts:
            after = page.cursor
            for rollout in page.rollouts:
                await services.lost.close(rollout)
    return cursor


async def _close_next_lost(services: RunServices, run_id: str, cursor: int) -> int:
    """Write those of rollouts that end from now on; return the next such number."""
    page = await services.queue.ended(run_id, after=cursor, limit=_PAGE, wait_seconds=_LONG_POLL_SECONDS)
    for rollout in page.rollouts:
        await services.lost.close(rollout)
    return page.cursor


async def _until_done(work: Callable[[], Awaitable[T]]) -> T:
    """Retry `work` until it succeeds: each root span is written once, however often it is tried."""
    while True:
        try:
            return await work()
        except SpangradError as error:
            _logger.warning("%s Root spans of attempts whose workers are lost wait for it.", error)
            await asyncio.sleep(_RETRY_SECONDS)
