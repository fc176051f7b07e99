"""Bodies of HTTP requests while they arrive.

In: a request's stream. Out: its bytes, still packed. Invariant: they are held in the budget from their arrival on, no more of them than
may be, and come in bounded time.
"""

from __future__ import annotations

from aiohttp import web

from collector.encodings import TooLargeError
from collector.write.ingest import Charge
from spangrad.http.client_timeouts import arriving


async def received(request: web.Request, most: int, charge: Charge) -> bytes:
    """The whole body, as it was sent.

    Args:
        request: whose body it is.
        most: bytes that it may have.
        charge: of the request.

    Raises:
        TooLargeError: the body has more.
        QueueFullError: the budget is spent.
        TooSlowError: the body does not get on.
    """
    pieces: list[bytes] = []
    size = 0
    async with arriving() as arrived:
        while piece := await request.content.readany():
            pieces.append(piece)
            size += len(piece)
            hold(charge, size, most)
            arrived(size)
    return b"".join(pieces)


def hold(charge: Charge, size: int, most: int) -> None:
    """Hold so many bytes of a body.

    Raises:
        TooLargeError: they are more than may be.
        QueueFullError: the budget is spent.
    """
    if size > most:
        raise TooLargeError(f"the body has more than {most} bytes; send smaller ones")
    charge.grow_to(size)
