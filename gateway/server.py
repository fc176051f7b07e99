"""`spangrad gateway`: an OpenAI-compatible endpoint that records every policy call as a span.

In: chat requests of agents. Out: the engine's answers, event by event as it would have sent them; a span for each call
in the store. Invariant: every accepted call leaves exactly one span, whether it was answered, refused, cut or lost.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from gateway.dialects import DIALECTS
from gateway.followers.controller import Followers
from gateway.followers.followed_pool import FollowedPool
from gateway.followers.follower import Follower
from gateway.metrics import GatewayMetrics
from gateway.pool.admin_pool import PoolAdmin
from gateway.pool.pool import BackendPool
from gateway.proxy.admin import Admin
from gateway.proxy.auth import AccessControl, tls_context
from gateway.proxy.calls import Calls
from gateway.proxy.counts import Counts
from gateway.proxy.http import error_response
from gateway.proxy.redaction import Redactor
from gateway.proxy.retokenize import load
from gateway.recorder.exporter import SpanExporter
from spangrad.errors import GatewayError
from spangrad.http import server as http_server
from spangrad.http.metrics import metrics_route
from spangrad.http.server import HttpServer, site_guards
from spangrad.processes import require_free_port, require_safe_bind
from spangrad.settings import Settings

log = logging.getLogger(__name__)

ENGINE_KEEP_ALIVE_SECONDS = 3
"""Longest time that an idle connection to an engine stays open; below vLLM's own 5 s, so that vLLM closes none under a request."""
CONNECT_SECONDS = 10
"""Longest time that an upstream may take to accept a connection."""
DRAIN_SECONDS = 0.5
"""Longest time that calls in flight may go on at shutdown."""
FLUSH_SECONDS = 1.2
"""Longest time that the last spans may take to reach the store at shutdown."""
GC_THRESHOLDS = (50_000, 20, 50)
"""Thresholds of Python's garbage collector: a call makes few reference cycles, and fewer collections save a few percent."""


def serve(settings: Settings) -> None:
    """Run the gateway until SIGTERM or SIGINT.

    Raises:
        SpangradError: the address may not be bound, or is in use; the clients' tokens or the certificate cannot be used.
        GatewayError: another gateway owns `gateway.spill_path`, or spans could not be written to it before the end.
    """
    gateway = settings.gateway
    require_safe_bind(gateway.host, gateway.token or gateway.clients, "gateway")
    require_free_port(gateway.host, gateway.port, "gateway.port")
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    http_server.serve(
        lambda: running(settings),
        lambda _: log.info("gateway ready: %s, policy %r, engine %s", gateway.url, gateway.policy, gateway.engine_url),
        lambda gateway: gateway.tasks,
    )


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that listens."""

    url: str
    """URL for clients of this machine."""
    tasks: tuple[asyncio.Task[None], ...]
    """Background tasks, which end only by an error."""


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[RunningGateway]:
    """Run the gateway, listening, while the block runs.

    Raises:
        SpangradError: the clients' tokens, the certificate or the tokenizer cannot be used.
        GatewayError: another gateway owns `gateway.spill_path`; at the end, when spans are lost.
    """
    tls = tls_context(settings.gateway)
    redactor = Redactor(settings.gateway) if settings.gateway.redact or settings.gateway.redact_paths else None
    retokenizer = load(settings.gateway.retokenize) if settings.gateway.retokenize else None
    process_id = str(uuid.uuid4())
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        pool = FollowedPool(settings, session) if settings.gateway.controller else BackendPool(settings, session)
        follower = Follower(settings.gateway, pool, session) if isinstance(pool, FollowedPool) else None
        access = AccessControl(settings.gateway, lambda model: pool.policy_of(model).name)
        # Nothing has begun so far that would have to be ended.
        exporter = SpanExporter(settings, session, process_id, retokenizer)
        watcher = asyncio.create_task(follower.run() if follower else pool.run(), name="engine watchers")
        app = application(settings, session, pool, exporter, process_id, access, redactor, follower)
        server = HttpServer(app, settings.gateway.host, settings.gateway.port, drain_seconds=DRAIN_SECONDS, tls=tls)
        try:
            async with server:
                yield RunningGateway(server.url, (watcher, exporter.task))
        finally:
            watcher.cancel()
            lost = await exporter.stop(FLUSH_SECONDS)
            if lost:
                raise GatewayError(
                    f"{lost} spans are lost: gateway.spill_path = {settings.gateway.spill_path} did not take them before the end. "
                    "Look into the log for the reason."
                )


def application(
    settings: Settings,
    session: aiohttp.ClientSession,
    pool: BackendPool,
    exporter: SpanExporter,
    process_id: str,
    access: AccessControl,
    redactor: Redactor | None,
    follower: Follower | None,
) -> web.Application:
    """Return the HTTP application with all routes of the gateway."""
    counts, metrics = Counts(), GatewayMetrics(pool, exporter)
    calls = Calls(settings, session, pool, exporter, counts, process_id, metrics, redactor)
    guards = site_guards(settings.gateway.token or settings.gateway.clients, "gateway", error_response)
    app = web.Application(middlewares=[*guards, access.check], client_max_size=settings.gateway.max_request_bytes)
    if follower:
        metrics.controller_up = lambda: follower.connected
        follower.on_closed = counts.close
        app.add_routes([*Admin(pool, counts, follower.close_attempts, follower.reason).routes(), *follower.routes()])
    else:
        followers = Followers(pool, metrics, counts.close)
        app.on_shutdown.append(followers.close)
        app.add_routes([*Admin(pool, counts, followers.close_attempts).routes(), *followers.routes(), *PoolAdmin(pool, metrics).routes()])
    app.add_routes([metrics_route(metrics), *calls.routes()])
    app.router.add_route("*", "/{rest:(?s:.*)}", _unknown)
    return app


async def _unknown(request: web.Request) -> web.Response:
    return error_response(
        404,
        f"{request.method} {request.path} is not answered here. Supported: POST {', '.join(DIALECTS)}, and what an engine has below /v1, "
        "each also under /rollout/{id}/attempt/{n}.",
        "not_found_error",
    )
