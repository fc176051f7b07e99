"""Answers of ClickHouse's HTTP interface: in one piece if they are small or the client asks for it, else streamed.

In: a `RunningStatement`. Out: an HTTP answer, packed as the client asked. Invariant: of an answer of any size, a few megabytes are held;
one that fails in its middle ends with an exception block and without HTTP's last chunk, so that no client takes it for complete.
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

from collector.database import QueryAnswer
from collector.encodings import Packer
from collector.sql.errors import REFUSALS, BadRequestError, QueryRefusal, refusal
from collector.sql.frames import frame, frame_plainly
from collector.sql.pipe import PIECE
from collector.sql.request import Statement
from collector.sql.statements import RunningStatement

HELD = PIECE
"""Size in bytes up to which an answer is sent in one piece, with its final counts in the headers."""
HELD_AT_MOST = 64 * 2**20
"""Largest value in bytes of a client's `buffer_size`; larger ones are reduced to it."""
SPOOL_BYTES = 4 * 2**30
"""Largest size of the file that holds an answer whose client waits for its end."""
QUICK_SECONDS = 0.003
"""Time that a statement is given to end before its answer is read from the pipe."""
SEND_SECONDS = 60
"""Longest time that a client may read nothing of an answer before it counts as disconnected."""
_SEND = 1 << 16
_PACK_FROM = 4096
_LONGEST_EXCEPTION = 16 * 2**10
_READ_SECONDS = 1.0
"""Time that a client has to read the exception before the connection is closed."""
_TAG_LETTERS = string.ascii_lowercase + string.digits
_CONTENT_TYPES = {
    "JSON": "application/json; charset=UTF-8",
    "CSV": "text/csv; charset=UTF-8; header=absent",
    "CSVWithNames": "text/csv; charset=UTF-8; header=present",
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
    "TSV": "text/tab-separated-values; charset=UTF-8",
}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Form of the answer that a client asks for."""

    framed: bool
    """True for an answer in ClickHouse's compressed frames."""
    encoding: str | None
    """HTTP content encoding. None: the answer is not packed."""
    whole: bool
    """True if nothing may be sent before the statement has succeeded."""
    held: int
    """Bytes to hold in memory before the answer is streamed, or spooled to a file."""
    headers: Mapping[str, str]
    """Headers of every answer, also of errors."""
    timezone: str
    spool: Path
    """Directory for answers that are too large for memory."""
    begin: float = field(default_factory=time.perf_counter)


async def send_answer(request: web.Request, run: RunningStatement, form: AnswerForm) -> web.StreamResponse:
    """Answer with the result of a run.

    Raises:
        Exception: an error of REFUSALS, while nothing has been sent.
    """
    # Most statements end before it is worth reading the pipe, whose buffer holds their answers.
    await run.settle()
    if run.done.done():
        return await _in_one_piece(run, form, run.pipe.rest())
    head: list[bytes] = []
    while sum(map(len, head)) <= form.held:
        piece = await run.pipe.read()
        if not piece:
            return await _in_one_piece(run, form, b"".join(head))
        head.append(piece)
    if request.method == "HEAD":
        return web.Response(headers=_headers(run, form))
    if not form.whole:
        return await _send(request, _headers(run, form), form, _pieces(run, head))
    with tempfile.TemporaryFile(dir=form.spool) as file:
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

        return await _send(request, _headers(run, form, run.done.result()), form, spooled())


def send_refusal(error: Exception, form: AnswerForm) -> web.Response:
    """Answer a request that is refused; in a frame if the client asked for frames."""
    refused = refusal(error)
    body = f"{refused.message}\n".encode()
    headers = {**form.headers, "X-ClickHouse-Exception-Code": str(refused.code), "Content-Type": "text/plain; charset=UTF-8"}
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="spangrad store"'
    return web.Response(status=refused.status, body=frame(body) if form.framed else body, headers=headers)


