"""HTTP routes for the runner and for health checks: announcements of attempts, call counts, readiness.

In: HTTP requests. Out: JSON. Invariant: nothing here answers an agent, and every error is {"error": {"message", ...}}.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.pool.pool import BackendPool
from gateway.pool.upstream import BackendStatus
from gateway.proxy.context import Announcement, parse_traceparent
from gateway.proxy.counts import Counts
from gateway.proxy.http import error_response, url_attempt
from spangrad.http.server import json_response

COUNT_WAIT_SECONDS = 10
"""Longest time that a count waits for calls in flight."""


class _AnnouncementRequest(msgspec.Struct, forbid_unknown_fields=True):
    run_id: str
    mode: str
    traceparent: str | None = None
    """Context of the attempt's root span, which becomes the parent of its calls. None: it has none."""


class Admin:
    """Handlers of the routes for the runner and for health checks."""

    def __init__(self, pool: BackendPool, counts: Counts) -> None:
        self._pool = pool
        self._counts = counts

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [
            web.put(r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}", self.announce),
            web.get(r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}/calls", self.calls),
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
        ]

    async def announce(self, request: web.Request) -> web.Response:
        """Record that an attempt is about to start."""
        try:
            announcement = msgspec.json.decode(await request.read(), type=_AnnouncementRequest)
        except msgspec.DecodeError as error:
            return error_response(400, f"an announcement is JSON with run_id, mode and traceparent: {error}")
        parent = parse_traceparent(announcement.traceparent)
        if announcement.traceparent is not None and parent is None:
            return error_response(400, f"traceparent {announcement.traceparent!r} is malformed")
        self._counts.announce(url_attempt(request), Announcement(announcement.run_id, announcement.mode, parent))
        return json_response({"status": "announced"})

    async def calls(self, request: web.Request) -> web.Response:
        """Answer with the number of policy calls of an attempt, and whether the last one was refused for the length of its prompt."""
        attempt = url_attempt(request)
        calls = await self._counts.calls(attempt, COUNT_WAIT_SECONDS)
        if calls is None:
            return error_response(404, f"attempt {attempt.number} of rollout {attempt.rollout_id!r} was neither announced nor seen")
        return json_response({"calls": calls, "overflowed": self._counts.overflowed(attempt)})

    async def health(self, request: web.Request) -> web.Response:
        """Answer that the gateway is up."""
        return json_response({"status": "up"})

    async def ready(self, request: web.Request) -> web.Response:
        """Answer whether every policy that has backends has one that serves, or will soon."""
        policies = [policy for policy in self._pool.policies.values() if policy.backends] or [self._pool.policy_of(None)]
        down = [policy for policy in policies if policy.status is BackendStatus.DOWN]
        if down:
            return error_response(503, " ".join(policy.why_down() for policy in down))
        return json_response({"status": max((policy.status for policy in policies), key=list(BackendStatus).index)})
