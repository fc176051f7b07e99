"""Execution of statements of ClickHouse's HTTP interface: each on a worker thread, found by its id, cancelled if its client leaves.

Invariant: a statement is checked before it runs, and sees every span that was acknowledged before it arrived, unless its client does not
ask for that (SETTLED); one that only reads ends soon after its client has disconnected.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, proxy

from collector.arrivals import ArrivalBoard
from collector.auth import TokenRole
from collector.database import EmbeddedDatabase, EngineRefusedError, Handle, QueryAnswer
from collector.sql.answer_clause import AnswerClause, find_answer_clause
from collector.sql.errors import BadRequestError
from collector.sql.guard import StatementGuard
from collector.sql.pipe import Pipe, wake
from collector.sql.readers import ReaderLimits
from collector.sql.request import SESSION_WORDS, Statement, read_statement
from collector.sql.sessions import SessionPool
from collector.write.staging import Staging
from collector.write.write_buffer import WriteBuffer
from spangrad.errors import StoreError
from spangrad.store.clickhouse import SETTLED
from spangrad.store.names import INTERNAL

WORKERS = {TokenRole.WRITER: 16, TokenRole.READER: 8}
"""Number of concurrent statements, by role; more wait. Readers cannot delay the builder, the trainer or a collector."""
_ENGINE_NAMES = """
SELECT name FROM system.table_functions
UNION ALL SELECT name FROM system.database_engines
UNION ALL SELECT name FROM system.table_engines"""
_TEXT = re.compile(r"'([^'\\]*+)'")
_PLAIN_ID = re.compile(r"[\w.:-]{1,128}")
_OF_STAGE = re.compile(rf"\s*INSERT\s+INTO\s+`?{INTERNAL}`?\.", re.IGNORECASE)
_KILL_AGAIN_SECONDS = 0.1
_SYNTAX_ERROR = 62


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """A client's request, whole and unpacked."""

    parameters: Mapping[str, str]
    headers: Mapping[str, str]
    """Headers; names in any case."""
    body: bytes
    files: Mapping[str, bytes]
    role: TokenRole
    safe: bool
    """True if the HTTP method is GET or HEAD, which must change nothing."""
    query_id: str


class RunningStatement:
    """A statement from its request to its end."""

    def __init__(self, request: QueryRequest, quick_seconds: float) -> None:
        self.request: QueryRequest | None = request
        """The request. None: the client has disconnected before the statement began."""
        self.pipe = Pipe()
        self.statement: Statement | None = None
        """The parsed statement; set before anything comes through the pipe."""
        self.done: Future[QueryAnswer] = Future()
        """Future of the statement's end: its counts, and its answer where that did not go through the pipe."""
        self.lock = threading.Lock()
        self.handle: str | None = None
        """Name of the handle that runs the statement, while it runs and may be killed."""
        loop = asyncio.get_running_loop()
        self._settled = loop.create_future()
        self._timer = loop.call_later(quick_seconds, wake, self._settled)
        self.done.add_done_callback(lambda _: loop.call_soon_threadsafe(wake, self._settled))

    async def settle(self) -> None:
        """Wait for the statement's end, for at most `quick_seconds` from its creation."""
        try:
            await self._settled
        finally:
            self._timer.cancel()

    async def result(self) -> QueryAnswer:
        """Wait for the statement's end; return its counts, and the answer where that did not go through the pipe.

        Raises:
            Exception: the statement's error, one of REFUSALS.
        """
        return self.done.result() if self.done.done() else await asyncio.wrap_future(self.done)


