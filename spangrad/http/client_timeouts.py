"""Clients that begin a request and do not get on with it: they are waited for, and then let go.

In: the connections of an HTTP server, and bodies while they arrive. Out: the same, in bounded time. Invariant: a connection that
sends no whole request ends, so that nobody keeps a server's files by being silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

FIRST_HEAD_SECONDS = 30.0
"""From a connection's beginning to its first whole head."""
KEEP_ALIVE_SECONDS = 75.0
"""From an answer to the next whole head."""
BODY_SECONDS = 30.0
"""For a body, however small."""
BODY_BYTES_A_SECOND = 1 << 16
"""So many bytes give a body a second more."""
BACKLOG = 1024
"""Connections that the kernel holds until they are accepted."""
_LOOK_SECONDS = 5.0


class TooSlowError(TimeoutError):
    """A body does not arrive at the least rate."""


@asynccontextmanager
async def arriving(seconds: float = BODY_SECONDS) -> AsyncGenerator[Callable[[int], None]]:
    """Bound the time of a body's arrival. The function given is told how many bytes are there.

    Args:
        seconds: what a body has, however small.

    Raises:
        TooSlowError: the body did not come in its time.
    """
    came = 0
    timeout = asyncio.timeout(seconds)
    began = asyncio.get_running_loop().time()

    def arrived(size: int) -> None:
        nonlocal came
        came = size
        timeout.reschedule(began + seconds + size / BODY_BYTES_A_SECOND)

    try:
        async with timeout:
            yield arrived
    except TimeoutError:
        if not timeout.expired():
            raise
        bound = f"{seconds:g} s, and a second more for each {BODY_BYTES_A_SECOND} bytes"
        raise TooSlowError(f"only {came} bytes of the body came in time; it may take {bound}") from None


class SilentConnections:
    """The connections of a server that have not sent a whole head yet, and what ends them."""

    def __init__(self, application: web.Application, first_head_seconds: float = FIRST_HEAD_SECONDS) -> None:
        """Watch who sends requests to the application."""
        self._seconds = first_head_seconds
        self._spoke: set[object] = set()
        application.middlewares.append(self._notice)

    async def watch(self, server: web.Server) -> None:
        """End the server's silent connections, until cancelled."""
        loop = asyncio.get_running_loop()
        since: dict[object, float] = {}
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            connections = set(server.connections)
            self._spoke &= connections
            since = {one: since.get(one, loop.time()) for one in connections - self._spoke}
            for one in connections - self._spoke:
                if loop.time() - since[one] > self._seconds:
                    one.force_close()

    @web.middleware
    async def _notice(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        self._spoke.add(request.protocol)
        return await handler(request)
