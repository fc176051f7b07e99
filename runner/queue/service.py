"""Service of the queue: executes requests, ends attempts that expire, and tells workers and gateway of those that it ended.

Invariant: what is answered is committed; an attempt is tracked from the commit that hands it out to the one that ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from runner.ids import ordered_ids
from runner.queue import rows
from runner.queue.endings import Endings, close_endings, not_running
from runner.queue.notifier import Notifier, wait_for_event
from runner.queue.purge import purge
from runner.queue.rows import Defaults
from runner.queue.running_attempts import RunningAttempts
from runner.queue.stopped_attempts import GatewayOrders, StoppedAttempts
from runner.queue.tables import QueueDatabase, ServedElsewhereError
from runner.queue.wire import (
    AttemptReceipts,
    Cancelled,
    ClosedEndings,
    Complete,
    Ending,
    Enqueue,
    Enqueued,
    Extend,
    Fail,
    Failure,
    Heartbeat,
    Held,
    LeaseKey,
    LeaseRelease,
    LeaseRequest,
    Leases,
    Purge,
    Purged,
    Retried,
    Rollouts,
    RolloutSelector,
    RolloutState,
    RunCounts,
    Stops,
    StopsRequest,
)
from runner.queue.writer import Writer
from spangrad.errors import QueueError
from spangrad.http.queue_messages import DemandRequest, DemandState
from spangrad.leases import is_dead
from spangrad.text_sanitizer import storable
from spangrad.types import AttemptFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RETRY_SECONDS = 1.0
"""Pause after a failure of the database, in seconds."""
_SWEEPS_PER_RENEWAL = 8
"""Number of sweeps between two checks for dead workers of this machine, with a renewal of the database's lock."""

Change = tuple[type[Any], Callable[[Any], Coroutine[Any, Any, msgspec.Struct]]]
"""Type of a request body, and its handler."""