class StatementRunner:
    """Executor of statements, with a thread pool for each role."""

    def __init__(self, database: EmbeddedDatabase, spans: WriteBuffer, arrivals: ArrivalBoard, limits: ReaderLimits) -> None:
        """Run on `database`, after the spans that wait in `spans` are stored in it; `limits` bound readers, `arrivals` notes inserts."""
        self._database = database
        self._arrivals = arrivals
        self._spans = spans
        self._limits = limits
        self._handles = SessionPool(database.handle)
        self._workers = {role: ThreadPoolExecutor(count, f"clickhouse-{role}") for role, count in WORKERS.items()}
        self._ids: dict[str, RunningStatement] = {}
        """Running statements by their clients' ids."""
        self._stagings: WeakKeyDictionary[Handle, tuple[object, Staging]] = WeakKeyDictionary()
        """Inserters of handles, which keep temporary tables that are made after others; `_schema` when they were made."""
        self._schema = object()
        """Token of the tables' columns, replaced by every statement that may have changed a table."""
        self._endings: set[asyncio.Task[None]] = set()
        handle = database.handle()
        self._guard = StatementGuard(handle.query(_ENGINE_NAMES).body.decode().split())
        handle.close()

    def start(self, run: RunningStatement) -> None:
        """Run the request's statement as soon as a worker is free; the run's `done` reports errors."""
        assert run.request, "a run starts before its client leaves"
        self._workers[run.request.role].submit(self._work, run)

    def abandon(self, run: RunningStatement) -> None:
        """Cancel a run whose client has its answer or has disconnected, unless it changes something. Returns at once."""
        run.pipe.close_reading()
        if run.done.cancel():
            # It may stay in its worker's queue for long: drop its body, and close its files.
            run.pipe.close_writing()
            run.request = None
        elif not run.done.done():
            ending = asyncio.create_task(self._end(run))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    def close(self) -> None:
        """Cancel running statements, and close every session."""
        self._database.kill_queries()
        for workers in self._workers.values():
            workers.shutdown(cancel_futures=True)
        self._handles.close()

    async def _end(self, run: RunningStatement) -> None:
        # Repeatedly: a statement can be killed only once the database has started it, and where it leaves memory for that.
        while not run.done.done():
            with suppress(StoreError):
                await asyncio.to_thread(self._kill, run)
            await asyncio.sleep(_KILL_AGAIN_SECONDS)

    def _kill(self, run: RunningStatement) -> None:
        with run.lock:
            if run.handle and run.statement and run.statement.answers:
                self._database.kill(run.handle)

    def _work(self, run: RunningStatement) -> None:
        """Check and run the statement on a worker thread, since the time for both grows with the statement."""
        # From here on it can only be killed.
        if not run.done.set_running_or_notify_cancel():
            return
        assert run.request, "only a run that is cancelled has none"
        try:
            answer = self._check_and_run(run, run.request)
        # Not swallowed: the future passes it on.
        except BaseException as error:
            run.pipe.close_writing()
            run.done.set_exception(error)
        else:
            run.pipe.close_writing()
            run.done.set_result(answer)

    def _check_and_run(self, run: RunningStatement, request: QueryRequest) -> QueryAnswer:
        statement = read_statement(request.parameters, request.headers, request.body, request.files)
        self._guard.check(statement.sql, statement.parameters.values(), (table.structure for table in statement.tables))
        if request.role is TokenRole.READER:
            statement = replace(statement, settings=self._limits.settings(statement.settings))
        run.statement = statement
        if statement.rows is None and not (statement.answers and request.headers.get(SETTLED) == "1"):
            # Queries, and changes of tables, see all that was acknowledged before.
            self._spans.settle()
        with self._handles.borrow(statement, request.role) as handle, self._registered(run, handle, request.query_id):
            try:
                answer = self._run(run, handle, statement, request)
                self._arrivals.note_insert(statement.sql)
                return answer
            finally:
                if statement.rows is None and not statement.answers:
                    self._schema = object()
                    self._spans.recheck()

    def _run(self, run: RunningStatement, handle: Handle, statement: Statement, request: QueryRequest) -> QueryAnswer:
        _check_kind(handle, statement, request)
        if statement.rows is not None:
            # Our own stages insert small batches often: half of the cost is that of making a temporary table.
            if statement.session is None and _OF_STAGE.match(statement.sql):
                return self._staging(handle).insert(statement.sql, statement.format, statement.rows, keep_staging=True)
            return Staging(handle).insert(statement.sql, statement.format, statement.rows)
        if statement.first_word == "KILL":
            statement = replace(statement, sql=_TEXT.sub(self._database_id, statement.sql))
        clause = _named(find_answer_clause(statement.sql), request.query_id)
        if statement.answers and _is_single(handle, clause):
            try:
                return handle.write(clause, run.pipe.descriptor, statement.format, statement.parameters)
            except EngineRefusedError as error:
                # A statement that takes no such clause runs without it; for a broken one, the error is then about its own text.
                if error.code != _SYNTAX_ERROR or not run.pipe.is_untouched():
                    raise
        return handle.query(statement.sql, statement.format, statement.parameters)

    def _staging(self, handle: Handle) -> Staging:
        """Return the handle's inserter, without the temporary tables that no longer have their targets' columns."""
        schema = self._schema
        # By a proxy: a value that referred to its key would keep every handle that the pool has closed.
        since, staging = self._stagings.get(handle) or (schema, Staging(proxy(handle)))
        if since is not schema:
            staging.forget()
        self._stagings[handle] = schema, staging
        return staging

    @contextmanager
    def _registered(self, run: RunningStatement, handle: Handle, query_id: str) -> Generator[None]:
        """Register the run by its client's id, by which it can be killed, while the block runs."""
        if self._ids.setdefault(query_id, run) is not run:
            raise BadRequestError(216, f"Query with id = {query_id} is already running.", "QUERY_WITH_SAME_ID_IS_ALREADY_RUNNING")
        try:
            with run.lock:
                run.handle = handle.name
            yield
        finally:
            # Before the handle runs something else.
            with run.lock:
                run.handle = None
            del self._ids[query_id]

    def _database_id(self, text: re.Match[str]) -> str:
        """Return a text of a KILL statement, with the database's own id in place of a client's."""
        run = self._ids.get(text[1])
        name = run.handle if run else None
        query_id = self._database.query_id(name) if name else ""
        return f"'{query_id}'" if query_id else text[0]


