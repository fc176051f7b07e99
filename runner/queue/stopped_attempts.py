"""Attempts that the queue itself has ended, so that their workers and the gateway stop them at once.

In: cancellations, expired leases, exceeded time limits. Out: keys of attempts by worker, from a position on; orders to the gateway.
Invariant: positions only grow, also across restarts of the server; an attempt of whose end a worker does not hear here is named in the
answer to its next heartbeat, and the calls of one of whose end the gateway does not hear go on until its agent stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec
from pydantic import SecretStr

from runner.queue.notifier import Notifier, wait_for_event
from runner.queue.wire import LeaseKey
from spangrad.http.announcements import ClosedAttempt, ClosingRequest
from spangrad.http.async_http import AsyncClient
from spangrad.http.service import RequestError, gateway_service
from spangrad.settings import Settings
from spangrad.types import AttemptFailure

logger = logging.getLogger(__name__)

STOPS_KEPT = 10_000
"""Number of ended attempts that are remembered for workers that do not wait at the moment."""
CLOSINGS_KEPT = 100_000
"""Number of ended attempts that wait for a gateway that is away; older ones are forgotten."""
_ORDER_MOST = 1000
_ORDER_SECONDS = 5.0
"""Time limit of an order to the gateway, in seconds."""
_RETRY_SECONDS = 1.0


class StoppedAttempts:
    """Attempts that the queue ended, in order, and the workers that wait for the next one; within one event loop."""

    def __init__(self) -> None:
        self._stops: deque[tuple[int, str, LeaseKey]] = deque(maxlen=STOPS_KEPT)
        # Workers keep their position when the server is started again: its numbers go on from later ones.
        self._next = time.time_ns()
        self._notifier = Notifier()

    def add(self, stopped: Iterable[tuple[str, LeaseKey]]) -> None:
        """Add attempts with the names of their workers, and wake these."""
        for worker, key in stopped:
            self._stops.append((self._next, worker, key))
            self._next += 1
            self._notifier.notify(worker)

    async def after(self, worker: str, position: int, wait_seconds: float) -> tuple[list[LeaseKey], int]:
        """Return a worker's attempts after a position, and the next position; if there is none, wait for one as long as requested."""
        end = time.monotonic() + wait_seconds
        while True:
            event = self._notifier.of(worker)
            stops = [(number, key) for number, name, key in self._stops if name == worker and number > position]
            if stops:
                return [key for _, key in stops], stops[-1][0]
            if self._notifier.closed or not await wait_for_event(event, end):
                return [], position

    def stop_waiting(self) -> None:
        """End all waits."""
        self._notifier.close()


class GatewayOrders:
    """Orders to the gateway to end attempts: their calls in flight are cut, and later ones refused."""

    def __init__(self, url: str, token: SecretStr | None) -> None:
        self._client = AsyncClient(gateway_service(url, token), seconds=_ORDER_SECONDS)
        self._waiting: deque[ClosedAttempt] = deque(maxlen=CLOSINGS_KEPT)
        self._arrived = asyncio.Event()
        self._away = False

    @classmethod
    def of(cls, settings: Settings) -> GatewayOrders | None:
        """Return the orders to the gateway of the settings. None: agents call the engine itself (runner.gateway)."""
        return cls(settings.gateway.url, settings.gateway.token) if settings.runner.gateway else None

    def close_attempts(self, failed: Iterable[tuple[LeaseKey, AttemptFailure]]) -> None:
        """Add orders; `run` sends them."""
        self._waiting.extend(ClosedAttempt(rollout_id=rollout, attempt=attempt, reason=reason) for (rollout, attempt), reason in failed)
        self._arrived.set()

    async def run(self) -> None:
        """Send orders as they come, until cancelled."""
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while self._waiting:
                    await self._send(list(islice(self._waiting, _ORDER_MOST)))
        finally:
            await self._client.close()

    async def _send(self, closed: Sequence[ClosedAttempt]) -> None:
        """Send one order; one that the gateway refuses is dropped, and one that it does not answer waits."""
        try:
            await self._client.send("POST", "/attempts/close", msgspec.json.encode(ClosingRequest(attempts=closed)))
        except RequestError as failure:
            if not self._away:
                error = self._client.service.error_for(failure, "POST", "/attempts/close")
                logger.warning("%s Until then, calls of ended attempts go on until their agents stop.", error)
            self._away = True
            if failure.may_pass:
                await asyncio.sleep(_RETRY_SECONDS)
                return
        else:
            self._away = False
        for _ in closed:
            self._waiting.popleft()
