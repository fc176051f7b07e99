"""Time limits of a server for clients that begin a request and do not complete it.

In: the connections of an HTTP server, and bodies while they arrive. Out: the same, in bounded time. Invariant: a connection that sends no
whole request ends, so that a silent client cannot hold a server's file descriptors; a client that leaves is no error of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

FIRST_HEAD_SECONDS = 30.0
"""Time limit from the opening of a connection to its first whole request head, in seconds."""
BODY_SECONDS = 30.0
"""Time limit of a body, however small, in seconds."""
BODY_BYTES_A_SECOND = 1 << 16
"""Number of received bytes that extend a body's time limit by one second."""
_LOOK_SECONDS = 5.0
_BODY_LOOK_SECONDS = 1.0


class TooSlowError(TimeoutError):
    """A body arrives below the minimum rate."""


@asynccontextmanager
async def arriving(seconds: float = BODY_SECONDS) -> AsyncGenerator[Callable[[int], None]]:
    """Bound the time of a body's arrival. The function that is yielded must be called with the number of bytes received so far.

    Args:
        seconds: time limit of a body, however small, in seconds.

    Raises:
        TooSlowError: the body did not arrive within its time limit.
    """
    received = 0
    timeout = asyncio.timeout(seconds)
    began = asyncio.get_running_loop().time()

    def arrived(size: int) -> None:
        nonlocal received
        received = size
        timeout.reschedule(began + seconds + size / BODY_BYTES_A_SECOND)

    try:
        async with timeout:
            yield arrived
    except TimeoutError:
        if not timeout.expired():
            raise
        bound = f"{seconds:g} s, and a second more for each {BODY_BYTES_A_SECOND} bytes"
        raise TooSlowError(f"only {received} bytes of the body came in time; it may take {bound}") from None


class UnreadableBodyError(ValueError):
    """The body of a request is not coded as its head declares."""


async def read_in_time(request: web.Request, seconds: float = BODY_SECONDS) -> bytes:
    """Read the body of a request; aiohttp keeps it.

    Raises:
        TooSlowError: the body did not arrive within its time limit.
        UnreadableBodyError: it is not coded as the head declares.
        HTTPRequestEntityTooLarge: it has more bytes than the application takes.
    """
    if request.content.is_eof():
        return await request.read()
    loop = asyncio.get_running_loop()
    async with arriving(seconds) as arrived:

        def look() -> None:
            nonlocal looking
            arrived(request.content.total_bytes)
            looking = loop.call_later(pause, look)

        pause = min(_BODY_LOOK_SECONDS, seconds / 4)
        looking = loop.call_later(pause, look)
        try:
            return await request.read()
        except web.RequestPayloadError as error:
            reason = " ".join(str(getattr(error.__cause__, "message", error)).split())
            raise UnreadableBodyError(f"the body cannot be read ({reason}). Send it as its head declares it.") from error
        finally:
            looking.cancel()


class SilentConnections:
    """Connections of a server that have not sent a whole head yet; closes those that exceed the time limit."""

    def __init__(self, application: web.Application, first_head_seconds: float = FIRST_HEAD_SECONDS) -> None:
        """Register a middleware that notices which connections send requests, and which end within one."""
        self._seconds = first_head_seconds
        self._active: set[object] = set()
        application.middlewares.insert(0, self._notice)  # outermost: others may read the body, which has a time limit of its own

    async def watch(self, server: web.Server) -> None:
        """Close the server's silent connections, until cancelled."""
        loop = asyncio.get_running_loop()
        since: dict[object, float] = {}
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            connections = set(server.connections)
            self._active &= connections
            silent = connections - self._active
            since = {connection: since.get(connection, loop.time()) for connection in silent}
            for connection in silent:
                if loop.time() - since[connection] > self._seconds:
                    connection.force_close()

    @web.middleware
    async def _notice(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        self._active.add(request.protocol)
        try:
            return await handler(request)
        except ConnectionResetError:
            if request.transport is not None:
                raise
            return web.Response()  # nobody reads it: the client has left in the middle of its body
