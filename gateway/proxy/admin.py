"""HTTP routes for the runner and for health checks: announcements of attempts, call counts, readiness.

In: HTTP requests. Out: JSON. Invariant: nothing here answers an agent, and every error is {"error": {"message", ...}}.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from gateway.pool.pool import BackendPool
from gateway.pool.upstream import BackendStatus
from gateway.proxy.context import Announcement, AttemptKey, parse_traceparent
from gateway.proxy.counts import ClosedAttempt, Counts
from gateway.proxy.http import error_response
from spangrad.http.announcements import AnnouncementRequest, AttemptNumber, RolloutName, StageRequest
from spangrad.http.server import json_response

COUNT_WAIT_SECONDS = 10
"""Longest time that a count waits for calls in flight."""


class AskedAttempt(msgspec.Struct, forbid_unknown_fields=True):
    """Name of an attempt."""

    rollout_id: RolloutName
    attempt: AttemptNumber


class CountRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request for the calls of attempts."""

    attempts: list[AskedAttempt]
    wait: bool = True
    """True if the response waits for calls in flight, for at most COUNT_WAIT_SECONDS."""


class ClosingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Order that attempts end, whatever their agents still do."""

    attempts: list[ClosedAttempt]


class CountedAttempt(msgspec.Struct):
    """Number of policy calls of an attempt."""

    calls: int | None
    """Number of accepted calls. None: the attempt was not announced to this process."""
    overflowed: bool
    """True if the last call that ended was refused because its prompt was longer than the model's context."""
    in_flight: int
    """Number of those calls that have not ended."""
    closed: str
    """Reason for which the attempt was closed, such as `token_budget`, or calls of its last stage were refused; empty: neither."""


class CountedAttempts(msgspec.Struct):
    """Numbers of policy calls, in the order of the request."""

    attempts: list[CountedAttempt]


class Admin:
    """Handlers of the routes for the runner and for health checks."""

    def __init__(
        self,
        pool: BackendPool,
        counts: Counts,
        close_elsewhere: Callable[[Sequence[ClosedAttempt]], Awaitable[None]],
        degraded: Callable[[], str] = str,
    ) -> None:
        """Store the arguments.

        Args:
            pool: backends of the gateway.
            counts: calls of the attempts.
            close_elsewhere: passes the ends of attempts on to the other gateways.
            degraded: returns the reason why the gateway is not whole, or an empty string.
        """
        self._close_elsewhere = close_elsewhere
        self._degraded = degraded
        self._pool = pool
        self._counts = counts

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [
            web.post("/attempts", self.announce),
            web.post("/attempts/stages", self.start_stages),
            web.post("/attempts/calls", self.calls),
            web.post("/attempts/close", self.close),
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
        ]

    async def announce(self, request: web.Request) -> web.Response:
        """Record that attempts are about to start."""
        try:
            announced = msgspec.json.decode(await request.read(), type=AnnouncementRequest).attempts
        except msgspec.DecodeError as error:
            return error_response(400, f"an announcement is JSON with a list `attempts`: {error}")
        parents = [parse_traceparent(attempt.traceparent) for attempt in announced]
        for attempt, parent in zip(announced, parents, strict=True):
            if attempt.traceparent is not None and parent is None:
                return error_response(400, f"traceparent {attempt.traceparent!r} is malformed")
        for attempt, parent in zip(announced, parents, strict=True):
            announcement = Announcement(attempt.run_id, attempt.mode, parent, attempt.limits, attempt.sampling)
            self._counts.announce(AttemptKey(attempt.rollout_id, attempt.attempt), announcement)
        return json_response({"status": "announced"})

    async def start_stages(self, request: web.Request) -> web.Response:
        """Limit the calls of attempts to the time of the stages that they are about to begin."""
        try:
            started = msgspec.json.decode(await request.read(), type=StageRequest).attempts
        except msgspec.DecodeError as error:
            return error_response(400, f"an announcement of stages is JSON with a list `attempts`: {error}")
        for stage in started:
            self._counts.start_stage(AttemptKey(stage.rollout_id, stage.attempt), stage.stage, stage.seconds)
        return json_response({"status": "announced"})

    async def calls(self, request: web.Request) -> web.Response:
        """Answer with the number of policy calls of attempts, and whether the last one was refused for the length of its prompt."""
        try:
            counted = msgspec.json.decode(await request.read(), type=CountRequest)
        except msgspec.DecodeError as error:
            return error_response(400, f"a request for calls is JSON with a list `attempts`: {error}")
        keys = [AttemptKey(attempt.rollout_id, attempt.attempt) for attempt in counted.attempts]
        if counted.wait:
            await asyncio.gather(*(self._counts.wait_idle(key, COUNT_WAIT_SECONDS) for key in keys))
        return json_response(CountedAttempts([self._counted(key) for key in keys]))

    def _counted(self, key: AttemptKey) -> CountedAttempt:
        counts, refused = self._counts, self._counts.refused(key)
        return CountedAttempt(counts.calls(key), counts.overflowed(key), counts.in_flight(key), refused.reason if refused else "")

    async def close(self, request: web.Request) -> web.Response:
        """End attempts here and at the other gateways: their calls in flight are cut, and later ones refused."""
        try:
            closed = msgspec.json.decode(await request.read(), type=ClosingRequest).attempts
        except msgspec.DecodeError as error:
            return error_response(400, f"an order to close attempts is JSON with a list `attempts`: {error}")
        for attempt in closed:
            self._counts.close(attempt)
        await self._close_elsewhere(closed)
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
