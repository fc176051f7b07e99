"""Parser of requests to ClickHouse's HTTP interface.

Invariant: rows are never read as SQL, nor SQL as rows: only the head of an INSERT ... FORMAT determines where they begin.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from collector.encodings import TooLargeError
from collector.sql.answer_clause import find_answer_clause
from collector.sql.errors import BadRequestError
from collector.sql.external_data import ExternalTable, take_tables
from collector.sql.insert_head import HEAD, SKIP

NOT_SETTINGS = frozenset({
    "query", "database", "default_format", "session_id", "session_timeout", "session_check", "query_id",
    "user", "password", "compress", "decompress", "wait_end_of_query", "buffer_size",
    "client_protocol_version", "role", "quota_key", "send_progress_in_http_headers",
    "http_headers_progress_interval_ms", "enable_http_compression", "http_zlib_compression_level",
    # The answer to an insert means that it is committed.
    "async_insert", "wait_for_async_insert", "wait_for_async_insert_timeout", "async_insert_busy_timeout_ms",
    "async_insert_max_data_size",
    # Only a server's own HTTP interface looks at these; ours always cancels, and has no log that a comment could go to.
    "cancel_http_readonly_queries_on_client_close", "http_write_exception_in_output_format",
    "http_response_buffer_size", "http_wait_end_of_query", "log_comment", "log_queries",
    "add_http_cors_header",
})  # fmt: skip
"""URL parameters that are not settings of the database."""
DEFAULT_SESSION_SECONDS = 60.0
MAX_SESSION_SECONDS = 3600.0
"""Longest time for which an unused session is kept, in seconds, as in ClickHouse."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Matches a byte of a form's field that is no UTF-8."""
_INSERT_HEAD = re.compile(
    rf"(?P<head>{HEAD})(?<!\w)FORMAT\s+(?!VALUES\b)(?P<format>\w+)[ \t]*\r?\n?",
    re.IGNORECASE | re.DOTALL,
)
_FIRST_WORD = re.compile(rf"{SKIP}([(]|\w+)", re.DOTALL)
_HEAD_BYTES = 1 << 16
MAX_TEXT = 64 * 2**20
"""Most bytes of a statement's text, which is read several times; rows behind INSERT ... FORMAT are not text."""
_ANSWERING = frozenset({"SELECT", "WITH", "SHOW", "DESCRIBE", "DESC", "EXISTS", "EXPLAIN", "CHECK", "KILL", "VALUES", "FROM", "("})
SESSION_WORDS = frozenset({"SET", "USE"})
"""First words of statements that change nothing but their session."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement with its rows, settings, session, and the format of its answer."""

    sql: str
    """Text of the statement; of an insert with rows, the part before FORMAT."""
    rows: bytes | None
    """Rows to insert. None: the SQL is the whole statement."""
    format: str
    """Format of the rows, or of the answer."""
    database: str
    settings: Mapping[str, str]
    parameters: Mapping[str, str]
    session: str | None
    """Name of the session. None: the request has a session of its own."""
    session_seconds: float
    session_must_exist: bool
    tables: tuple[ExternalTable, ...] = ()
    """External tables, sent with the query and dropped after it."""

    @property
    def first_word(self) -> str:
        """Return the first word in capitals; empty when there is none."""
        match = _FIRST_WORD.match(self.sql)
        return match.group(1).upper() if match else ""

    @property
    def answers(self) -> bool:
        """Return whether it has a result, possibly an empty one."""
        return self.rows is None and self.first_word in _ANSWERING

    @property
    def leaves_traces(self) -> bool:
        """Return whether it changes the session itself, which therefore can't serve other requests."""
        return self.first_word in SESSION_WORDS or (not self.answers and "TEMPORARY" in self.sql.upper())


def read_statement(
    parameters: Mapping[str, str], headers: Mapping[str, str], body: bytes, files: Mapping[str, bytes] | None = None
) -> Statement:
    """Parse a request: an unpacked body, parameters of a URL or a form, and files of a form, which are tables that the statement may read.

    Raises:
        BadRequestError: the statement is empty, it, a parameter or the name of a file is not UTF-8, the name of a setting or the session's
            timeout is invalid, or a file has no structure.
        TooLargeError: the statement has more than MAX_TEXT bytes of text.
    """
    for key, value in (*parameters.items(), *((name, "") for name in files or {})):
        if key != "query" and _SURROGATE.search(key + value):
            raise BadRequestError(36, f"parameter {key!r} is not UTF-8.", "BAD_ARGUMENTS")
    tables, parameters = take_tables(files or {}, parameters)
    settings = {key: value for key, value in parameters.items() if key not in NOT_SETTINGS and not key.startswith("param_")}
    for key in settings:
        if not _NAME.fullmatch(key):
            raise BadRequestError(115, f"{key!r} is not the name of a setting.", "UNKNOWN_SETTING")
    sql, rows, given_format = _split(parameters.get("query", "").encode(errors="surrogateescape"), body)
    if not sql.strip():
        raise BadRequestError(62, "Empty query.", "SYNTAX_ERROR")
    session_seconds = _seconds(parameters.get("session_timeout", DEFAULT_SESSION_SECONDS))
    return Statement(
        sql=sql,
        rows=rows,
        format=given_format or parameters.get("default_format") or headers.get("X-ClickHouse-Format") or "TabSeparated",
        database=parameters.get("database") or headers.get("X-ClickHouse-Database") or "default",
        settings=settings,
        parameters={key.removeprefix("param_"): value for key, value in parameters.items() if key.startswith("param_")},
        session=parameters.get("session_id") or None,
        session_seconds=session_seconds,
        session_must_exist=parameters.get("session_check") == "1",
        tables=tables,
    )


def _split(query: bytes, body: bytes) -> tuple[str, bytes | None, str]:
    """Return SQL, rows and the named format. The statement is in the URL, in the body, or begins in the URL and ends in the body."""
    text, rest = (query, body) if query else (body, b"")
    # Only the head may be read as text: the rows behind it are often binary. latin-1 keeps the offsets: one character a byte.
    insert = _INSERT_HEAD.match(text[:_HEAD_BYTES].decode("latin-1"))
    if insert:
        return _decode(text[: insert.end("head")]), text[insert.end() :] + rest, insert["format"]
    if len(text) + len(rest) > MAX_TEXT:
        raise TooLargeError(f"the statement has more than {MAX_TEXT} bytes of text; send rows by INSERT ... FORMAT")
    sql = _decode(text + b"\n" + rest if rest else text)
    return sql, None, find_answer_clause(sql).format


def _seconds(session_timeout: str | float) -> float:
    try:
        seconds = float(session_timeout)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SESSION_SECONDS:
        message = f"session_timeout is {session_timeout!r:.100}. Give a number of seconds from 0 to {MAX_SESSION_SECONDS:g}."
        raise BadRequestError(374, message, "INVALID_SESSION_TIMEOUT")
    return seconds


def _decode(sql: bytes) -> str:
    try:
        return sql.decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(62, f"the statement is not UTF-8: {error}.", "SYNTAX_ERROR") from None
