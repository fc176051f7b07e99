"""What the runner and whoever watches ask of the gateway: announcements, counts, readiness.

In: HTTP requests. Out: JSON. Invariant: nothing here answers an agent, and every error is {"error": {"message", ...}}.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.pool.pool import Pool
from gateway.pool.upstream import BackendStatus
from gateway.proxy.context import Announcement, Attempt, parse_traceparent
from gateway.proxy.counts import Counts

COUNT_WAIT_SECONDS = 10
"""How long a count waits for calls in flight."""


class _AnnouncementRequest(msgspec.Struct, forbid_unknown_fields=True):
    run_id: str
    mode: str
    traceparent: str | None = None
    """None: the attempt has no root span to hang calls under."""


class Admin:
    """The routes."""

    def __init__(self, pool: Pool, counts: Counts) -> None:
        self._pool = pool
        self._counts = counts

    def routes(self) -> list[web.RouteDef]:
        """What aiohttp registers."""
        return [
            web.put(r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}", self.announce),
            web.get(r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}/calls", self.calls),
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
        ]

    async def announce(self, request: web.Request) -> web.Response:
        """An attempt is about to start."""
        try:
            said = msgspec.json.decode(await request.read(), type=_AnnouncementRequest)
        except msgspec.DecodeError as error:
            return error_response(400, f"an announcement is JSON with run_id, mode and traceparent: {error}")
        parent = parse_traceparent(said.traceparent)
        if said.traceparent is not None and parent is None:
            return error_response(400, f"traceparent {said.traceparent!r} is malformed")
        self._counts.announce(url_attempt(request), Announcement(said.run_id, said.mode, parent))
        return json_response({"status": "announced"})

    async def calls(self, request: web.Request) -> web.Response:
        """Answer how many policy calls an attempt made, and whether the last one was refused for the length of its prompt."""
        attempt = url_attempt(request)
        calls = await self._counts.calls(attempt, COUNT_WAIT_SECONDS)
        if calls is None:
            return error_response(404, f"attempt {attempt.number} of rollout {attempt.rollout_id!r} was neither announced nor seen")
        return json_response({"calls": calls, "overflowed": self._counts.overflowed(attempt)})

    async def health(self, request: web.Request) -> web.Response:
        """The gateway is up."""
        return json_response({"status": "up"})

    async def ready(self, request: web.Request) -> web.Response:
        """Every policy that has backends has one that answers, or is about to."""
        policies = [one for one in self._pool.policies.values() if one.backends] or [self._pool.policy_of(None)]
        down = [one for one in policies if one.status is BackendStatus.DOWN]
        if down:
            return error_response(503, " ".join(one.why_down() for one in down))
        return json_response({"status": max((one.status for one in policies), key=list(BackendStatus).index)})


def url_attempt(request: web.Request) -> Attempt:
    """The attempt that a URL names."""
    return Attempt(request.match_info["rollout"], int(request.match_info["attempt"]))


def json_response(body: object, status: int = 200) -> web.Response:
    """JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error_response(status: int, message: str, kind: str = "spangrad_error") -> web.Response:
    """An error in OpenAI's form, which clients show in words."""
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)
