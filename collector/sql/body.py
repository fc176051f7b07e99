"""Reader of bodies of ClickHouse's HTTP interface: a statement, rows, or a form with a statement, parameters and files.

In: a request's stream. Out: bytes, unpacked, or fields and files. Invariant: what arrives is charged to the budget as it arrives,
and is whole; answers to other requests do not wait while a body is unpacked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from collector.encodings import TooLargeError, allow, decompress
from collector.otlp.received import received
from collector.sql.errors import BadRequestError
from collector.sql.frames import unframe
from collector.write.ingest import Charge
from spangrad.http.client_timeouts import arriving

MAX_BODY = 512 * 2**20
"""Largest number of bytes of one statement with its rows, packed or unpacked."""
UNPACKED_AT_ONCE = 2
_PIECE = 1 << 16


class Unpacker:
    """Thread pool that unpacks bodies, and does nothing else."""

    def __init__(self, name: str) -> None:
        """Create the pool; `name` is part of its threads' names."""
        self._threads = ThreadPoolExecutor(UNPACKED_AT_ONCE, f"unpack-{name}")
        # A body waits here, where it is freed with its request, and not in the threads' queue.
        self._turns = asyncio.Semaphore(UNPACKED_AT_ONCE)

    async def run(self, unpack: Callable[[], bytes]) -> bytes:
        """Unpack a body as soon as a thread is free."""
        async with self._turns:
            return await asyncio.get_running_loop().run_in_executor(self._threads, unpack)

    def close(self) -> None:
        """Start no more unpacking; what is in progress ends with its charge."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def read_body(request: web.Request, parameters: Mapping[str, str], charge: Charge, unpacker: Unpacker) -> bytes:
    """Read the whole body, unpacked. A client that disconnects in its middle ends the request here.

    Raises:
        TooLargeError: the body has more than MAX_BODY bytes.
        EncodingError: the body is not packed as its headers say.
        QueueFullError: the budget is spent.
        TooSlowError: the body arrives too slowly.
    """
    packed = await received(request, MAX_BODY, charge)
    encoding, framed = request.headers.get("Content-Encoding", ""), parameters.get("decompress") == "1"
    if not packed or not (encoding or framed):
        return packed

    def unpack() -> bytes:
        body = decompress(packed, encoding, MAX_BODY, charge.grow_to)
        return unframe(body, MAX_BODY, charge.grow_to) if framed else body

    return await unpacker.run(unpack)


async def read_form(request: web.Request, charge: Charge) -> tuple[dict[str, str], dict[str, bytes]]:
    """Read the fields of a form (the statement and its parameters, when they are too long for a URL), and its files.

    Raises:
        BadRequestError: the form is malformed, or packed.
        TooLargeError: the form has more than MAX_BODY bytes.
        QueueFullError: the budget is spent.
        TooSlowError: the form arrives too slowly.
    """
    if request.headers.get("Content-Encoding"):
        raise BadRequestError(48, "a form must not be packed.", "NOT_IMPLEMENTED")
    fields: dict[str, str] = {}
    files: dict[str, bytes] = {}
    size = 0
    try:
        async with arriving() as arrived:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader):
                    raise BadRequestError(36, "a form within a form cannot be read.", "BAD_ARGUMENTS")
                content = bytearray()
                while piece := await part.read_chunk(_PIECE):
                    content += piece
                    size += len(piece)
                    allow(size, MAX_BODY, charge.grow_to)
                    arrived(size)
                if part.filename is None:
                    fields[part.name or ""] = content.decode(errors="surrogateescape")
                else:
                    files[part.name or "_data"] = bytes(content)
    # The last for the head of a part.
    except (ValueError, AssertionError, HttpProcessingError) as error:
        if isinstance(error, BadRequestError | TooLargeError):
            raise
        raise BadRequestError(36, f"the form cannot be read: {error}", "BAD_ARGUMENTS") from None
    return fields, files
