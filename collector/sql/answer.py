"""Answers of ClickHouse's HTTP interface: in one piece when they are small or asked for so, else piece by piece as they are made.

In: a `Run`. Out: an HTTP answer, packed as the client asked. Invariant: whatever an answer's size, a few megabytes of it are held; one
that fails in its middle ends with an exception block and without HTTP's last chunk, so that nobody takes it for a whole one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import string
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from collector.database import Answer
from collector.encodings import Packer
from collector.sql.errors import REFUSALS, BadRequestError, Refusal, refusal
from collector.sql.frames import frame, frame_plainly
from collector.sql.pipe import PIECE
from collector.sql.request import Statement
from collector.sql.statements import Run

HELD = PIECE
"""An answer up to this size goes out in one piece, with what is known at its end in its headers."""
HELD_AT_MOST = 64 * 2**20
"""The most that a client's `buffer_size` gets."""
SPOOL_BYTES = 4 * 2**30
"""Of the file that holds an answer whose client waits for its end."""
QUICK_SECONDS = 0.003
"""How long a statement runs before its answer is watched."""
SEND_SECONDS = 60
"""How long a client may take nothing of an answer before it counts as gone."""
_SEND = 1 << 16
_PACK_FROM = 4096
_LONGEST_EXCEPTION = 16 * 2**10
_READ_SECONDS = 1.0
"""How long a client has to read why its answer ended, before the connection does."""
_TAG_LETTERS = string.ascii_lowercase + string.digits
_CONTENT_TYPES = {
    "JSON": "application/json; charset=UTF-8",
    "CSV": "text/csv; charset=UTF-8; header=absent",
    "CSVWithNames": "text/csv; charset=UTF-8; header=present",
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
    "TSV": "text/tab-separated-values; charset=UTF-8",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a client wants its answer."""

    framed: bool
    """In ClickHouse's compressed frames."""
    encoding: str | None
    """Of HTTP."""
    whole: bool
    """Not before its end is known to be good."""
    held: int
    """Bytes to hold back for that, or for what stands in the headers."""
    headers: Mapping[str, str]
    """Of every answer, errors too."""
    timezone: str
    spool: Path
    """Directory for what is too large to hold."""
    begin: float = field(default_factory=time.perf_counter)


async def send_answer(request: web.Request, run: Run, wanted: Wanted) -> web.StreamResponse:
    """Answer with what a run makes.

    Raises:
        Exception: one of REFUSALS, while nothing has been sent.
    """
    # Most statements end before it is worth to watch the pipe, whose own room takes their answers.
    await run.settle()
    if run.done.done():
        return await _in_one_piece(run, wanted, run.pipe.rest())
    head: list[bytes] = []
    while sum(map(len, head)) <= wanted.held:
        piece = await run.pipe.read()
        if not piece:
            return await _in_one_piece(run, wanted, b"".join(head))
        head.append(piece)
    if request.method == "HEAD":
        return web.Response(headers=_headers(run, wanted))
    if not wanted.whole:
        return await _send(request, _headers(run, wanted), wanted, _pieces(run, head))
    with tempfile.TemporaryFile(dir=wanted.spool) as file:
        async for piece in _pieces(run, head):
            await asyncio.to_thread(file.write, piece)
            if file.tell() > SPOOL_BYTES:
                raise BadRequestError(
                    396,
                    f"the answer has more than {SPOOL_BYTES} bytes; ask for less, or without wait_end_of_query.",
                    "TOO_MANY_ROWS_OR_BYTES",
                )
        file.seek(0)

        async def spooled() -> AsyncIterator[bytes]:
            while piece := await asyncio.to_thread(file.read, PIECE):
                yield piece

        return await _send(request, _headers(run, wanted, run.done.result()), wanted, spooled())


def send_refusal(error: Exception, wanted: Wanted) -> web.Response:
    """Answer a request that is refused, readably for a client that asked for frames."""
    told = refusal(error)
    body = f"{told.message}\n".encode()
    headers = {**wanted.headers, "X-ClickHouse-Exception-Code": str(told.code), "Content-Type": "text/plain; charset=UTF-8"}
    if told.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="spangrad store"'
    return web.Response(status=told.status, body=frame(body) if wanted.framed else body, headers=headers)


async def _pieces(run: Run, head: list[bytes]) -> AsyncIterator[bytes]:
    """What was read and what is still to come; raises at the end when the statement failed."""
    while head:
        yield head.pop(0)
    while piece := await run.pipe.read():
        yield piece
    await run.result()


async def _in_one_piece(run: Run, wanted: Wanted, piped: bytes) -> web.Response:
    answer = await run.result()
    body = piped or answer.body
    headers = _headers(run, wanted, answer)
    packer = _packer(wanted) if wanted.framed or len(body) > _PACK_FROM else None
    if packer is None:
        return web.Response(body=body, headers=headers)
    if isinstance(packer, Packer):
        headers["Content-Encoding"] = packer.encoding
    if len(body) > _PACK_FROM:
        packed = await asyncio.to_thread(lambda: packer.pack(body) + packer.finish())
    else:
        packed = packer.pack(body) + packer.finish()
    return web.Response(body=packed, headers=headers)


async def _send(request: web.Request, headers: dict[str, str], wanted: Wanted, pieces: AsyncIterator[bytes]) -> web.StreamResponse:
    tag = "".join(secrets.choice(_TAG_LETTERS) for _ in range(16))
    headers["X-ClickHouse-Exception-Tag"] = tag
    packer = _packer(wanted)
    if isinstance(packer, Packer):
        headers["Content-Encoding"] = packer.encoding
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        try:
            async for piece in pieces:
                await _put(response, await asyncio.to_thread(packer.pack, piece) if packer else piece)
            await _put(response, packer.finish() if packer else b"")
        except REFUSALS as error:
            block = _exception_block(refusal(error), tag)
            await _put(response, packer.fail(block) if packer else block)
            # Some clients (aiohttp's) forget what they have not read yet when the connection ends early.
            await asyncio.sleep(_READ_SECONDS)
            _cut(request)
            return response
    except TimeoutError:
        _cut(request)
        return response
    await response.write_eof()
    return response


async def _put(response: web.StreamResponse, data: bytes) -> None:
    """Send, at the client's pace."""
    for start in range(0, len(data), _SEND):
        async with asyncio.timeout(SEND_SECONDS):
            await response.write(data[start : start + _SEND])


def _cut(request: web.Request) -> None:
    """End the connection after what was sent, without the last chunk."""
    if request.transport:
        request.transport.close()


def _exception_block(told: Refusal, tag: str) -> bytes:
    """As ClickHouse writes it since 25.11."""
    message = told.message.encode()[:_LONGEST_EXCEPTION]
    return b"\r\n__exception__\r\n%s\r\n%s\n%d %s\r\n__exception__\r\n" % (tag.encode(), message, len(message) + 1, tag.encode())


def _headers(run: Run, wanted: Wanted, answer: Answer | None = None) -> dict[str, str]:
    statement = run.statement
    assert statement is not None, "a run that answers has read its statement"
    headers = {**wanted.headers, "X-ClickHouse-Timezone": wanted.timezone, "Content-Type": _content_type(statement)}
    # Clients take the format's name as a sign that there is a result.
    if statement.answers:
        headers["X-ClickHouse-Format"] = statement.format
    if answer:
        summary = {
            "read_rows": answer.rows_read,
            "read_bytes": answer.bytes_read,
            "written_rows": answer.rows_written,
            "written_bytes": len(statement.rows or b""),
            "elapsed_ns": int((time.perf_counter() - wanted.begin) * 1e9),
        }
        headers["X-ClickHouse-Summary"] = json.dumps({key: str(value) for key, value in summary.items()})
    return headers


def _content_type(statement: Statement) -> str:
    if statement.format.startswith("JSON") and "EachRow" not in statement.format:
        return _CONTENT_TYPES["JSON"]
    return _CONTENT_TYPES.get(statement.format, "application/octet-stream")


class _Framer:
    """Packs in ClickHouse's frames."""

    def pack(self, piece: bytes) -> bytes:
        return frame(piece)

    def finish(self) -> bytes:
        return b""

    def fail(self, block: bytes) -> bytes:
        return frame_plainly(block)


class _Encoder(Packer):
    """Packs in an encoding of HTTP."""

    def fail(self, block: bytes) -> bytes:
        return self.pack(block) + self.finish()


def _packer(wanted: Wanted) -> _Encoder | _Framer | None:
    if wanted.framed:
        return _Framer()
    return _Encoder(wanted.encoding) if wanted.encoding else None