def _check_kind(handle: Handle, statement: Statement, request: QueryRequest) -> None:
    """Raise unless the text is a single statement that its sender may run."""
    # On a session's handle `readonly` is not set.
    readonly = statement.settings.get("readonly", "0") if statement.session else "0"
    restricted = request.role is TokenRole.READER or request.safe or readonly != "0"
    if statement.rows is not None:
        if restricted:
            raise _read_only(request)
        return
    several = ";" in statement.sql and statement.first_word != "INSERT"
    if not (restricted or several):
        return
    kind = handle.kind(statement.sql)
    if several and (kind.statements > 1 or (restricted and not kind.statements)):
        raise BadRequestError(_SYNTAX_ERROR, "several statements at once, or one that cannot be read.", "SYNTAX_ERROR")
    # A text that the parser cannot read is refused later by the database, with a helpful message.
    if restricted and not kind.reads_only and (kind.statements or not statement.answers):
        if request.role is TokenRole.WRITER and readonly != "1" and statement.first_word in SESSION_WORDS:
            return
        raise _read_only(request)


def _read_only(request: QueryRequest) -> BadRequestError:
    if request.role is TokenRole.READER:
        why = "the token is for reading."
    elif request.safe:
        why = "method GET implies readonly; use POST to change something."
    else:
        why = "the request asks for it."
    return BadRequestError(164, f"Cannot execute query in readonly mode: {why}", "READONLY")


def _is_single(handle: Handle, clause: AnswerClause) -> bool:
    """Return whether text and clause form one statement, so that the clause does not follow a semicolon as one of its own."""
    return ";" not in clause.before or handle.kind(f"{clause.before}\nINTO OUTFILE '' {clause.after}").statements == 1


def _named(clause: AnswerClause, query_id: str) -> AnswerClause:
    """Return the statement with its client's id as a comment, which system.processes shows: the database assigns an id of its own."""
    if not _PLAIN_ID.fullmatch(query_id):
        return clause
    return AnswerClause(f"{clause.before}\n/* query_id: {query_id} */", clause.after, clause.format)
