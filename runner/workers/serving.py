"""Works for a queue that is served: one worker, until it is told to end or cannot go on.

In: settings, an agent, an event. Out: attempts made, and those roots that others could not write. Invariant: what the worker holds when it
ends has been told or given back, as far as store and queue can be reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from runner.queue.client import QueueClient
from runner.queue.wire import State
from runner.runner import open_attempts
from runner.workers.agents import AgentSpec
from runner.workers.attempts import Attempts
from runner.workers.worker import Worker
from spangrad.errors import SpangradError
from spangrad.settings import Settings

_logger = logging.getLogger(__name__)

T = TypeVar("T")
_PATIENCE_SECONDS = 600.0
"""That the queue may be away: leases run out meanwhile, and what was told too late is refused."""
_STORE_PATIENCE_SECONDS = 300.0
_NEWS_SECONDS = 20.0
_AGAIN_SECONDS = 2.0
"""Before those who died are looked at again, when the gateway or the queue was away."""
_PAGE = 1000


async def serve(settings: Settings, agent: AgentSpec, ending: asyncio.Event, ready: Callable[[], object]) -> None:
    """Work until `ending` is set, then drain; set before all is there, it ends at once.

    Args:
        settings: where everything is.
        agent: what to run.
        ending: set when it is to end.
        ready: called when the agent is loaded.

    Raises:
        SpangradError: the store, the gateway, the queue or the agent is away for too long; what was held has been given back.
    """

    async def queue() -> QueueClient:
        client = QueueClient.of(settings.runner, patience_seconds=_PATIENCE_SECONDS)
        await client.run(settings.runner.run_id)
        return client

    async with AsyncExitStack() as stack:
        told = asyncio.create_task(ending.wait())
        stack.callback(told.cancel)
        attempts = await _unless(told, open_attempts(settings, agent, stack, queue))
        if attempts is None:
            return
        made = Worker(attempts.queue, settings.runner.run_id, attempts, attempts.entry, store_patience_seconds=_STORE_PATIENCE_SECONDS)
        worker = await stack.enter_async_context(made)
        mourning = asyncio.create_task(_mourn(attempts, settings.runner.run_id))
        ready()
        try:
            await asyncio.wait([told, worker.failed], return_when=asyncio.FIRST_COMPLETED)
            error = worker.failed.result() if worker.failed.done() else None
            try:
                await worker.drain(0 if error else settings.runner.drain_seconds)
            except SpangradError:
                if error is None:
                    raise
            if error is not None:
                raise error
        finally:
            mourning.cancel()
            await asyncio.gather(mourning, return_exceptions=True)


async def _unless(told: asyncio.Task[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """What work gives. None: `told` was done before it, and it is given up."""
    doing = asyncio.create_task(work)
    try:
        await asyncio.wait([told, doing], return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


async def _mourn(attempts: Attempts, run_id: str) -> None:
    """Write the roots of rollouts that ended without a worker of theirs alive: those that are there, then those that come."""
    cursor = await _until_done(partial(_mourn_old, attempts, run_id))
    while True:
        cursor = await _until_done(partial(_mourn_new, attempts, run_id, cursor))


async def _mourn_old(attempts: Attempts, run_id: str) -> int:
    """The place in the order of endings before which all are done."""
    cursor = (await attempts.queue.run(run_id)).cursor
    for state in (State.DEAD, State.CANCELLED):
        after = 0
        while (page := await attempts.queue.rollouts(run_id=run_id, state=state, after=after, limit=_PAGE)).rollouts:
            after = page.cursor
            for one in page.rollouts:
                await attempts.mourn(one)
    return cursor


async def _mourn_new(attempts: Attempts, run_id: str, cursor: int) -> int:
    """The next such place."""
    page = await attempts.queue.ended(run_id, after=cursor, limit=_PAGE, wait_seconds=_NEWS_SECONDS)
    for one in page.rollouts:
        await attempts.mourn(one)
    return page.cursor


async def _until_done(work: Callable[[], Awaitable[T]]) -> T:
    """Do it again until it goes through: each root is written once, however often it is come to."""
    while True:
        try:
            return await work()
        except SpangradError as error:
            _logger.warning("%s Roots of attempts whose workers are gone wait for it.", error)
            await asyncio.sleep(_AGAIN_SECONDS)
