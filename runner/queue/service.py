"""The queue's service: who holds what, and for how long yet.

In: requests (`wire.py`). Out: their answers, after the commit. Invariant: time is counted by this process's monotonic clock alone. At the
start every attempt under way gets the whole time of its lease, since nobody could renew it meanwhile; what it has run goes on being
counted, where the machine was not started again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from runner.ids import ordered_ids
from runner.queue import rows
from runner.queue.endings import Ending, Endings, over
from runner.queue.notifier import News, within
from runner.queue.purge import purge
from runner.queue.rows import Defaults, Moment, Running
from runner.queue.tables import QueueDatabase, ServedElsewhereError
from runner.queue.wire import (
    Ask,
    Beat,
    Cancelled,
    Complete,
    Demand,
    Enqueue,
    Enqueued,
    Extend,
    Fail,
    Lease,
    Leases,
    Purge,
    Purged,
    Release,
    Results,
    Retried,
    Rollout,
    Rollouts,
    Run,
    State,
    Wanted,
    Which,
)
from runner.queue.writer import Writer
from spangrad.errors import QueueError
from spangrad.leases import Watch, is_dead, this_boot
from spangrad.text_sanitizer import storable
from spangrad.types import AttemptFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 0.25
"""Between two looks at what is over."""
_AGAIN_SECONDS = 1.0
"""Before the database is asked again that has failed."""
_SELDOM = 8
"""Looks between two at whether workers of this machine are dead, and whether the database is still ours."""

Key = tuple[str, int]
"""Rollout and attempt."""
Change = tuple[type[Any], Callable[[Any], Coroutine[Any, Any, msgspec.Struct]]]
"""What is asked for, and who answers it."""


class Service:
    """What the server does, without HTTP."""

    def __init__(self, database: QueueDatabase, defaults: Defaults) -> None:
        """Go on where the database is; within a running event loop."""
        self.database = database
        self._defaults = defaults
        self._boot = this_boot()
        self._ids = ordered_ids()
        self._held = Watch[Key]()
        """Leases."""
        self._run = Watch[Key]()
        """How long attempts may run."""
        self._running: dict[Key, Running] = {}
        self._arrivals = News()
        """Something is queued."""
        self._ends = News()
        """Something has ended."""
        self._stopping = False
        self.taken: asyncio.Future[ServedElsewhereError] = asyncio.get_running_loop().create_future()
        """Done when another server serves from the database: this one is to end."""
        self.looks = 0
        """At what is over."""
        with database.reading() as connection:
            self._endings = Endings(connection)
            self._take(rows.running(connection), fresh=False)
        self.writer = Writer(database)
        self.ended: dict[str, int] = {}
        """Attempts by how they ended, since this process began."""

    @property
    def in_flight(self) -> int:
        """How many attempts are under way."""
        return len(self._running)

    @property
    def waiting(self) -> Sequence[str]:
        """Runs of which somebody waits for rollouts."""
        return self._arrivals.awaited

    @property
    def changes(self) -> Mapping[str, Change]:
        """What is asked for by a body alone, by its path."""
        return {
            "/v1/rollouts": (Enqueue, self.enqueue),
            "/v1/leases": (Ask, self.lease),
            "/v1/leases/heartbeat": (Beat, self.beat),
            "/v1/leases/extend": (Extend, self.extend),
            "/v1/leases/complete": (Complete, self.complete),
            "/v1/leases/fail": (Fail, self.fail),
            "/v1/leases/release": (Release, self.release),
            "/v1/cancel": (Which, self.cancel),
            "/v1/retry": (Which, self.retry),
            "/v1/purge": (Purge, self.purge),
        }

    def attempts(self) -> list[Running]:
        """The attempts under way."""
        return list(self._running.values())

    async def close(self) -> None:
        """Answer those who wait, finish what was asked for, close the database."""
        self.stop_waiting()
        await self.writer.close()
        self.database.close()

    def stop_waiting(self) -> None:
        """Let nobody wait any longer for news."""
        self._stopping = True
        self._arrivals.tell()
        self._ends.tell()

    async def enqueue(self, asked: Enqueue) -> Enqueued:
        """Add rollouts."""
        ids = [one.rollout_id or next(self._ids) for one in asked.rollouts]
        work = partial(rows.enqueue, database=self.database, run_id=asked.run_id, rollouts=asked.rollouts, ids=ids, defaults=self._defaults)
        known = await self._write(work)
        self._arrivals.tell(asked.run_id)
        return Enqueued(rollout_ids=ids, known=known)

    async def lease(self, ask: Ask, is_gone: Callable[[], bool] = lambda: False) -> Leases:
        """Hand out what is first; where nothing is, wait for it as long as was asked.

        Args:
            ask: for what.
            is_gone: whether nobody waits for the answer any more.
        """
        seconds = ask.lease_seconds or self._defaults.lease_seconds
        end = time.monotonic() + ask.wait_seconds
        while True:
            news = self._arrivals.of(ask.run_id)
            leases = await self._write(lambda transaction: rows.hand_out(transaction, ask, seconds, self._now()))
            began = self._now().monotonic
            self._take((_running(one, ask.worker, self._boot, began) for one in leases), fresh=True)
            # Whoever left or died as he waited is handed nothing: that would count as an attempt.
            if leases or self._stopping or not await within(news, end) or is_gone() or is_dead(ask.worker):
                return Leases(leases=leases)

    async def beat(self, beat: Beat) -> Results:
        """Renew leases; the answer names those that are over."""
        lost: list[Key] = []
        for one in beat.leases:
            key = (one.rollout_id, one.attempt)
            if running := self._running.get(key):
                self._held.renew(key, running.lease_seconds)
                if one.ran is not None:
                    self._run.renew(key, running.timeout_seconds + running.lease_seconds - one.ran)
            else:
                lost.append(key)
        if not lost:
            return Results(results=[])
        results = await self._read(lambda connection: over(connection, lost))
        if len(results) < len(lost):  # handed out in a transaction that failed as it committed
            await self._rebuild()
        return Results(results=results)

    async def extend(self, asked: Extend) -> Results:
        """Let leases hold for another time than they were handed out for, from now on; the answer names those that are over."""
        keys = [(one.rollout_id, one.attempt) for one in asked.leases]
        held = [key for key in keys if key in self._running]
        await self._write(lambda transaction: rows.extend(transaction, held, asked.seconds))
        for key in held:
            if running := self._running.get(key):
                self._take([replace(running, lease_seconds=asked.seconds)], fresh=True)
        lost = [key for key in keys if key not in self._running]
        return Results(results=await self._read(lambda connection: over(connection, lost)) if lost else [])

    async def complete(self, asked: Complete) -> Results:
        """End attempts that succeeded."""
        return await self._end([Ending.of(one) for one in asked.completions])

    async def fail(self, asked: Fail) -> Results:
        """End attempts that failed."""
        return await self._end([Ending.of(one) for one in asked.failures])

    async def release(self, asked: Release) -> Results:
        """Take leases back."""
        detail = storable(asked.detail)
        return await self._end([Ending(one.rollout_id, one.attempt, AttemptFailure.RELEASED, detail) for one in asked.leases])

    async def cancel(self, which: Which) -> Cancelled:
        """Cancel rollouts, queued or running."""
        cancelled, held = await self._write(lambda transaction: self._endings.cancel(transaction, which, time.time()))
        for key in held:
            self._drop(key)
        self._count(AttemptFailure.CANCELLED, len(held))
        self._ends.tell()
        return cancelled

    async def retry(self, which: Which) -> Retried:
        """Queue dead letters again."""
        queued = await self._write(lambda transaction: self._endings.retry(transaction, which))
        self._arrivals.tell()
        return Retried(queued=queued)

    async def purge(self, asked: Purge) -> Purged:
        """Forget rollouts that ended long ago."""
        return await purge(self._read, self._write, asked)

    async def want(self, run_id: str, wanted: Wanted) -> Demand:
        """Keep what a branch wants of a run."""
        return await self._write(lambda transaction: rows.want(transaction, self.database, run_id, wanted))

    async def demand(self, run_id: str) -> Demand:
        """What is wanted of a run."""
        return await self._read(lambda connection: rows.demand(connection, run_id))

    async def counts(self, run_id: str | None = None) -> list[Run]:
        """How many rollouts stand how."""
        return await self._read(lambda connection: rows.counts(connection, run_id))

    async def run(self, run_id: str) -> Run:
        """How many rollouts of a run stand how; of one that nobody knows, none."""
        found = await self.counts(run_id)
        return found[0] if found else Run(run_id=run_id, states={}, cursor=0)

    async def rollout(self, rollout_id: str) -> Rollout | None:
        """One rollout."""
        return await self._read(lambda connection: rows.rollout(connection, rollout_id))

    async def listed(self, *, run_id: str | None, state: State | None, group_id: str | None, after: int, limit: int) -> Rollouts:
        """Rollouts in order of arrival."""
        ask = partial(rows.listed, run_id=run_id, state=state, group_id=group_id, after=after, limit=limit)
        found, cursor = await self._read(ask)
        return Rollouts(rollouts=found, cursor=cursor)

    async def ends(self, run_id: str, *, after: int, limit: int, wait_seconds: float) -> Rollouts:
        """Rollouts of a run in the order in which they ended; where there is none, wait for it as long as was asked."""
        end = time.monotonic() + wait_seconds
        while True:
            news = self._ends.of(run_id)
            found, cursor = await self._read(lambda connection: rows.ended(connection, run_id, after, limit))
            if found or self._stopping or not await within(news, end):
                return Rollouts(rollouts=found, cursor=cursor)

    async def watch(self) -> None:
        """Keep the database, and end what is over by time, or by its worker's death, until cancelled, or until it is somebody else's."""
        before = time.monotonic()
        while not self.taken.done():
            await asyncio.sleep(LOOK_SECONDS)
            late, before = time.monotonic() - before - LOOK_SECONDS, time.monotonic()
            if late > LOOK_SECONDS:  # this process was stopped, or starved: heartbeats that came meanwhile are still to be read
                self._held.prolong(late)
            try:
                if seldom := self.looks % _SELDOM == 0:
                    await self._keep()
                await self._sweep(with_dead=seldom)
            except QueueError as error:
                logger.warning("%s", error)
                await asyncio.sleep(_AGAIN_SECONDS)
            self.looks += 1

    async def _sweep(self, *, with_dead: bool) -> None:
        endings: dict[Key, Ending] = {}
        for key in self._run.over():
            if running := self._running.get(key):
                detail = f"it ran for more than {running.timeout_seconds:g} s, and its worker did not end it"
                endings[key] = Ending(*key, AttemptFailure.LOST, detail)
        for key in self._held.over():
            if running := self._running.get(key):
                detail = f"nothing was heard of {running.worker} for {running.lease_seconds:g} s"
                endings[key] = Ending(*key, AttemptFailure.LOST, detail)
        if with_dead:
            dead = {worker for worker in {one.worker for one in self._running.values()} if is_dead(worker)}
            for key, running in self._running.items():
                if running.worker in dead:
                    endings[key] = Ending(*key, AttemptFailure.LOST, f"its worker's process has ended: {running.worker}")
        if endings:
            results = (await self._end(list(endings.values()))).results
            logger.info(
                "%d attempts are over by time: %s", len(results), ", ".join(f"{one.rollout_id}/{one.attempt}" for one in results[:8])
            )

    async def _end(self, endings: Sequence[Ending]) -> Results:
        results = await self._write(lambda transaction: self._endings.end(transaction, endings, time.time()))
        for one, result in zip(endings, results, strict=True):
            if self._drop((one.rollout_id, one.attempt)) and result.refused is None:
                self._count(one.reason)
        self._ends.tell()
        if any(result.state is State.QUEUED for result in results):
            self._arrivals.tell()
        return Results(results=results)

    async def _write(self, work: Callable[[sa.Connection], T]) -> T:
        try:
            return await self.writer.do(work)
        except QueueError:
            # What was handed out or ended in that transaction may hold: look, as soon as that is possible.
            self._rebuilding = asyncio.create_task(self._rebuild_when_possible())
            raise

    async def _read(self, work: Callable[[sa.Connection], T]) -> T:
        def read() -> T:
            with self.database.reading() as connection:
                return work(connection)

        return await asyncio.to_thread(read)

    async def _keep(self) -> None:
        """Be the database's one server, also when PostgreSQL has ended the session that held its lock.

        Raises:
            QueueError: it is away, or has another server.
        """
        try:
            await asyncio.to_thread(self.database.keep)
        except ServedElsewhereError as error:
            if not self.taken.done():
                self.taken.set_result(error)
            raise

    async def _rebuild_when_possible(self) -> None:
        while not self._stopping:
            await asyncio.sleep(_AGAIN_SECONDS)
            try:
                await self._rebuild()
                return
            except QueueError:
                continue

    async def _rebuild(self) -> None:
        """Make what we believe to be under way what is under way."""
        await self._keep()
        # Through the writer: nothing is handed out or ended between the look and what follows from it.
        found = {(one.rollout_id, one.attempt): one for one in await self.writer.do(rows.running)}
        for key in [key for key in self._running if key not in found]:
            self._drop(key)
        self._take((one for key, one in found.items() if key not in self._running), fresh=False)

    def _take(self, attempts: Iterable[Running], *, fresh: bool) -> None:
        """Count the time of attempts from now on; of those that are not fresh, what they have run already as well."""
        now = self._now()
        for one in attempts:
            key = (one.rollout_id, one.attempt)
            if key in self._running:
                self._held.renew(key, one.lease_seconds)
                self._running[key] = one
                continue
            ran = now.monotonic - one.began if not fresh and one.boot == self._boot else 0.0
            self._running[key] = one
            self._held.renew(key, one.lease_seconds)
            # A worker has a lease's time to end an attempt by itself: it knows better how, and how much of the time was the agent's.
            self._run.renew(key, one.lease_seconds + max(one.timeout_seconds - ran, 0.0))

    def _drop(self, key: Key) -> bool:
        self._held.forget(key)
        self._run.forget(key)
        return self._running.pop(key, None) is not None

    def _count(self, reason: AttemptFailure | None, count: int = 1) -> None:
        name = reason.value if reason else State.SUCCEEDED.value
        self.ended[name] = self.ended.get(name, 0) + count

    def _now(self) -> Moment:
        return Moment(self._boot, time.monotonic(), time.time())


def _running(lease: Lease, worker: str, boot: str, began: float) -> Running:
    return Running(lease.rollout_id, lease.attempt, lease.lease_seconds, lease.timeout_seconds, worker, boot, began)
