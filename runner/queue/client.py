"""Client of the queue, for code with an event loop; `spangrad.client.queue_http` is the one for code without.

In: the queue's address, and requests. Out: its responses (`wire.py`). Invariant: a request without a response is sent again until the
client's time limit; each request may be sent twice without harm, since rollouts get their ids here, and endings name their attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import msgspec
from pydantic import SecretStr

from runner.ids import ordered_ids
from runner.queue.wire import (
    AttemptReceipt,
    AttemptReceipts,
    Cancelled,
    ClosedEndings,
    Complete,
    Completion,
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
    QueuedRollout,
    Retried,
    RolloutLease,
    Rollouts,
    RolloutSelector,
    RolloutState,
    RunCounts,
    Runs,
    Stops,
    StopsRequest,
)
from spangrad.errors import QueueError
from spangrad.http.async_http import AsyncClient
from spangrad.http.queue_messages import DemandRequest, DemandState, NewRollout
from spangrad.http.service import in_url, queue_service, without_userinfo
from spangrad.leases import BEATS, beat
from spangrad.settings import QueueSettings
from spangrad.text_sanitizer import storable

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 60.0
"""Time for which requests are retried while the queue is away, in seconds: enough to restart it."""
_ANSWER_SECONDS = 120.0
_STOPS_WAIT_SECONDS = 30.0
"""Longest wait of a request for ended attempts, in seconds."""
_STOPPED_EARLY_KEPT = 1000
ENQUEUE_MOST = 5000
"""Largest number of rollouts in one request."""


class QueueClient(AsyncClient):
    """Connection to the queue; an async context manager."""

    def __init__(self, url: str, token: SecretStr | str | None = None, *, retry_seconds: float = RETRY_SECONDS) -> None:
        """Store the arguments; the first request connects.

        Args:
            url: address of the queue; queue.url. The attribute is without user and password, for texts.
            token: bearer token; queue.token. None: the queue asks for none.
            retry_seconds: time for which requests are retried while the queue does not answer.
        """
        self.url = without_userinfo(url.rstrip("/"))
        super().__init__(queue_service(url, token, retry_seconds), seconds=_ANSWER_SECONDS)
        self._ids = ordered_ids()

    @classmethod
    def of(cls, settings: QueueSettings, *, retry_seconds: float = RETRY_SECONDS) -> Self:
        """Create a client of the queue that the settings name, by queue.url or else by host and port of the server."""
        return cls(settings.url or default_url(settings), settings.token, retry_seconds=retry_seconds)

    async def enqueue(self, run_id: str, rollouts: Iterable[NewRollout], *, after_groups: int | None = None) -> list[str]:
        """Add rollouts; those without an id get one.

        Args:
            run_id: their run.
            rollouts: at most ENQUEUE_MOST if `after_groups` is given.
            after_groups: number of groups of mode train, cancelled ones included, that the run must have. None: any.

        Returns:
            Their ids, in order, once all are durable; none if the run has another number of groups.

        Raises:
            QueueError: the queue refuses, or does not answer; some rollouts of a long list may have been added by then.
        """
        named = [rollout if rollout.rollout_id else msgspec.structs.replace(rollout, rollout_id=next(self._ids)) for rollout in rollouts]
        ids: list[str] = []
        for start in range(0, len(named), ENQUEUE_MOST):
            part = Enqueue(run_id=run_id, rollouts=named[start : start + ENQUEUE_MOST], after_groups=after_groups)
            ids += (await self._change("/v1/rollouts", Enqueued, part)).rollout_ids
        return ids

    async def lease(
        self, run_id: str, worker: str, count: int = 1, *, wait_seconds: float = 0, lease_seconds: float | None = None
    ) -> list[RolloutLease]:
        """Lease at most `count` rollouts of a run, fewer if fewer are queued. `LeaseHeartbeats` renews the leases."""
        request = LeaseRequest(run_id=run_id, worker=worker, count=count, wait_seconds=wait_seconds, lease_seconds=lease_seconds)
        return (await self._change("/v1/leases", Leases, request)).leases

    async def beat(self, leases: Sequence[RolloutLease | Held]) -> list[AttemptReceipt]:
        """Send a heartbeat for these leases; return a result for each one that is not held any more."""
        return (await self._change("/v1/leases/heartbeat", AttemptReceipts, Heartbeat(leases=_held(leases)))).results

    async def stopped(self, worker: str, *, after: int = 0, wait_seconds: float = 0) -> Stops:
        """Return a worker's attempts that the queue has ended since; if there is none, wait for one as long as requested."""
        request = StopsRequest(worker=worker, after=after, wait_seconds=wait_seconds)
        return await self._change("/v1/leases/stopped", Stops, request)

    async def extend(self, leases: Sequence[RolloutLease | Held], seconds: float) -> list[AttemptReceipt]:
        """Extend the time for which these leases hold without a heartbeat; return a result for each one that is not held any more."""
        return (await self._change("/v1/leases/extend", AttemptReceipts, Extend(leases=_held(leases), seconds=seconds))).results

    async def complete(self, completions: Sequence[Completion]) -> list[AttemptReceipt]:
        """Report that attempts succeeded; see `refused` of each result."""
        return (await self._change("/v1/leases/complete", AttemptReceipts, Complete(completions=list(completions)))).results

    async def fail(self, failures: Sequence[Failure]) -> list[AttemptReceipt]:
        """Report that attempts failed; see `refused` of each result. A detail may hold any text of the agent."""
        cleaned = [msgspec.structs.replace(failure, detail=storable(failure.detail)) for failure in failures]
        return (await self._change("/v1/leases/fail", AttemptReceipts, Fail(failures=cleaned))).results

    async def release(self, leases: Sequence[RolloutLease | Held], detail: str = "") -> list[AttemptReceipt]:
        """Return leases to the queue; the attempts do not count."""
        return (await self._change("/v1/leases/release", AttemptReceipts, LeaseRelease(leases=_held(leases), detail=detail))).results

    async def close_endings(self, run_id: str, cursor: int = 0) -> int:
        """Report that root spans of lost attempts are in the store up to an ending; return the furthest that was reported so far."""
        return (await self._change("/v1/endings/closed", ClosedEndings, ClosedEndings(run_id=run_id, cursor=cursor))).cursor

    async def cancel(self, which: RolloutSelector) -> Cancelled:
        """Cancel the rollouts of a selection: by id, by group, or by run."""
        return await self._change("/v1/cancel", Cancelled, which)

    async def retry(self, which: RolloutSelector) -> int:
        """Queue dead letters again; return how many."""
        return (await self._change("/v1/retry", Retried, which)).queued

    async def purge(self, older_than_seconds: float, run_id: str | None = None) -> int:
        """Delete rollouts that ended more than so many seconds ago; return how many."""
        deleted, more = 0, True
        while more:
            done = await self._change("/v1/purge", Purged, Purge(older_than_seconds=older_than_seconds, run_id=run_id))
            deleted, more = deleted + done.rollouts, done.more
        return deleted

    async def rollout(self, rollout_id: str) -> QueuedRollout:
        """Return one rollout, with its attempts."""
        return await self.ask("GET", f"/v1/rollouts/{quote(rollout_id, safe='')}", QueuedRollout)

    async def rollouts(
        self, *, run_id: str | None = None, state: RolloutState | None = None, group_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Rollouts:
        """Return rollouts in order of arrival."""
        filters = {"run": run_id, "state": state, "group": group_id}
        query = {name: value for name, value in filters.items() if value is not None}
        return await self.ask("GET", "/v1/rollouts", Rollouts, query={**query, "after": str(after), "limit": str(limit)})

    async def ended(self, run_id: str, *, after: int = 0, limit: int = 100, wait_seconds: float = 0) -> Rollouts:
        """Return a run's rollouts in the order in which they ended."""
        query = {"after": str(after), "limit": str(limit), "wait": str(wait_seconds)}
        return await self.ask("GET", f"/v1/runs/{quote(run_id, safe='')}/ended", Rollouts, query=query)

    async def runs(self) -> list[RunCounts]:
        """Return the number of rollouts of each run, by state."""
        return (await self.ask("GET", "/v1/runs", Runs)).runs

    async def run(self, run_id: str) -> RunCounts:
        """Return the number of rollouts of one run, by state."""
        return await self.ask("GET", f"/v1/runs/{quote(run_id, safe='')}", RunCounts)

    async def demand(self, run_id: str, *, above: int = 0, wait_seconds: float = 0) -> DemandState:
        """Return the trainers' demand for a run; if it is for no more than `above` groups, wait for more as long as requested."""
        query = {"above": str(above), "wait": str(wait_seconds)}
        return await self.ask("GET", f"/v1/runs/{quote(run_id, safe='')}/demand", DemandState, query=query)

    async def want(self, run_id: str, branch_demand: DemandRequest) -> DemandState:
        """Set the demand of a branch; return the demand for the run."""
        return await self.ask("PUT", f"/v1/runs/{quote(run_id, safe='')}/demand", DemandState, branch_demand)

    async def _change(self, path: str, kind: type[T], body: msgspec.Struct) -> T:
        return await self.ask("POST", path, kind, body)


class LeaseHeartbeats:
    """Renews leases by heartbeats, and learns which of them the queue has ended, in background tasks; an async context manager."""

    def __init__(
        self,
        client: QueueClient,
        worker: str,
        ended: Callable[[RolloutLease, AttemptReceipt], None],
        ran: Callable[[RolloutLease], float | None] = lambda lease: None,
    ) -> None:
        """Hold no leases yet.

        Args:
            client: sends the heartbeats.
            worker: name by which the leases were taken.
            ended: called once for each lease that is not held any more, with the reason: its attempt must be stopped.
            ran: returns the time that an attempt's agent has run, in seconds. None: unknown; the time counts from the hand-out.
        """
        self._client = client
        self._worker = worker
        self._ended = ended
        self._ran = ran
        self._leases: dict[LeaseKey, RolloutLease] = {}
        self._stopped_early: deque[AttemptReceipt] = deque(maxlen=_STOPPED_EARLY_KEPT)
        """Attempts that were ended before this worker had the response with their lease."""
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        beating = beat(lambda: [lease.lease_seconds for lease in self._leases.values()], self._changed, self._renew)
        self._tasks = [asyncio.create_task(beating, name="queue heartbeat"), asyncio.create_task(self._watch(), name="queue stops")]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the heartbeats; leases that are still held expire."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def keep(self, leases: Iterable[RolloutLease]) -> None:
        """Add leases to the heartbeats."""
        self._leases.update((lease.key, lease) for lease in leases)
        self._changed.set()
        for result in [result for result in self._stopped_early if result.key in self._leases]:
            self._stopped_early.remove(result)
            self._end(result)

    def drop(self, lease: RolloutLease) -> None:
        """Remove a lease from the heartbeats: its attempt was reported, or returned."""
        self._leases.pop(lease.key, None)

    async def _renew(self) -> None:
        held = list(self._leases.values())
        seconds = min(lease.lease_seconds for lease in held) / BEATS
        try:
            attempts = [Held(rollout_id=lease.rollout_id, attempt=lease.attempt, ran=self._ran(lease)) for lease in held]
            async with asyncio.timeout(seconds):  # a connection that does not answer is dropped: the next heartbeat opens another one
                results = await self._client.beat(attempts)
        except TimeoutError:
            logger.warning("the queue at %s has not answered a heartbeat for %.3g s", self._client.url, seconds)
            return
        except Exception as error:  # the leases go on, and are renewed by the next heartbeat
            logger.warning("%s", error, exc_info=not isinstance(error, QueueError))
            return
        for result in results:
            self._end(result)

    async def _watch(self) -> None:
        """Wait for the attempts that the queue ends, until cancelled."""
        cursor = 0
        while True:
            try:
                stops = await self._client.stopped(self._worker, after=cursor, wait_seconds=_STOPS_WAIT_SECONDS)
            except Exception:  # the heartbeats report it, and name the ended attempts as well
                await asyncio.sleep(1)
                continue
            cursor = stops.cursor
            for result in stops.results:
                if result.key in self._leases:
                    self._end(result)
                else:
                    self._stopped_early.append(result)

    def _end(self, result: AttemptReceipt) -> None:
        lease = self._leases.pop(result.key, None)
        if lease is not None:
            self._ended(lease, result)


def default_url(settings: QueueSettings) -> str:
    """Return the address of `spangrad queue` with these settings."""
    return f"http://{in_url(settings.host)}:{settings.port}"


def _held(leases: Sequence[RolloutLease | Held]) -> list[Held]:
    return [one if isinstance(one, Held) else Held(rollout_id=one.rollout_id, attempt=one.attempt) for one in leases]
