"""ClickHouse's HTTP interface over the embedded engine.

In: requests of clickhouse-connect, clickhouse-go, Grafana, curl. Out: what a ClickHouse server would answer.
Invariant: a request whose body does not arrive whole changes nothing; statements are checked by the guard before they run.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from collector import encodings
from collector.auth import Guardian
from collector.clickhouse_frames import HANDSHAKE, frame, handshake, unframe
from collector.clickhouse_request import BadRequestError, read_statement
from collector.encodings import EncodingError, TooLargeError
from collector.engine import Engine, EngineRefusedError
from collector.guard import ForbiddenError, StatementGuard
from collector.handles import Handles
from collector.ingest import Budget, Charge, QueueFullError
from collector.staging import Staging

MAX_BODY = 512 * 2**20
"""Bytes of one statement with its rows, packed or unpacked."""
WORKERS = 8
"""Statements at once; more wait."""
_COMPRESS_FROM = 4096
_ENGINE_NAMES = """
SELECT name FROM system.table_functions
UNION ALL SELECT name FROM system.database_engines
UNION ALL SELECT name FROM system.table_engines"""
# As a ClickHouse server maps them; 500 for the rest.
_HTTP_STATUS = {
    **dict.fromkeys((6, 26, 27, 32, 33, 36, 38, 41, 43, 53, 62, 72, 117, 130, 456, 457), 400),
    **dict.fromkeys((46, 47, 50, 56, 60, 63, 73, 81, 115, 372), 404),
    **dict.fromkeys((497, 516), 403),
    48: 501,
    159: 408,
    202: 503,
    241: 503,
    307: 413,
}


@dataclass(frozen=True, slots=True)
class _Reply:
    body: bytes
    headers: Mapping[str, str]


class ClickHouseInterface:
    """The interface's requests, answered."""

    def __init__(self, engine: Engine, guardian: Guardian, budget: Budget) -> None:
        """Answer from `engine`; `budget` bounds the bytes of all bodies that are read or run."""
        self._engine = engine
        self._guardian = guardian
        self._budget = budget
        self._handles = Handles(engine.handle)
        self._workers = ThreadPoolExecutor(WORKERS, "clickhouse")
        handle = engine.handle()
        self._guard = StatementGuard(handle.query(_ENGINE_NAMES).body.decode().split())
        handle.close()

    def application(self) -> web.Application:
        """The interface as an aiohttp application."""
        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_get("/ping", self._ping)
        application.router.add_get("/replicas_status", self._ping)
        application.router.add_route("*", "/", self._handle)
        return application

    def close(self) -> None:
        """Cancel what still runs, and close every session."""
        self._engine.kill_queries()
        self._workers.shutdown(cancel_futures=True)
        self._handles.close()

    async def _ping(self, request: web.Request) -> web.Response:
        if not self._guardian.admits_clickhouse(request.headers, request.query):
            return _failure(_refusal(), {}, framed=False)
        return web.Response(body=b"Ok.\n")

    async def _handle(self, request: web.Request) -> web.Response:
        parameters = dict(request.query)
        headers = {"X-ClickHouse-Query-Id": parameters.get("query_id") or str(uuid.uuid4()), "X-ClickHouse-Server-Display-Name": "spangrad"}
        framed = parameters.get("compress") == "1"
        try:
            if not self._guardian.admits_clickhouse(request.headers, parameters):
                raise _refusal()
            with self._budget.charge() as charge:
                if request.content_type == "multipart/form-data":
                    parameters |= await _read_form(request, charge)
                    body = b""
                else:
                    body = await _read_body(request, parameters, charge)
                if not body and not parameters.get("query") and request.method in {"GET", "HEAD"}:
                    return web.Response(body=b"Ok.\n")
                begin = parameters.get("query") or body[: 2 * len(HANDSHAKE)].decode(errors="replace")
                if "client_protocol_version" in parameters and begin.strip() == HANDSHAKE:
                    answer = handshake(self._engine.version, self._engine.timezone)
                    return web.Response(body=frame(answer) if framed else answer, headers=headers)
                sent = dict(request.headers)
                reply = await asyncio.get_running_loop().run_in_executor(self._workers, self._run, parameters, sent, body, framed)
        except (BadRequestError, EngineRefusedError, EncodingError, TooLargeError, ForbiddenError, QueueFullError) as error:
            return _failure(error, headers, framed=framed)
        answer = reply.body
        headers.update(reply.headers)
        if parameters.get("enable_http_compression") == "1" and len(answer) > _COMPRESS_FROM:
            loop = asyncio.get_running_loop()
            answer, encoding = await loop.run_in_executor(None, encodings.compress, answer, request.headers.get("Accept-Encoding", ""))
            if encoding:
                headers["Content-Encoding"] = encoding
        return web.Response(body=answer, headers=headers)

    def _run(self, parameters: Mapping[str, str], sent: Mapping[str, str], body: bytes, framed: bool) -> _Reply:
        """Read, check and run a statement, on a worker's thread: each takes time that grows with the statement."""
        statement = read_statement(parameters, CIMultiDict(sent), body)
        self._guard.check(statement.sql)
        begin = time.perf_counter()
        with self._handles.borrow(statement) as handle:
            if statement.rows is None:
                answer = handle.query(statement.sql, statement.format, statement.parameters)
            else:
                answer = Staging(handle).insert(statement.sql, statement.format, statement.rows)
        elapsed = int((time.perf_counter() - begin) * 1e9)
        summary = {
            "read_rows": answer.rows_read,
            "read_bytes": answer.bytes_read,
            "written_rows": answer.rows_written,
            "written_bytes": len(statement.rows or b""),
            "elapsed_ns": elapsed,
        }
        headers = {
            "X-ClickHouse-Summary": json.dumps({key: str(value) for key, value in summary.items()}),
            "X-ClickHouse-Timezone": self._engine.timezone,
            "Content-Type": "application/json" if statement.format.startswith("JSON") else "application/octet-stream",
        }
        # Clients take the format's name as a sign that there is a result.
        if statement.answers:
            headers["X-ClickHouse-Format"] = statement.format
        return _Reply(frame(answer.body) if framed else answer.body, headers)


