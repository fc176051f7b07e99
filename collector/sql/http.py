"""ClickHouse's HTTP interface to the embedded database.

In: requests of clickhouse-connect, clickhouse-go, Grafana, curl. Out: what a ClickHouse server would answer.
Invariant: a request whose body does not arrive whole changes nothing; a request without a valid token learns nothing.
"""

from __future__ import annotations

import uuid

from aiohttp import web

from collector.arrivals import ArrivalBoard
from collector.auth import Guardian, TokenRole
from collector.database import EmbeddedDatabase
from collector.encodings import accepted_encoding
from collector.sql.answer import HELD, HELD_AT_MOST, QUICK_SECONDS, AnswerForm, send_answer, send_refusal
from collector.sql.body import MAX_BODY, Unpacker, read_body, read_form
from collector.sql.errors import REFUSALS, BadRequestError
from collector.sql.frames import HANDSHAKE, frame, handshake
from collector.sql.readers import ReaderLimits
from collector.sql.statements import QueryRequest, RunningStatement, StatementRunner
from collector.write.ingest import Budget, Charge
from collector.write.write_buffer import WriteBuffer
from spangrad.http.server import refusal, site_guards
from spangrad.store.arrivals import PATH

_HELD_WAITING = 4 * HELD
"""Bytes held in memory of an answer whose client waits for its end, before it is written to a file."""


class ClickHouseInterface:
    """Handler of the interface's requests."""

    def __init__(
        self,
        database: EmbeddedDatabase,
        spans: WriteBuffer,
        arrivals: ArrivalBoard,
        guardian: Guardian,
        limits: ReaderLimits,
        budget: Budget,
    ) -> None:
        """Answer from `database`, including the spans that wait in `spans`; `limits` bound readers, `budget` the bytes of all bodies."""
        self._database = database
        self._arrivals = arrivals
        self._guardian = guardian
        self._budget = budget
        self._runner = StatementRunner(database, spans, arrivals, limits)
        # One for each role, so that readers cannot delay writers.
        self._unpackers = {role: Unpacker(role) for role in TokenRole}

    def application(self) -> web.Application:
        """Return the interface as an aiohttp application. Its handlers must be cancelled when their clients disconnect."""
        application = web.Application(middlewares=site_guards(self._guardian.token, "store"), client_max_size=MAX_BODY)
        application.router.add_get("/ping", _ok)
        application.router.add_get("/replicas_status", _ok)
        application.router.add_get(PATH, self._wait)
        application.router.add_route("*", "/", self._handle)
        return application

    def close(self) -> None:
        """Cancel running statements, and close every session."""
        for unpacker in self._unpackers.values():
            unpacker.close()
        self._runner.close()

    async def _wait(self, request: web.Request) -> web.StreamResponse:
        if self._guardian.clickhouse_role(request.headers, request.query) is None:
            return refusal(401, "the token (ClickHouse password) is wrong or missing.")
        return await self._arrivals.handle(request)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        query_id = request.query.get("query_id") or str(uuid.uuid4())
        form = self._answer_form(request, query_id)
        try:
            role = self._guardian.clickhouse_role(request.headers, request.query)
            if role is None:
                raise BadRequestError(516, "the token (ClickHouse password) is wrong or missing.", "AUTHENTICATION_FAILED")
            with Charge(self._budget) as charge:
                sql_request = await _read(request, role, charge, query_id, self._unpackers[role])
                if not sql_request.body and not sql_request.parameters.get("query") and sql_request.safe:
                    return await _ok(request)
                if _is_handshake(sql_request):
                    answer = handshake(self._database.version, self._database.timezone)
                    return web.Response(body=frame(answer) if form.framed else answer, headers=form.headers)
                run = RunningStatement(sql_request, QUICK_SECONDS)
                charge.release_after(run.done)
            self._runner.start(run)
            try:
                return await send_answer(request, run, form)
            finally:
                self._runner.abandon(run)
        except REFUSALS as error:
            return send_refusal(error, form)

    def _answer_form(self, request: web.Request, query_id: str) -> AnswerForm:
        query = request.query
        packed = query.get("enable_http_compression") == "1"
        whole = query.get("wait_end_of_query") == "1"
        size = query.get("buffer_size", "")
        return AnswerForm(
            framed=query.get("compress") == "1",
            encoding=accepted_encoding(request.headers.get("Accept-Encoding", "")) if packed else None,
            whole=whole,
            # Python refuses to convert thousands of digits, of which the first few name more than the largest size.
            held=min(HELD_AT_MOST, max(_HELD_WAITING if whole else HELD, int(size[:19]) if size.isdecimal() else 0)),
            headers={
                "X-ClickHouse-Server-Display-Name": "spangrad",
                # One with the end of a line in it, say, would not be a single header.
                **({"X-ClickHouse-Query-Id": query_id} if query_id.isprintable() else {}),
            },
            timezone=self._database.timezone,
            spool=self._database.path,
        )


async def _ok(_: web.Request) -> web.Response:
    return web.Response(body=b"Ok.\n")


async def _read(request: web.Request, role: TokenRole, charge: Charge, query_id: str, unpacker: Unpacker) -> QueryRequest:
    parameters = dict(request.query)
    body, files = b"", {}
    if request.content_type == "multipart/form-data":
        fields, files = await read_form(request, charge)
        parameters |= fields
    else:
        body = await read_body(request, parameters, charge, unpacker)
    return QueryRequest(
        parameters=parameters,
        headers=request.headers,
        body=body,
        files=files,
        role=role,
        safe=request.method in {"GET", "HEAD"},
        query_id=query_id,
    )


def _is_handshake(sql_request: QueryRequest) -> bool:
    begin = sql_request.parameters.get("query") or sql_request.body[: 2 * len(HANDSHAKE)].decode(errors="replace")
    return "client_protocol_version" in sql_request.parameters and begin.strip() == HANDSHAKE