class Service:
    """Operations of the queue, without HTTP."""

    def __init__(self, database: QueueDatabase, defaults: Defaults, gateway: GatewayOrders | None = None) -> None:
        """Restore the running attempts from the database, in a running event loop; without a gateway, calls of failed attempts go on."""
        self._gateway = gateway
        self.database = database
        self._defaults = defaults
        self._ids = ordered_ids()
        self._running = RunningAttempts()
        self._arrivals = Notifier()
        """Notified when a rollout is queued."""
        self._ends = Notifier()
        """Notified when a rollout ends."""
        self._demands = Notifier()
        """Notified when a demand is set."""
        self._stops = StoppedAttempts()
        self.stopping = False
        """True once no request is to wait any more."""
        self._rebuild_due = False
        """True after a write that failed, until the running attempts are read again."""
        self._rebuilding: asyncio.Task[None] | None = None
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when another server serves from the database: this one must end."""
        self.sweeps = 0
        """Number of checks so far."""
        with database.reading() as connection:
            self._endings = Endings(connection)
            self._running.add(rows.running(connection))
        self.writer = Writer(database)
        self.ended = Counter[str]()
        """Attempts by how they ended, since this process started."""

    @property
    def in_flight(self) -> int:
        """Number of running attempts."""
        return len(self._running)

    @property
    def changes(self) -> Mapping[str, Change]:
        """Request types and handlers of the POST paths."""
        return {
            "/v1/rollouts": (Enqueue, self.enqueue),
            "/v1/leases": (LeaseRequest, self.lease),
            "/v1/leases/heartbeat": (Heartbeat, self.beat),
            "/v1/leases/stopped": (StopsRequest, self.stopped),
            "/v1/leases/extend": (Extend, self.extend),
            "/v1/leases/complete": (Complete, self.complete),
            "/v1/leases/fail": (Fail, self.fail),
            "/v1/leases/release": (LeaseRelease, self.release),
            "/v1/endings/closed": (ClosedEndings, self.close_endings),
            "/v1/cancel": (RolloutSelector, self.cancel),
            "/v1/retry": (RolloutSelector, self.retry),
            "/v1/purge": (Purge, self.purge),
        }

    async def close(self) -> None:
        """Answer waiting requests, finish writes, and close the database."""
        self.stop_waiting()
        await self.writer.close()
        self.database.close()

    def next_end(self, run_id: str) -> asyncio.Event:
        """Return what is set when a rollout of a run ends from now on."""
        return self._ends.of(run_id)

    def stop_waiting(self) -> None:
        """End all waits for events."""
        self.stopping = True
        for notifier in (self._arrivals, self._ends, self._demands):
            notifier.close()
        self._stops.stop_waiting()

    async def enqueue(self, request: Enqueue) -> Enqueued:
        """Add rollouts."""
        ids = [rollout.rollout_id or next(self._ids) for rollout in request.rollouts]

        def add(transaction: sa.Connection) -> int | None:
            if request.after_groups is not None and ids and rows.rollout(transaction, ids[0]) is None:  # else the request is sent again
                demand = rows.demand(transaction, request.run_id)
                if request.after_groups != demand.enqueued + demand.cancelled:
                    return None
            return rows.enqueue(transaction, request.run_id, request.rollouts, ids, self._defaults)

        known = await self._write(add)
        if known is None:
            return Enqueued(rollout_ids=[], known=0)
        self._arrivals.notify(request.run_id)
        return Enqueued(rollout_ids=ids, known=known)

    async def lease(self, request: LeaseRequest, is_gone: Callable[[], bool] = lambda: False) -> Leases:
        """Hand out the first rollouts; if none is queued, wait for one as long as requested.

        Args:
            request: the worker's request.
            is_gone: returns True if the client has disconnected; called in any thread.
        """
        seconds = request.lease_seconds or self._defaults.lease_seconds
        end = time.monotonic() + request.wait_seconds
        while True:
            event = self._arrivals.of(request.run_id)
            leases = await self._write(lambda tx: [] if is_gone() else rows.hand_out(tx, request, seconds))
            self._running.lease(leases, request.worker)
            if leases and is_gone():
                held = [Held(rollout_id=lease.rollout_id, attempt=lease.attempt) for lease in leases]
                await self.release(LeaseRelease(leases=held, detail="its worker had left before the hand-out was committed"))
            # A worker that left or died while it waited gets no lease: that would count as an attempt.
            if leases or self.stopping or not await wait_for_event(event, end) or is_gone() or is_dead(request.worker):
                return Leases(leases=leases)

    async def beat(self, beat: Heartbeat) -> AttemptReceipts:
        """Renew leases; return results for those that have ended."""
        lost = [held.key for held in beat.leases if not self._running.beat(held)]
        if not lost:
            return AttemptReceipts(results=[])
        results = await self.read(lambda connection: not_running(connection, lost))
        if len(results) < len(lost):  # handed out in a transaction whose commit failed
            await self._rebuild()
        return AttemptReceipts(results=results)

    async def stopped(self, request: StopsRequest) -> Stops:
        """Return a worker's attempts that the queue has ended; if there is none, wait for one as long as requested."""
        keys, cursor = await self._stops.after(request.worker, request.after, request.wait_seconds)
        results = await self.read(lambda connection: not_running(connection, keys)) if keys else []
        return Stops(results=results, cursor=cursor)

    async def extend(self, request: Extend) -> AttemptReceipts:
        """Set the time for which leases hold from now on; return results for those that have ended."""
        keys = [lease.key for lease in request.leases]
        held = [key for key in keys if key in self._running]
        await self._write(lambda transaction: rows.extend(transaction, held, request.seconds))
        for key in held:
            self._running.extend(key, request.seconds)
        lost = [key for key in keys if key not in self._running]
        return AttemptReceipts(results=await self.read(lambda connection: not_running(connection, lost)) if lost else [])

    async def complete(self, request: Complete) -> AttemptReceipts:
        """End attempts that succeeded."""
        return await self._end(request.completions)

    async def fail(self, request: Fail) -> AttemptReceipts:
        """End attempts that failed."""
        return await self._end([replace(failure, detail=storable(failure.detail)) for failure in request.failures])

    async def release(self, request: LeaseRelease) -> AttemptReceipts:
        """Take leases back; their attempts do not count."""
        reason, detail = AttemptFailure.RELEASED, storable(request.detail)
        return await self._end(
            [Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=reason, detail=detail) for lease in request.leases]
        )

    async def close_endings(self, closed: ClosedEndings) -> ClosedEndings:
        """Record up to which ending lost attempts of a run have root spans; return the furthest that was recorded."""
        return await self._write(lambda transaction: close_endings(transaction, closed))

    async def cancel(self, which: RolloutSelector) -> Cancelled:
        """Cancel rollouts, queued or running."""
        cancelled, held = await self._write(lambda transaction: self._endings.cancel(transaction, which))
        self._stops.add((running.worker, key) for key in held if (running := self._running.remove(key)))
        self._note_ends([(key, AttemptFailure.CANCELLED) for key in held])
        return cancelled

    async def retry(self, which: RolloutSelector) -> Retried:
        """Queue dead letters again."""
        queued = await self._write(lambda transaction: self._endings.retry(transaction, which))
        self._arrivals.notify()
        return Retried(queued=queued)

    async def purge(self, request: Purge) -> Purged:
        """Delete rollouts that ended long ago."""
        return await purge(self.read, self._write, request)

    async def want(self, run_id: str, branch_demand: DemandRequest) -> DemandState:
        """Set the demand of a branch; return the demand for the run."""
        demand = await self._write(lambda transaction: rows.want(transaction, run_id, branch_demand))
        self._demands.notify(run_id)
        return demand

    async def demand(self, run_id: str, *, above: int = 0, wait_seconds: float = 0) -> DemandState:
        """Return the demand for a run; if it is for no more than `above` groups, wait for more as long as requested."""
        read = partial(self.read, partial(rows.demand, run_id=run_id))
        return await self._demands.read_until(run_id, read, lambda state: state.groups > above, wait_seconds)

    async def counts(self, run_id: str | None = None) -> list[RunCounts]:
        """Count the rollouts of each run, or of one run, by state."""
        return await self.read(lambda connection: rows.counts(connection, run_id))

    async def run(self, run_id: str) -> RunCounts:
        """Count the rollouts of one run, by state; an unknown run has none."""
        runs = await self.counts(run_id)
        return runs[0] if runs else RunCounts(run_id=run_id, states={}, cursor=0)

    async def ends(self, run_id: str, *, after: int, limit: int, wait_seconds: float) -> Rollouts:
        """Return a run's rollouts in the order in which they ended; if there is none, wait for one as long as requested."""
        read = partial(self.read, partial(rows.ended, run_id=run_id, after=after, limit=limit))
        return await self._ends.read_until(run_id, read, lambda page: bool(page.rollouts), wait_seconds)

    async def watch(self) -> None:
        """Renew the database's lock, and end attempts that have expired, until cancelled or replaced by another server.

        An attempt expires with its lease, at its time limit, or with its worker's process.
        """
        async for _ in self._running.sweeps():
            try:
                if renewal_due := self.sweeps % _SWEEPS_PER_RENEWAL == 0:
                    await self._renew_lock()
                if endings := self._running.expired(check_workers=renewal_due):
                    await self._end(endings, by_queue=True)
                    first = ", ".join(f"{ending.rollout_id}/{ending.attempt}" for ending in endings[:8])
                    logger.info("%d attempts have expired: %s", len(endings), first)
            except Exception as error:  # also for want of descriptors or threads: without sweeps no lease would expire any more
                logger.warning("%s", error, exc_info=not isinstance(error, QueueError))
                await asyncio.sleep(_RETRY_SECONDS)
            self.sweeps += 1
            if self.taken.done():
                return

    async def _end(self, endings: Sequence[Ending], *, by_queue: bool = False) -> AttemptReceipts:
        results = await self._write(lambda transaction: self._endings.end(transaction, endings))
        ended: list[tuple[LeaseKey, AttemptFailure | None]] = []
        for ending, result in zip(endings, results, strict=True):
            running = self._running.remove(ending.key)
            if running is None or result.refused is not None:
                continue
            ended.append((ending.key, ending.reason))
            if by_queue:
                self._stops.add([(running.worker, ending.key)])
        self._note_ends(ended)
        if any(result.state is RolloutState.QUEUED for result in results):
            self._arrivals.notify()
        return AttemptReceipts(results=results)

    def _note_ends(self, ended: Sequence[tuple[LeaseKey, AttemptFailure | None]]) -> None:
        """Count attempts that have ended, have the gateway end the calls of those that failed, and wake those who wait for an end."""
        self.ended.update(reason.value if reason else RolloutState.SUCCEEDED.value for _, reason in ended)
        if self._gateway is not None:
            self._gateway.close_attempts((key, reason) for key, reason in ended if reason is not None)
        self._ends.notify()

    async def _write(self, work: Callable[[sa.Connection], T]) -> T:
        try:
            return await self.writer.do(work)
        except QueueError:
            # The transaction may have been committed: read the running attempts again, as soon as that is possible.
            self._rebuild_due = True
            if self._rebuilding is None or self._rebuilding.done():
                self._rebuilding = asyncio.create_task(self._rebuild_when_possible())
            raise

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Return what a function reads from the database, beside the writes."""

        def read() -> T:
            with self.database.reading() as connection:
                return work(connection)

        return await asyncio.to_thread(read)

    async def _renew_lock(self) -> None:
        """Renew the database's lock, also when PostgreSQL has ended the session that held it.

        Raises:
            QueueError: the database is away, or has another server.
        """
        try:
            await asyncio.to_thread(self.database.keep)
        except ServedElsewhereError as error:
            if not self.taken.done():
                self.taken.set_exception(error)
            raise

    async def _rebuild_when_possible(self) -> None:
        while self._rebuild_due and not self.stopping:
            await asyncio.sleep(_RETRY_SECONDS)
            self._rebuild_due = False  # before the read: it may miss a write that fails meanwhile
            try:
                await self._rebuild()
            except Exception as error:
                logger.debug("%s", error, exc_info=not isinstance(error, QueueError))
                self._rebuild_due = True

    async def _rebuild(self) -> None:
        """Replace the tracked attempts by those that the database says are running."""
        await self._renew_lock()
        # Through the writer: nothing is handed out or ended between the read and the update of the tracked attempts.
        self._running.replace(await self.writer.do(rows.running))