async def _read_body(request: web.Request, parameters: Mapping[str, str], charge: Charge) -> bytes:
    """The whole body, unpacked, held in the budget while it arrives. A client that leaves in its middle ends the request here."""
    received = bytearray()
    async for chunk in request.content.iter_chunked(1 << 16):
        received += chunk
        if len(received) > MAX_BODY:
            raise TooLargeError(f"the body has more than {MAX_BODY} bytes; send smaller ones")
        charge.grow_to(len(received))
    encoding, framed = request.headers.get("Content-Encoding", ""), parameters.get("decompress") == "1"
    if not received or not (encoding or framed):
        return bytes(received)

    def unpack() -> bytes:
        body = encodings.decompress(bytes(received), encoding, MAX_BODY)
        body = unframe(body, MAX_BODY) if framed else body
        charge.grow_to(len(body))
        return body

    return await asyncio.get_running_loop().run_in_executor(None, unpack)


async def _read_form(request: web.Request, charge: Charge) -> dict[str, str]:
    """The fields of a form: the statement and its parameters, when they are too long for a URL."""
    charge.grow_to(request.content_length or 0)
    fields: dict[str, str] = {}
    for name, value in (await request.post()).items():
        if not isinstance(value, str):
            raise BadRequestError("Code: 48. DB::Exception: external data is not supported by this store. (NOT_IMPLEMENTED)", 48)
        fields[name] = value
    charge.grow_to(sum(map(len, fields.values())))
    return fields


def _refusal() -> BadRequestError:
    return BadRequestError("Code: 516. DB::Exception: the token (ClickHouse password) is wrong or missing. (AUTHENTICATION_FAILED)", 516)


def _failure(error: Exception, headers: Mapping[str, str], *, framed: bool) -> web.Response:
    match error:
        case BadRequestError() | EngineRefusedError():
            code, message = error.code, str(error)
        case ForbiddenError():
            code, message = 497, f"Code: 497. DB::Exception: {error} (ACCESS_DENIED)"
        case QueueFullError():
            message = "Code: 202. DB::Exception: the store holds as much as it may; send again later. (TOO_MANY_SIMULTANEOUS_QUERIES)"
            code = 202
        case TooLargeError():
            code, message = 307, f"Code: 307. DB::Exception: {error} (TOO_MANY_BYTES)"
        case _:
            code, message = 117, f"Code: 117. DB::Exception: {error} (INCORRECT_DATA)"
    body = f"{message}\n".encode()
    # A client that asked for frames can't read an error without them.
    return web.Response(
        status=_HTTP_STATUS.get(code, 500),
        body=frame(body) if framed else body,
        headers={**headers, "X-ClickHouse-Exception-Code": str(code), "Content-Type": "text/plain; charset=UTF-8"},
    )
