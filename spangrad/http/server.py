"""HTTP server of the services for runners: environments, rewards, and the queue's middleware.

In: routes, an address, a token. Out: a server that runs until it is stopped. Invariant: beyond loopback each request needs the token; a
handler whose client has left is cancelled.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from pydantic import SecretStr

from spangrad.http.client_timeouts import BACKLOG, BODY_SECONDS, KEEP_ALIVE_SECONDS, SilentConnections
from spangrad.processes import require_free_port, require_safe_bind

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY_BYTES = 64 * 2**20
"""Largest body of a request, in bytes."""
DRAIN_SECONDS = 5.0
"""Time that requests have to end when the server stops, in seconds."""
_OPEN = frozenset({"/healthz"})
"""Paths that reveal nothing and need no token."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a service, and the token that it asks for."""

    service: str
    """Name of the service, and of its section of the settings."""
    page: str
    """Documentation page of the service."""
    host: str
    port: int
    token: SecretStr | None
    """None: the service asks for no token, and only loopback may be bound."""

    @property
    def url(self) -> str:
        """URL of the service for its clients."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class BusyError(Exception):
    """The service is busy; the client may retry in a moment."""


def serve(address: Address, running: Callable[[], AbstractAsyncContextManager[str]]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        address: address to bind.
        running: context manager that runs the service, and yields a summary for the log.

    Raises:
        SpangradError: the address may not be bound, or is in use.
    """
    require_safe_bind(address.host, address.token, address.service)
    require_free_port(address.host, address.port, f"{address.service}.port")
    asyncio.run(_serve(address, running))


async def _serve(address: Address, running: Callable[[], AbstractAsyncContextManager[str]]) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with running() as summary:
        log.info("%s ready: %s, %s", address.service, address.url, summary)
        await stopping.wait()


@asynccontextmanager
async def listening(address: Address, routes: list[web.RouteDef]) -> AsyncGenerator[None]:
    """Serve these routes and /healthz for as long as the block."""
    app = web.Application(middlewares=[guard(address.service, address.page, address.token)], client_max_size=BODY_BYTES)
    app.add_routes([*routes, web.get("/healthz", _healthy)])
    silent = SilentConnections(app)
    runner = web.AppRunner(
        app, access_log=None, keepalive_timeout=KEEP_ALIVE_SECONDS, shutdown_timeout=DRAIN_SECONDS, handler_cancellation=True
    )
    await runner.setup()
    assert runner.server
    watching = asyncio.create_task(silent.watch(runner.server))
    try:
        await web.TCPSite(runner, address.host, address.port, backlog=BACKLOG).start()
        yield
    finally:
        watching.cancel()
        await runner.cleanup()


async def body(request: web.Request) -> bytes:
    """Return the body of a request, read in bounded time."""
    async with asyncio.timeout(BODY_SECONDS):
        return await request.read()


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Build a JSON response."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json", headers=headers)


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def guard(
    service: str,
    page: str,
    token: SecretStr | None,
    *,
    noun: str = "service",
    smaller: str = "Send less.",
    busy: type[Exception] = BusyError,
) -> Any:
    """Build a middleware that checks the token, and turns errors into JSON responses that explain them.

    Args:
        service: name of the service in the settings.
        page: its documentation page.
        token: token to ask for. None: none.
        noun: name of the service in sentences.
        smaller: remedy for a body that is too large.
        busy: exception of handlers that the client may retry in a moment.
    """
    expected = token.get_secret_value() if token else None

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in _OPEN:
            scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), expected.encode()):
                return refusal(401, f"this {noun} asks for its token: send `Authorization: Bearer` with {service}.token.")
        if "%00" in request.raw_path:
            return refusal(400, f"{request.method} {request.raw_path} holds a null character, which no name has.")
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"a body may have {BODY_BYTES} bytes. {smaller}")
        except web.HTTPException as error:
            return refusal(error.status, f"{request.method} {request.path} is not answered here. {page} lists what is.")
        except TimeoutError:
            return refusal(408, f"the body did not arrive within {BODY_SECONDS:g} s. Send it faster.")
        except (msgspec.DecodeError, ValueError) as error:
            return refusal(400, f"{request.method} {request.path}: {error}")
        except busy as error:
            return answer({"error": str(error)}, 503, {"Retry-After": "1"})

    return guarded


def refusal(status: int, sentence: str) -> web.Response:
    """Build an error response with a sentence that says what is wrong."""
    return answer({"error": sentence}, status)
