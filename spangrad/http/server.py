"""HTTP servers: of the gateway, the store, the queue, environments and rewards.

In: an aiohttp application, an address. Out: a server that runs until it is stopped. Invariant: a client that sends no whole request holds
no connection; beyond loopback each request to a JSON service needs the token, which is checked before the body is read; where none is
needed, pages of foreign sites reach nothing.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import SecretStr

from spangrad.http.client_timeouts import SilentConnections, TooSlowError, read_in_time
from spangrad.http.foreign_sites import foreign_problem
from spangrad.http.service import in_url
from spangrad.http.tokens import agent_token, credential, is_token
from spangrad.processes import raise_files_limit, require_free_port, require_safe_bind

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY_BYTES = 64 * 2**20
"""Largest body of a request to a JSON service, in bytes."""
DRAIN_SECONDS = 5.0
"""Time that requests have to end when the server stops, in seconds."""
KEEP_ALIVE_SECONDS = 75.0
"""Time limit from a response to the next whole request head, in seconds."""
BACKLOG = 1024
"""Largest number of connections that the kernel holds until they are accepted."""
_OPEN = frozenset({"/healthz"})
"""Paths that reveal nothing and need no token."""
log = logging.getLogger(__name__)


class HttpServer:
    """A listening HTTP server; an async context manager, or `start` and `stop`."""

    def __init__(
        self,
        application: web.Application,
        host: str,
        port: int,
        *,
        cancels: bool = True,
        unpacks: bool = True,
        drain_seconds: float = DRAIN_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare to serve an application; `start` listens.

        Args:
            application: routes and middlewares.
            host: address to bind.
            port: port to bind. 0: a free one, which `port` and `url` tell once the server listens.
            cancels: whether a handler is cancelled when its client has left.
            unpacks: whether bodies with a Content-Encoding are decompressed before handlers read them.
            drain_seconds: time that requests have to end at `stop`, in seconds.
            tls: certificate. None: plain HTTP.
        """
        self._silent = SilentConnections(application)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=log,
            auto_decompress=unpacks,
            handler_cancellation=cancels,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            shutdown_timeout=drain_seconds,
        )
        self.host, self.port = host, port
        self._tls = tls
        self._watcher: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the server for clients of this machine."""
        return f"{'https' if self._tls else 'http'}://{in_url(self.host)}:{self.port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is in use, or not one of this machine.
        """
        await self._runner.setup()
        assert self._runner.server
        self._watcher = asyncio.create_task(self._silent.watch(self._runner.server), name="silent connections")
        try:
            await web.TCPSite(self._runner, self.host, self.port, backlog=BACKLOG, ssl_context=self._tls).start()
        except BaseException:
            await self.stop()
            raise
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Listen no more, and give requests in progress the time to end."""
        if self._watcher:
            self._watcher.cancel()
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        """Listen; return the server."""
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        await self.stop()


def serve(
    service: Callable[[], AbstractAsyncContextManager[T]],
    ready: Callable[[T], None],
    ends: Callable[[T], Iterable[asyncio.Future[None]]] = lambda _: (),
) -> None:
    """Run a service until SIGTERM or SIGINT; it may open as many files as the machine lets this user.

    Args:
        service: returns a context manager in which the service runs.
        ready: called with the context manager's value once it runs.
        ends: returns tasks that end only by an error, which ends the service, too.
    """
    raise_files_limit()  # a call in flight takes the gateway two, and shells give 1024
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(service, ready, ends))


async def _until_signal(
    service: Callable[[], AbstractAsyncContextManager[T]], ready: Callable[[T], None], ends: Callable[[T], Iterable[asyncio.Future[None]]]
) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with service() as running:
        ready(running)
        waiting = asyncio.create_task(stopping.wait())
        done, _ = await asyncio.wait({waiting, *ends(running)}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for end in done - {waiting}:
            end.result()


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a JSON service, and the token that it asks for."""

    service: str
    """Name of the service, and of its section of the settings."""
    page: str
    """Documentation page of the service."""
    host: str
    port: int
    token: SecretStr | None
    """None: the service asks for no token, and only loopback may be bound."""
    noun: str = "service"
    """Name of the service in sentences."""

    @property
    def url(self) -> str:
        """URL of the service for its clients."""
        return f"http://{in_url(self.host)}:{self.port}"

    def require_usable(self) -> None:
        """Refuse an address that may not be bound, or is in use.

        Raises:
            SpangradError: with the setting to change.
        """
        require_safe_bind(self.host, self.token, self.service)
        require_free_port(self.host, self.port, f"{self.service}.port")


