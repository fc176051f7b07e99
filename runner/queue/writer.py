"""Puts what many ask for at the same time into one transaction.

In: functions of a connection, from an event loop. Out: their values, after the commit. Invariant: nobody is answered before what he asked
for is committed; the functions run one after the other, in the order in which they came.

A commit waits for the disk, so it is shared: whatever has come while the last transaction ran makes the next one. Where one function
of several raises, nothing of the transaction holds, and each of them is run again in a transaction of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from spangrad.database import Database
from spangrad.errors import QueueError

T = TypeVar("T")
MOST = 256
"""Functions in one transaction."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[sa.Connection], Any]
    future: asyncio.Future[Any]


@dataclass(slots=True)
class Tally:
    """What the writer has done."""

    transactions: int = 0
    requests: int = 0
    seconds: float = 0.0
    """In transactions."""


class Writer:
    """A thread that owns the right to write."""

    def __init__(self, database: Database) -> None:
        """Begin; within a running event loop."""
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.tally = Tally()
        self._thread = threading.Thread(target=self._run, name="queue writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Functions that no transaction has taken yet."""
        return self._jobs.qsize()

    async def do(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a function in a transaction, and return its value once that is committed.

        Raises:
            QueueError: the database failed; what was asked may have been done.
        """
        future = self._loop.create_future()
        self._jobs.put(_Job(work, future))
        # Whoever asked may go away; what he asked for is done all the same.
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Do what was asked for, then end."""
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
        """What waits, and whether nothing will come after it."""
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
        try:
            with self._database.transaction() as transaction:
                values = [job.work(transaction) for job in jobs]
        except QueueError as error:
            return [(job, error) for job in jobs]
        except Exception as error:
            if len(jobs) == 1:
                return [(jobs[0], error)]
            return [pair for job in jobs for pair in self._together([job])]
        self.tally.transactions += 1
        self.tally.requests += len(jobs)
        self.tally.seconds += self._loop.time() - began
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
