"""What the runner, the trainer and whoever watches ask of the gateway: announcements, counts, publications, readiness.

In: HTTP requests. Out: JSON. Invariant: nothing here answers an agent, and every error is {"error": {"message", ...}}.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from gateway.backend import Backend, BackendStatus
from gateway.context import Announcement, Attempt, parse_traceparent
from gateway.counts import Counts
from gateway.publication import PublicationError, PublicationRequest, publish
from spangrad.errors import EngineError

COUNT_WAIT_SECONDS = 10
"""How long a count waits for calls in flight."""


class _AnnouncementRequest(msgspec.Struct, forbid_unknown_fields=True):
    run_id: str
    mode: str
    traceparent: str | None = None
    """None: the attempt has no root span to hang calls under."""


class Admin:
    """The routes."""

    def __init__(self, backend: Backend, counts: Counts) -> None:
        self._backend = backend
        self._counts = counts

    def routes(self) -> list[web.RouteDef]:
        """What aiohttp registers."""
        return [
            web.put(r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}", self.announce),
            web.get(r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}/calls", self.calls),
            web.post("/admin/policies/{policy}/versions", self.publish),
            web.get("/admin/policies/{policy}", self.policy),
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
        """How many policy calls an attempt made."""
        attempt = url_attempt(request)
        calls = await self._counts.calls(attempt, COUNT_WAIT_SECONDS)
        if calls is None:
            return error_response(404, f"attempt {attempt.number} of rollout {attempt.rollout_id!r} was neither announced nor seen")
        return json_response({"calls": calls})

    async def publish(self, request: web.Request) -> web.Response:
        """Serve a new version."""
        try:
            wanted = msgspec.json.decode(await request.read(), type=PublicationRequest)
        except msgspec.DecodeError as error:
            return error_response(400, f"a publication is JSON with version, path and checksum: {error}")
        # Shielded: a trainer that leaves must not leave the engine half-way.
        publication = asyncio.create_task(publish(self._backend, request.match_info["policy"], wanted))
        try:
            return json_response(await asyncio.shield(publication))
        except PublicationError as error:
            return error_response(error.status, str(error))
        except EngineError as error:
            return error_response(502, str(error))

    async def policy(self, request: web.Request) -> web.Response:
        """What is served."""
        backend, name = self._backend, request.match_info["policy"]
        if name != backend.policy:
            return error_response(404, f"policy {name!r} is not served here. This gateway serves {backend.policy!r}.")
        info = backend.info
        return json_response(
            {
                "policy": name,
                "version": info.version if info else None,
                "tokenizer_hash": info.tokenizer_hash if info else None,
                "status": backend.status,
                **({"reason": backend.reason} if backend.status is BackendStatus.DOWN else {}),
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        """The gateway is up."""
        return json_response({"status": "up"})

    async def ready(self, request: web.Request) -> web.Response:
        """The engine is admitted."""
        if self._backend.status is BackendStatus.DOWN:
            return error_response(503, self._backend.reason)
        return json_response({"status": self._backend.status})


def url_attempt(request: web.Request) -> Attempt:
    """The attempt that a URL names."""
    return Attempt(request.match_info["rollout"], int(request.match_info["attempt"]))


def json_response(body: object, status: int = 200) -> web.Response:
    """JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error_response(status: int, message: str, kind: str = "spangrad_error") -> web.Response:
    """An error in OpenAI's form, which clients show in words."""
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)
