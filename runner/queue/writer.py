"""Batches concurrent writes into one transaction.

Invariant: no request is answered before it is committed; the functions run one after the other, in the order in which they arrived.

A commit waits for the disk, so it is shared: all functions that arrive during a transaction form the next one. If one of several functions
raises, the transaction is rolled back, and each of them is run again in a transaction of its own. Where the database went away, or the
commit fails, all of them fail.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from spangrad.database import Database

T = TypeVar("T")
MOST = 256
"""Largest number of functions in one transaction."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[sa.Connection], Any]
    future: asyncio.Future[Any]


class Writer:
    """Thread that executes all writes."""

    def __init__(self, database: Database) -> None:
        """Start the thread; within a running event loop."""
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.transactions = self.requests = 0
        """Transactions since the start, and functions that they ran."""
        self.seconds = 0.0
        """Time in transactions, in seconds."""
        self._thread = threading.Thread(target=self._run, name="queue writer", daemon=True)
        self._thread.start()

    async def do(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a function in a transaction, and return its value after the commit.

        Raises:
            QueueError: the database failed; the write may have been done.
        """
        future = self._loop.create_future()
        self._jobs.put(_Job(work, future))
        # The caller may be cancelled; the write is done all the same.
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Finish all writes, then end the thread."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            jobs, last = self._next()
            if jobs:
                self._answer(self._together(jobs))
            if last:
                return

    def _next(self) -> tuple[list[_Job], bool]:
        """Return the waiting functions, and whether the writer closes after them."""
        jobs: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) == MOST:
                return jobs, False
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return jobs, False
        return jobs, True

    def _together(self, jobs: Sequence[_Job]) -> list[tuple[_Job, Any]]:
        began = self._loop.time()
        is_at_work = False
        try:
            with self._database.transaction() as transaction:
                is_at_work = True
                values = [job.work(transaction) for job in jobs]
                is_at_work = False
        except Exception as error:
            if is_at_work and len(jobs) > 1 and not _is_of_lost_connection(error):
                return [pair for job in jobs for pair in self._together([job])]
            return [(job, error) for job in jobs]
        self.transactions += 1
        self.requests += len(jobs)
        self.seconds += self._loop.time() - began
        return list(zip(jobs, values, strict=True))

    def _answer(self, done: Sequence[tuple[_Job, Any]]) -> None:
        def answer() -> None:
            for job, value in done:
                if job.future.done():
                    continue
                if isinstance(value, Exception):
                    job.future.set_exception(value)
                else:
                    job.future.set_result(value)

        self._loop.call_soon_threadsafe(answer)


def _is_of_lost_connection(error: Exception) -> bool:
    """Return whether the database went away: it would fail each of the functions."""
    return isinstance(error.__cause__, DBAPIError) and error.__cause__.connection_invalidated