class BusyError(Exception):
    """The service is busy; the client may retry in a moment."""


def json_server(
    address: Address,
    routes: Iterable[web.RouteDef],
    *,
    cancels: bool = True,
    smaller: str = "Send less.",
    busy: type[Exception] = BusyError,
    agents_read: frozenset[str] = frozenset(),
) -> HttpServer:
    """Return a server of these routes and /healthz that checks the token, and refuses in JSON.

    Args:
        address: address and token.
        routes: routes of the service.
        cancels: whether a handler is cancelled when its client has left.
        smaller: remedy for a body that is too large.
        busy: exception of handlers that the client may retry in a moment.
        agents_read: paths of the routes that agents may GET with their own token.
    """
    middlewares = [*site_guards(address.token, address.service), _guard(address, smaller, busy, agents_read)]
    application = web.Application(middlewares=middlewares, client_max_size=BODY_BYTES)
    application.add_routes([*routes, web.get("/healthz", _healthy)])
    return HttpServer(application, address.host, address.port, cancels=cancels)


async def body(request: web.Request) -> bytes:
    """Return the body of a request, read in bounded time."""
    return await read_in_time(request)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Build a response with a JSON body."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json", headers=headers)


def refusal(status: int, sentence: str) -> web.Response:
    """Build an error response with a sentence that says what is wrong."""
    return json_response({"error": sentence}, status)


def site_guards(token: object | None, section: str, refuse: Callable[[int, str], web.Response] = refusal) -> list[Any]:
    """Return the middleware that refuses pages of foreign sites, in a list; empty where requests need a token, which such pages lack.

    Args:
        token: token that requests need. None or empty: they need none.
        section: section of the settings that has it.
        refuse: returns the answer of a status and a sentence.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if problem := foreign_problem(request.headers.get("Host"), request.headers.get("Origin")):
            return refuse(403, f"the request is refused, since {problem}. Set {section}.token and send it, or ask 127.0.0.1.")
        return await handler(request)

    return [] if token else [guarded]


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _guard(address: Address, smaller: str, busy: type[Exception], agents_read: frozenset[str]) -> Any:
    """Build the middleware that checks the token, and turns errors into responses that explain them."""
    expected = address.token.get_secret_value() if address.token else None

    def admits(request: web.Request) -> bool:
        if expected is None or request.path in _OPEN:
            return True
        shown, resource = credential(request.headers.get("Authorization", "")), request.match_info.route.resource
        is_for_agents = request.method == "GET" and resource is not None and resource.canonical in agents_read
        return is_token(shown, expected) or (is_for_agents and is_token(shown, agent_token(expected)))

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not admits(request):
            return refusal(401, f"this {address.noun} asks for its token: send `Authorization: Bearer` with {address.service}.token.")
        if "%00" in request.raw_path:
            return refusal(400, f"{request.method} {request.raw_path} holds a null character, which no name has.")
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"a body may have {BODY_BYTES} bytes. {smaller}")
        except web.HTTPException as error:
            return refusal(error.status, f"{request.method} {request.path} is not answered here. {address.page} lists what is.")
        except TooSlowError as error:
            return refusal(408, f"{error}. Send it faster.")
        except (ValueError, RecursionError) as error:
            return refusal(400, f"{request.method} {request.path}: {error}")
        except busy as error:
            return json_response({"error": str(error)}, 503, {"Retry-After": "1"})

    return guarded


def _without_headers(record: logging.LogRecord) -> bool:
    """Drop what an HTTP server logs of malformed requests: of heads the details, which quote headers, keys included; of bodies all."""
    if record.exc_info and isinstance(record.exc_info[1], web.RequestPayloadError):
        return False  # the request is refused
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
    return True


log.addFilter(_without_headers)
