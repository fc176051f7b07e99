"""Reader of the bodies of HTTP requests.

Invariant: bodies are charged to the budget from their arrival on, are no more than the limit, and arrive in bounded time.
"""

from __future__ import annotations

from aiohttp import web

from collector.encodings import allow
from collector.write.ingest import Charge
from spangrad.http.client_timeouts import arriving


async def received(request: web.Request, most: int, charge: Charge) -> bytes:
    """Return the whole body of a request, as it was sent.

    Raises:
        TooLargeError: the body has more than `most` bytes.
        QueueFullError: the budget is spent.
        TooSlowError: the body arrives too slowly.
    """
    pieces: list[bytes] = []
    size = 0
    async with arriving() as arrived:
        while piece := await request.content.readany():
            pieces.append(piece)
            size += len(piece)
            allow(size, most, charge.grow_to)
            arrived(size)
    return b"".join(pieces)
