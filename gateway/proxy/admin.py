"""HTTP routes for the runner and for health checks: announcements of attempts, call counts, readiness.

In: HTTP requests. Out: JSON. Invariant: nothing here answers an agent, and every error is {"error": {"message", ...}}.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from gateway.pool.pool import BackendPool
from gateway.pool.upstream import BackendStatus
from gateway.proxy.context import parse_traceparent
from gateway.proxy.counts import Counts
from gateway.proxy.http import error_response
from spangrad.errors import JSON_ERRORS
from spangrad.http.announcements import (
    AnnouncementRequest,
    ClosedAttempt,
    ClosingRequest,
    CountedAttempts,
    CountRequest,
    StageRequest,
)
from spangrad.http.server import Handler, json_response

T = TypeVar("T")
COUNT_WAIT_SECONDS = 10
"""Longest time that a count waits for calls in flight."""


class Admin:
    """Handlers of the routes for the runner and for health checks."""

    def __init__(
        self,
        pool: BackendPool,
        counts: Counts,
        close_elsewhere: Callable[[Sequence[ClosedAttempt]], None],
        degraded: Callable[[], str] = str,
    ) -> None:
        """Store the arguments.

        `close_elsewhere` passes the ends of attempts on to the other gateways, and waits for none. `degraded` returns the reason why the
        gateway is not whole, or an empty string.
        """
        self._close_elsewhere = close_elsewhere
        self._degraded = degraded
        self._pool = pool
        self._counts = counts

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [
            web.post("/attempts", _given(AnnouncementRequest, "an announcement", self.announce)),
            web.post("/attempts/stages", _given(StageRequest, "an announcement of stages", self.start_stages)),
            web.post("/attempts/calls", _given(CountRequest, "a request for calls", self.calls)),
            web.post("/attempts/close", _given(ClosingRequest, "an order to close attempts", self.close)),
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
        ]

    async def announce(self, request: AnnouncementRequest) -> web.Response:
        """Record that attempts are about to start."""
        for attempt in request.attempts:
            if attempt.traceparent is not None and parse_traceparent(attempt.traceparent) is None:
                return error_response(400, f"traceparent {attempt.traceparent!r} is malformed")
        for attempt in request.attempts:
            self._counts.announce(attempt)
        return json_response({"status": "announced"})

    async def start_stages(self, request: StageRequest) -> web.Response:
        """Limit the calls of attempts to the time of the stages that they are about to begin."""
        for stage in request.attempts:
            self._counts.start_stage(stage)
        return json_response({"status": "announced"})

    async def calls(self, request: CountRequest) -> web.Response:
        """Answer with the number of policy calls of attempts, and whether the last one was refused for the length of its prompt."""
        if request.wait:
            await asyncio.gather(*(self._counts.wait_idle(attempt, COUNT_WAIT_SECONDS) for attempt in request.attempts))
        return json_response(CountedAttempts([self._counts.counted(attempt) for attempt in request.attempts]))

    async def close(self, request: ClosingRequest) -> web.Response:
        """End attempts here and at the other gateways: their calls in flight are cut, and later ones refused."""
        for attempt in request.attempts:
            self._counts.close(attempt)
        self._close_elsewhere(request.attempts)
        return json_response({"status": "closed"})

    async def health(self, request: web.Request) -> web.Response:
        """Answer that the gateway is up, and the reason if it is not whole."""
        reason = self._degraded()
        return json_response({"status": "degraded", "reason": reason} if reason else {"status": "up"})

    async def ready(self, request: web.Request) -> web.Response:
        """Answer whether every policy that has backends has one that serves, or will soon."""
        policies = [policy for policy in self._pool.policies.values() if policy.backends] or [self._pool.policy_of(None)]
        down = [policy for policy in policies if policy.status is BackendStatus.DOWN]
        if down:
            return error_response(503, " ".join(policy.why_down() for policy in down))
        return json_response({"status": max((policy.status for policy in policies), key=list(BackendStatus).index)})


def _given(kind: type[T], name: str, answer: Callable[[T], Awaitable[web.Response]]) -> Handler:
    """Return the handler of requests with a body of a kind, which answers 400 to any other, by the kind's name."""

    async def handle(request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=kind)
        except JSON_ERRORS as error:
            return error_response(400, f"{name} is JSON with a list `attempts`: {error}")
        return await answer(body)

    return handle
