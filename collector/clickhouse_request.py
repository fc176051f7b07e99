"""A request to ClickHouse's HTTP interface, taken apart.

In: URL parameters, headers and an unpacked body. Out: a `Statement`: the SQL, the rows that came with it, and how to run and
answer it. Invariant: rows are never read as SQL, nor SQL as rows: only the head of an INSERT ... FORMAT says where they begin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from collector.insert_head import HEAD, SKIP

NOT_SETTINGS = frozenset(
    {
        *("query", "database", "default_format", "session_id", "session_timeout", "session_check", "query_id", "user", "password"),
        *("compress", "decompress", "wait_end_of_query", "buffer_size", "client_protocol_version", "role", "quota_key"),
        *("send_progress_in_http_headers", "http_headers_progress_interval_ms", "enable_http_compression", "http_zlib_compression_level"),
        # The answer to an insert means that it is committed.
        *(
            "async_insert",
            "wait_for_async_insert",
            "wait_for_async_insert_timeout",
            "async_insert_busy_timeout_ms",
            "async_insert_max_data_size",
        ),
    }
)
"""URL parameters that are not settings of the engine."""
DEFAULT_SESSION_SECONDS = 60.0

_NAME = re.compile(r"[A-Za-z_]\w*")
_INSERT_HEAD = re.compile(
    rf"(?P<head>{HEAD})(?<!\w)FORMAT\s+(?!VALUES\b)(?P<format>\w+)[ \t]*\r?\n?",
    re.IGNORECASE | re.DOTALL,
)
_LAST_FORMAT = re.compile(r"\bFORMAT\s++(\w++)\s*+;?\s*+\Z", re.IGNORECASE)
_FIRST_WORD = re.compile(rf"{SKIP}([(]|\w+)", re.DOTALL)
_HEAD_BYTES = 1 << 16
_TAIL = 1 << 12
_ANSWERING = frozenset({"SELECT", "WITH", "SHOW", "DESCRIBE", "DESC", "EXISTS", "EXPLAIN", "CHECK", "KILL", "VALUES", "FROM", "("})
_LASTING = frozenset({"SET", "USE"})


class BadRequestError(ValueError):
    """A request that is no statement; `code` is ClickHouse's."""

    def __init__(self, message: str, code: int = 36) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Statement:
    """What to run, where, and how to answer."""

    sql: str
    """Of an insert with rows: what stands before FORMAT."""
    rows: bytes | None
    """Rows to insert. None: the SQL is the whole statement."""
    format: str
    """Of the rows, or of the answer."""
    database: str
    settings: Mapping[str, str]
    parameters: Mapping[str, str]
    session: str | None
    """None: a session of the request's own."""
    session_seconds: float
    session_must_exist: bool

    @property
    def answers(self) -> bool:
        """Whether it has a result, if an empty one."""
        return self.rows is None and _first_word(self.sql) in _ANSWERING

    @property
    def leaves_traces(self) -> bool:
        """Whether it changes the session itself, which therefore can't serve others."""
        return _first_word(self.sql) in _LASTING or "TEMPORARY" in self.sql[:200].upper()


def read_statement(parameters: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Statement:
    """Take a request apart.

    Args:
        parameters: of the URL, or of the URL and a form.
        headers: of the request; names in any case.
        body: unpacked.

    Raises:
        BadRequestError: the statement is empty or not UTF-8, or a setting's name is none.
    """
    settings = {key: value for key, value in parameters.items() if key not in NOT_SETTINGS and not key.startswith("param_")}
    for key in settings:
        if not _NAME.fullmatch(key):
            raise BadRequestError(f"Code: 115. DB::Exception: {key!r} is not the name of a setting. (UNKNOWN_SETTING)", 115)
    sql, rows, given_format = _split(parameters.get("query", "").encode(errors="surrogateescape"), body)
    if not sql.strip():
        raise BadRequestError("Code: 62. DB::Exception: Empty query. (SYNTAX_ERROR)", 62)
    try:
        session_seconds = float(parameters.get("session_timeout", DEFAULT_SESSION_SECONDS))
    except ValueError:
        raise BadRequestError("Code: 374. DB::Exception: session_timeout is not a number. (INVALID_SESSION_TIMEOUT)", 374) from None
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
    )


def _split(query: bytes, body: bytes) -> tuple[str, bytes | None, str]:
    """SQL, rows and the named format. The statement stands in the URL, in the body, or begins there and ends here."""
    text, rest = (query, body) if query else (body, b"")
    # Only the head may be read as text: the rows behind it are often binary. One character a byte keeps the places.
    insert = _INSERT_HEAD.match(text[:_HEAD_BYTES].decode("latin-1"))
    if insert:
        return _decode(text[: insert.end("head")]), text[insert.end() :] + rest, insert["format"]
    sql = _decode(text + b"\n" + rest if rest else text)
    # Only the end is searched: a statement may be as long as the rows in it.
    named = _LAST_FORMAT.search(sql[-_TAIL:])
    return sql, None, named.group(1) if named else ""


def _decode(sql: bytes) -> str:
    try:
        return sql.decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"Code: 62. DB::Exception: the statement is not UTF-8: {error}. (SYNTAX_ERROR)", 62) from None


def _first_word(sql: str) -> str:
    found = _FIRST_WORD.match(sql)
    return found.group(1).upper() if found else ""
