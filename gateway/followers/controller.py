"""Followers of this gateway, which send calls to its backends: they are sent its pool's state, and report their calls.

In: changes of the pool, followers' reports. Out: each follower's copy of the state, within milliseconds; the load that they put on each
backend. Invariant: a backend is idle only once each connected follower has confirmed that it sends it nothing, and has no call in flight
there; a follower that does not confirm in time is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
from aiohttp import WSMsgType, web

from gateway.followers.messages import (
    BEAT_SECONDS,
    CLOSED_KEPT,
    COUNT_SECONDS,
    SILENT_SECONDS,
    ControllerUpdate,
    FollowerReport,
    PoolView,
    view_of,
)
from gateway.metrics import GatewayMetrics
from gateway.pool.pool import BackendPool, OtherGateways
from gateway.pool.upstream import Upstream
from gateway.proxy.auth import STATE_PATH
from spangrad.http.announcements import ClosedAttempt
from spangrad.http.server import json_response

log = logging.getLogger(__name__)

CONFIRM_SECONDS = 2.0
"""Longest time that a follower may take to confirm a state before it is disconnected; the engine's own pause holds its calls then."""


class FollowerState(msgspec.Struct, frozen=True):
    """State of a follower, as `GET /admin/followers` answers it."""

    url: str
    """Its gateway.url."""
    confirmed: bool
    """True if it acts on the newest state."""
    in_flight: int
    waiting: int


class _Connection:
    """Connection of a follower, and its newest report."""

    def __init__(self, url: str, request: web.Request) -> None:
        self.url = url
        self.report = FollowerReport(0, {}, {})
        self.wake = asyncio.Event()
        """Set when there is something to send it."""
        self.closed: list[ClosedAttempt] = []
        """Ends of attempts that it was not sent yet."""
        self._request = request

    def abort(self) -> None:
        """Break the connection; its handler ends."""
        if self._request.transport is not None:
            self._request.transport.abort()


class Followers(OtherGateways):
    """Connections of all followers."""

    def __init__(self, pool: BackendPool, metrics: GatewayMetrics, on_closed: Callable[[ClosedAttempt], None]) -> None:
        """Store the arguments; `on_closed` is called for each attempt that has ended, as a follower reports."""
        self._pool = pool
        self._metrics = metrics
        self._on_closed = on_closed
        self._connections: set[_Connection] = set()
        self._view: PoolView | None = None
        self._revision = 0
        self._reported = asyncio.Event()
        self._closed: dict[ClosedAttempt, None] = {}
        """Ends of attempts that a follower is sent when it connects: it may have missed them."""
        metrics.followers = lambda: len(self._connections)
        pool.others = self

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [web.get("/admin/followers", self.list), web.get(STATE_PATH, self.connect)]

    async def list(self, request: web.Request) -> web.Response:
        """Answer with the state of all followers."""
        revision = self._current()[0]
        followers = [
            FollowerState(follower.url, report.revision == revision, sum(report.in_flight.values()), sum(report.waiting.values()))
            for follower in self._connections
            for report in [follower.report]
        ]
        return json_response({"followers": followers})

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """Keep a follower informed, and take its reports, until either side ends the connection."""
        socket = web.WebSocketResponse(receive_timeout=SILENT_SECONDS, compress=False, max_msg_size=0)
        await socket.prepare(request)
        follower = _Connection(request.query.get("url", ""), request)
        follower.closed += self._closed
        self._connections.add(follower)
        log.info("the gateway at %s follows", follower.url)
        sending = asyncio.create_task(self._send(follower, socket))
        try:
            with contextlib.suppress(TimeoutError):
                while (message := await socket.receive()).type is WSMsgType.BINARY:
                    follower.report = msgspec.msgpack.decode(message.data, type=FollowerReport)
                    self._count_elsewhere()
                    for closed in follower.report.closed:
                        self._on_closed(closed)
                    self.close_attempts(follower.report.closed)
        finally:
            sending.cancel()
            self._forget(follower)
        return socket

    async def close(self, application: web.Application) -> None:
        """Break all connections."""
        for follower in list(self._connections):
            follower.abort()

    def changed(self) -> None:
        """Send all followers the state."""
        for follower in self._connections:
            follower.wake.set()

    def close_attempts(self, closed: Sequence[ClosedAttempt]) -> None:
        """Send the ends of attempts that are not known yet to all followers, also to those that connect later."""
        new = dict.fromkeys(each for each in closed if each not in self._closed)
        if not new:
            return
        self._closed |= new
        for oldest in list(islice(self._closed, max(len(self._closed) - CLOSED_KEPT, 0))):
            del self._closed[oldest]
        for follower in self._connections:
            follower.closed += new
            follower.wake.set()

    async def wait_idle(self, backend: Upstream) -> None:
        """Wait until the followers send a backend no calls, and none of theirs is in flight; disconnect those that do not confirm."""
        revision = self._current()[0]
        self.changed()
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await self._until(lambda: all(follower.report.revision >= revision for follower in self._connections))
        except TimeoutError:
            for follower in [follower for follower in self._connections if follower.report.revision < revision]:
                self._metrics.dropped_follower()
                log.warning("the gateway at %s has not confirmed within %g s, and is disconnected", follower.url, CONFIRM_SECONDS)
                self._forget(follower)
                follower.abort()
        await self._until(lambda: not any(backend.id in follower.report.in_flight for follower in self._connections))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._reported.clear()
            await self._reported.wait()

    async def _send(self, follower: _Connection, socket: web.WebSocketResponse) -> None:
        sent, sent_at = ControllerUpdate(-1, None, {}), 0.0
        with contextlib.suppress(ConnectionError):  # the receiving side ends
            while True:
                follower.wake.clear()
                revision, view = self._current()
                closed, follower.closed = tuple(follower.closed), []
                state = view if revision != sent.revision else None
                update = ControllerUpdate(revision, state, self._others_in_flight(follower), closed)
                if state or closed or update.elsewhere != sent.elsewhere or time.monotonic() - sent_at >= BEAT_SECONDS:
                    await socket.send_bytes(msgspec.msgpack.encode(update))
                    sent, sent_at = update, time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(follower.wake.wait(), COUNT_SECONDS)

    def _current(self) -> tuple[int, PoolView]:
        """Return the pool's state, and its number."""
        view = view_of(self._pool)
        if view != self._view:
            self._revision, self._view = self._revision + 1, view
        return self._revision, view

    def _others_in_flight(self, follower: _Connection) -> dict[int, int]:
        calls = {backend.id: backend.load - follower.report.in_flight.get(backend.id, 0) for backend in self._pool.backends}
        return {backend: count for backend, count in calls.items() if count > 0}

    def _count_elsewhere(self) -> None:
        reports = [follower.report for follower in self._connections]
        for policy in self._pool.policies.values():
            policy.waiting_elsewhere = sum(report.waiting.get(policy.name, 0) for report in reports)
            before = sum(backend.in_flight_elsewhere for backend in policy.backends)
            for backend in policy.backends:
                backend.set_elsewhere(sum(report.in_flight.get(backend.id, 0) for report in reports))
            if policy.waiting and sum(backend.in_flight_elsewhere for backend in policy.backends) < before:
                policy.changed()  # there may be room for a call that waits
        self._reported.set()

    def _forget(self, follower: _Connection) -> None:
        if follower in self._connections:
            self._connections.remove(follower)
            self._count_elsewhere()
            log.info("the gateway at %s follows no more", follower.url)