async def _pieces(run: RunningStatement, head: list[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces that were read, and those still to come; raise at the end if the statement failed."""
    while head:
        yield head.pop(0)
    while piece := await run.pipe.read():
        yield piece
    await run.result()


async def _in_one_piece(run: RunningStatement, form: AnswerForm, piped: bytes) -> web.Response:
    answer = await run.result()
    body = piped or answer.body
    headers = _headers(run, form, answer)
    packer = _packer(form) if form.framed or len(body) > _PACK_FROM else None
    if packer is None:
        return web.Response(body=body, headers=headers)
    if isinstance(packer, Packer):
        headers["Content-Encoding"] = packer.encoding
    if len(body) > _PACK_FROM:
        packed = await asyncio.to_thread(lambda: packer.pack(body) + packer.finish())
    else:
        packed = packer.pack(body) + packer.finish()
    return web.Response(body=packed, headers=headers)


async def _send(request: web.Request, headers: dict[str, str], form: AnswerForm, pieces: AsyncIterator[bytes]) -> web.StreamResponse:
    tag = "".join(secrets.choice(_TAG_LETTERS) for _ in range(16))
    headers["X-ClickHouse-Exception-Tag"] = tag
    packer = _packer(form)
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
            # Some clients (aiohttp's) drop what they have not read yet when the connection ends early.
            await asyncio.sleep(_READ_SECONDS)
            _cut(request)
            return response
    except TimeoutError:
        _cut(request)
        return response
    await response.write_eof()
    return response


async def _put(response: web.StreamResponse, data: bytes) -> None:
    """Send data at the client's pace; raise TimeoutError when it stops reading."""
    for start in range(0, len(data), _SEND):
        async with asyncio.timeout(SEND_SECONDS):
            await response.write(data[start : start + _SEND])


def _cut(request: web.Request) -> None:
    """Close the connection after what was sent, without HTTP's last chunk."""
    if request.transport:
        request.transport.close()


def _exception_block(refused: QueryRefusal, tag: str) -> bytes:
    """Return the exception block of a streamed answer, in ClickHouse's form since 25.11."""
    message = refused.message.encode()[:_LONGEST_EXCEPTION]
    return b"\r\n__exception__\r\n%s\r\n%s\n%d %s\r\n__exception__\r\n" % (tag.encode(), message, len(message) + 1, tag.encode())


def _headers(run: RunningStatement, form: AnswerForm, answer: QueryAnswer | None = None) -> dict[str, str]:
    statement = run.statement
    assert statement is not None, "a run that answers has read its statement"
    headers = {**form.headers, "X-ClickHouse-Timezone": form.timezone, "Content-Type": _content_type(statement)}
    # Clients take the format's name as a sign that there is a result.
    if statement.answers:
        headers["X-ClickHouse-Format"] = statement.format
    if answer:
        summary = {
            "read_rows": answer.rows_read,
            "read_bytes": answer.bytes_read,
            "written_rows": answer.rows_written,
            "written_bytes": len(statement.rows or b""),
            "elapsed_ns": int((time.perf_counter() - form.begin) * 1e9),
        }
        headers["X-ClickHouse-Summary"] = json.dumps({key: str(value) for key, value in summary.items()})
    return headers


def _content_type(statement: Statement) -> str:
    if statement.format.startswith("JSON") and "EachRow" not in statement.format:
        return _CONTENT_TYPES["JSON"]
    return _CONTENT_TYPES.get(statement.format, "application/octet-stream")


class _Framer:
    """Packer for ClickHouse's frames."""

    def pack(self, piece: bytes) -> bytes:
        return frame(piece)

    def finish(self) -> bytes:
        return b""

    def fail(self, block: bytes) -> bytes:
        return frame_plainly(block)


def _packer(form: AnswerForm) -> Packer | _Framer | None:
    if form.framed:
        return _Framer()
    return Packer(form.encoding) if form.encoding else None
