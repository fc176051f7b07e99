"""`spangrad gateway`: an OpenAI-compatible endpoint that records every policy call as a span.

In: chat requests of agents. Out: the engine's answers, event by event as it would have sent them; a span for each call
in the store. Invariant: every accepted call leaves exactly one span, whether it was answered, refused, cut or lost.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import signal
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.admin import Admin, error_response
from gateway.backend import Backend
from gateway.calls import Calls
from gateway.counts import Counts
from gateway.exporter import SpanExporter
from spangrad.errors import GatewayError
from spangrad.processes import require_free_port, require_safe_bind
from spangrad.settings import Settings

log = logging.getLogger(__name__)

REQUEST_BYTES = 32 * 2**20
"""Largest request: prompts may carry images."""
KEEP_ALIVE_SECONDS = 3
"""Idle connections to the engine are given up before vLLM gives them up (5 s), so that none is closed under a request."""
DRAIN_SECONDS = 0.5
"""How long calls in flight may go on at the end."""
FLUSH_SECONDS = 1.2
"""How long the last spans may take to reach the store at the end."""
GC_THRESHOLDS = (50_000, 20, 50)
"""Fewer collections: a call makes few cycles (a few percent of the throughput)."""
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


def serve(settings: Settings) -> None:
    """Run the gateway until SIGTERM or SIGINT.

    Raises:
        SpangradError: the address may not be bound, or is in use.
        GatewayError: spans could not be handed to the store before the end.
    """
    require_safe_bind(settings.gateway.host, settings.gateway.token, "gateway")
    require_free_port(settings.gateway.host, settings.gateway.port, "gateway.port")
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with running(settings) as tasks:
        log.info("gateway ready: %s, policy %r, engine %s", settings.gateway.url, settings.gateway.policy, settings.gateway.engine_url)
        waiting = asyncio.create_task(stopping.wait())
        done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in done - {waiting}:
            task.result()  # the watcher and the exporter end only by an error


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[list[asyncio.Task[None]]]:
    """The gateway, listening; gives its background tasks, which end only by an error.

    Raises:
        GatewayError: at the end, when spans are lost.
    """
    process_id = str(uuid.uuid4())
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        exporter = SpanExporter(settings, session, process_id)
        backend = Backend(settings, session)
        watcher = asyncio.create_task(backend.watch(), name="engine watcher")
        runner = web.AppRunner(
            application(settings, session, backend, exporter, process_id),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=DRAIN_SECONDS,
        )
        await runner.setup()
        await web.TCPSite(runner, settings.gateway.host, settings.gateway.port, backlog=1024).start()
        try:
            yield [watcher, exporter.task]
        finally:
            watcher.cancel()
            await runner.cleanup()
            lost = await exporter.stop(FLUSH_SECONDS)
            if lost:
                raise GatewayError(f"{lost} spans are lost: the store at {settings.store.otlp_endpoint} did not take them before the end.")


def application(
    settings: Settings, session: aiohttp.ClientSession, backend: Backend, exporter: SpanExporter, process_id: str
) -> web.Application:
    """Wire the routes."""
    counts = Counts()
    calls = Calls(settings, session, backend, exporter, counts, process_id)
    app = web.Application(middlewares=[_require_token(settings)], client_max_size=REQUEST_BYTES)
    app.add_routes([*Admin(backend, counts).routes(), *calls.routes()])
    app.router.add_route("*", "/{rest:.*}", _unknown)
    return app


def _require_token(settings: Settings) -> Middleware:
    token = settings.gateway.token
    expected = f"Bearer {token.get_secret_value()}".encode() if token else b""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if expected and request.path not in _OPEN_PATHS and not hmac.compare_digest(given, expected):
            return error_response(
                401, "this gateway asks for a token. Send `Authorization: Bearer <gateway.token>`.", "authentication_error"
            )
        return await handler(request)

    return check


async def _unknown(request: web.Request) -> web.Response:
    return error_response(
        404,
        f"{request.method} {request.path} is not answered here. Supported: POST /v1/chat/completions and GET /v1/models, "
        "each also under /rollout/{id}/attempt/{n}.",
        "not_found_error",
    )
