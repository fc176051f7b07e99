"""ClickHouse's HTTP interface, the parts without an engine: requests, frames, encodings, the guard, the token."""

from __future__ import annotations

import gzip
import time
import zlib
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from random import Random

import lz4.frame
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from collector.auth import Guardian, TokenRole
from collector.encodings import SUPPORTED, EncodingError, Packer, TooLargeError, accepted_encoding, decompress
from collector.sql.answer_clause import AnswerClause, find_answer_clause
from collector.sql.errors import BadRequestError
from collector.sql.external_data import ExternalTable
from collector.sql.frames import frame, frame_plainly, unframe
from collector.sql.guard import ForbiddenError, StatementGuard
from collector.sql.readers import ReaderLimits
from collector.sql.request import Statement, read_statement
from spangrad.http.tokens import agent_token


def statement(sql: str, rows: bytes | None = None, form: str = "TabSeparated") -> Statement:
    return Statement(sql, rows, form, "default", {}, {}, None, 60.0, False)


@pytest.mark.parametrize(
    ("query", "body", "expected"),
    [
        ("", b"SELECT 1", statement("SELECT 1")),
        ("SELECT", b"1 FORMAT JSON", statement("SELECT\n1 FORMAT JSON", form="JSON")),
        ("", b"SELECT 1 format Native ;", statement("SELECT 1 format Native ;", form="Native")),
        ("INSERT INTO t FORMAT Native", b"\xff\x00", statement("INSERT INTO t ", b"\xff\x00", "Native")),
        ("", b"INSERT INTO `d`.`t` (`a)`, b) FORMAT Native\n\xff\x00", statement("INSERT INTO `d`.`t` (`a)`, b) ", b"\xff\x00", "Native")),
        ("", b"INSERT INTO `\xc3\xa4`.t FORMAT CSV\n1", statement("INSERT INTO `ä`.t ", b"1", "CSV")),
        ("", b"INSERT INTO t (format) FORMAT CSV\n1", statement("INSERT INTO t (format) ", b"1", "CSV")),
        ("", b"-- note\nINSERT INTO t SETTINGS a = 1 FORMAT CSV 1", statement("-- note\nINSERT INTO t SETTINGS a = 1 ", b"1", "CSV")),
        ("INSERT INTO t VALUES", b"(1)", statement("INSERT INTO t VALUES\n(1)")),
        ("", b"INSERT INTO t FORMAT Values (1)", statement("INSERT INTO t FORMAT Values (1)")),
        ("", b"INSERT INTO t SELECT ' FORMAT CSV '", statement("INSERT INTO t SELECT ' FORMAT CSV '")),
    ],
)
def test_read_statement_splits_query_body_and_rows(query: str, body: bytes, expected: Statement) -> None:
    assert read_statement({"query": query}, {}, body) == expected


def test_read_statement_separates_parameters_settings_and_session() -> None:
    parameters = {
        "query": "SELECT {x:String}",
        "param_x": "1",
        "max_threads": "2",
        "async_insert": "1",
        "database": "otel",
        "session_id": "s",
        "session_timeout": "5",
        "session_check": "1",
        "default_format": "JSON",
        "query_id": "q",
    }

    assert read_statement(parameters, {}, b"") == Statement(
        "SELECT {x:String}", None, "JSON", "otel", {"max_threads": "2"}, {"x": "1"}, "s", 5.0, True
    )


@pytest.mark.parametrize(
    "sql",
    [
        f"INSERT INTO t ({'c' * 60_000}) VALUES (1)",
        f"INSERT INTO t ({'`c`, ' * 10_000}c) SELECT 1",
        f"INSERT INTO t{' ' * 60_000}VALUES (1)",
        f"INSERT INTO t SETTINGS {'FORMATS ' * 7_000}",
        "/**/" * 10_000 + "-- \n" * 4_000 + "SELECT 1",
        f"SELECT 1 FORMAT JSON{' ' * 3_000_000}x",
        "'" + "\\'" * 500_000 + "-- FORMAT x",
        "/*" * 500_000 + "-- FORMAT x",
    ],
    ids=["letters", "names", "spaces", "formats", "comments", "end", "quotes", "open comments"],
)
def test_read_statement_of_long_text_takes_linear_time(sql: str) -> None:
    begin = time.thread_time()

    assert read_statement({"query": sql}, {}, b"") == statement(sql)
    # Linear takes milliseconds, quadratic many seconds, exponential for ever.
    assert time.thread_time() - begin < 2


def test_read_statement_form_files_become_external_tables() -> None:
    parameters = {
        "query": "SELECT 1",
        "e_structure": "a UInt8",
        "e_format": "CSV",
        "f_types": "Tuple(UInt8, String), UInt8",
        "max_threads": "1",
    }

    read = read_statement(parameters, {}, b"", {"e": b"1", "f": b"x"})

    assert read.tables == (
        ExternalTable("e", "a UInt8", "CSV", b"1"),
        ExternalTable("f", "_1 Tuple(UInt8, String), _2 UInt8", "TabSeparated", b"x"),
    )
    assert read.settings == {"max_threads": "1"}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 1", AnswerClause("SELECT 1", "", "")),
        ("SELECT 1 ; ", AnswerClause("SELECT 1", "", "")),
        ("SELECT 1\nformat  CSV ;", AnswerClause("SELECT 1\n", "format  CSV", "CSV")),
        (
            "SELECT 1 FORMAT CSV SETTINGS a = 1, b='x\\'y'",
            AnswerClause("SELECT 1 ", "FORMAT CSV SETTINGS a = 1, b='x\\'y'", "CSV"),
        ),
        ("SELECT 1 -- FORMAT CSV", AnswerClause("SELECT 1 -- FORMAT CSV", "", "")),
        ("SELECT '--' FORMAT CSV", AnswerClause("SELECT '--' ", "FORMAT CSV", "CSV")),
        ("SELECT 'FORMAT CSV'", AnswerClause("SELECT 'FORMAT CSV'", "", "")),
        ("SELECT 1 /* FORMAT CSV */", AnswerClause("SELECT 1 /* FORMAT CSV */", "", "")),
        ("SELECT 1 AS format ORDER BY format DESC", AnswerClause("SELECT 1 AS format ORDER BY format DESC", "", "")),
    ],
)
def test_find_answer_clause_finds_format_and_settings(sql: str, expected: AnswerClause) -> None:
    assert find_answer_clause(sql) == expected


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        ({"query": " "}, 62),
        ({"query": "SELECT 1", "a;DROP": "1"}, 115),
        *(({"query": "SELECT 1", "session_timeout": text}, 374) for text in ("soon", "nan", "inf", "1e300", "3601", "-1")),
    ],
)
def test_read_statement_invalid_request_raises_with_code(parameters: dict[str, str], code: int) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_statement(parameters, {}, b"")
    assert caught.value.code == code


@given(st.binary(max_size=4096))
def test_unframe_of_framed_body_returns_it(body: bytes) -> None:
    assert unframe(frame(body), limit=4096) == body
    assert unframe(frame_plainly(body), limit=4096) == body


def test_unframe_broken_or_oversized_frame_raises() -> None:
    framed = bytearray(frame(b"spans" * 100))
    with pytest.raises(TooLargeError):
        unframe(bytes(framed), limit=499)
    with pytest.raises(EncodingError, match="checksum"):
        unframe(bytes(framed[:-1]), limit=1000)
    framed[-1] ^= 1
    with pytest.raises(EncodingError, match="checksum"):
        unframe(bytes(framed), limit=1000)


@pytest.mark.parametrize("encoding", SUPPORTED)
def test_decompress_in_each_encoding_is_bounded(encoding: str) -> None:
    body = b"spans and logs " * 1000
    packer = Packer(encoding)
    packed = packer.pack(body[:5]) + packer.pack(body[5:]) + packer.finish()

    assert decompress(packed, encoding, len(body)) == body
    assert decompress(Packer(encoding).finish(), encoding, 0) == decompress(b"", encoding, 0) == b""
    with pytest.raises(TooLargeError):
        decompress(packed, encoding, len(body) - 1)
    with pytest.raises(EncodingError):
        decompress(b"\x01" + packed, encoding, len(body))
    assert decompress(packed + packed, encoding, 2 * len(body)) == 2 * body


def test_decompress_raw_deflate_and_identity_are_read() -> None:
    packer = zlib.compressobj(wbits=-15)

    assert decompress(packer.compress(b"body") + packer.flush(), "deflate", 10) == b"body"
    assert decompress(b"body", "identity", 10) == b"body"


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", partial(gzip.compress, compresslevel=0)),
        ("deflate", partial(zlib.compress, level=0)),
        ("lz4", lz4.frame.compress),
        ("zstd", zstd.compress),
    ],
)
def test_decompress_many_small_streams_takes_linear_time(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    large = Random(0).randbytes(1 << 25)
    body = pack(b"a") * 5000 + pack(large) + pack(b"z") * 5000
    begin = time.thread_time()

    assert decompress(body, encoding, 1 << 26) == b"a" * 5000 + large + b"z" * 5000
    # Linear takes a third of a second; to copy what follows for each stream, half a minute.
    assert time.thread_time() - begin < 3


@pytest.mark.parametrize(
    ("accepted", "name"),
    [("br, gzip", "gzip"), ("snappy,ZSTD;q=1", "zstd"), ("gzip;q=0, lz4", "lz4"), ("*", None), ("", None), ("gzip; q=0.0", None)],
)
def test_accepted_encoding_takes_first_supported(accepted: str, name: str | None) -> None:
    assert accepted_encoding(accepted) == name


def test_decompress_cut_or_unknown_encoding_raises() -> None:
    with pytest.raises(EncodingError, match="ends before its gzip stream does"):
        decompress(gzip.compress(b"body")[:-1], "gzip", 10)
    with pytest.raises(EncodingError, match="ends before its lz4 stream does"):
        decompress(lz4.frame.compress(b"body")[:-1], "lz4", 10)
    with pytest.raises(EncodingError, match="Content-Encoding 'snappy' is not supported; use one of gzip, deflate, lz4, zstd"):
        decompress(b"body", "snappy", 10)


def test_read_statement_text_is_bounded_and_rows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collector.sql.request.MAX_TEXT", 20)
    assert read_statement({}, {}, b"SELECT 1" + b" " * 12).sql.strip() == "SELECT 1"
    assert read_statement({"query": "INSERT INTO t FORMAT TSV"}, {}, bytes(100)).rows == bytes(100)
    for query, body in (("SELECT 1", b" " * 13), ("", b" " * 21), ("INSERT INTO t VALUES", b" (1)")):
        with pytest.raises(TooLargeError, match=r"more than 20 bytes of text; send rows by INSERT \.\.\. FORMAT"):
            read_statement({"query": query}, {}, body)


def test_decompress_bomb_raises_within_limit() -> None:
    for encoding, bomb in (("zstd", zstd.compress(bytes(1 << 28))), ("gzip", gzip.compress(bytes(1 << 26)))):
        with pytest.raises(TooLargeError):
            decompress(bomb, encoding, 1 << 16)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT file('/etc/passwd')",
        "SELECT `file` ('/etc/passwd')",
        "SELECT \"file\"\n('/etc/passwd')",
        "SELECT FILE/* a /* b */ */('/etc/passwd')",
        "SELECT file -- comment\n('/etc/passwd')",
        "SELECT `fi\\x6ce`('/etc/passwd')",
        "SELECT file\u200b('/etc/passwd')",
        "SELECT * FROM url('http://localhost')",
        "SELECT * FROM remoteSecure('host', t)",
        "SELECT * FROM Python(settings)",
        "SELECT * FROM eval('SELECT 1')",
        "CREATE DATABASE d ENGINE = SQLite('/tmp/d')",
        "CREATE TABLE t (x String) ENGINE = MergeTree ORDER BY x SETTINGS disk = disk(type = 'local', path = '/')",
        "SELECT 1 INTO OUTFILE '/tmp/x'",
        "INSERT INTO t FROM INFILE '/etc/passwd' FORMAT CSV",
        "SELECT 1 INTO/*x*/OUTFILE '/tmp/x'",
        "INSERT INTO t FROM --x\nINFILE '/etc/passwd' FORMAT CSV",
        f"SELECT file{' ' * 100_000}('/etc/passwd')",
        f"SELECT {' ' * (2**16 - 10)}file('/etc/passwd')",
        f"SELECT `fi{chr(92) + 'N'}le`('/etc/passwd')",
        "CREATE TABLE t (x String) ENGINE = SQLite('/tmp/d', 't')",
        "CREATE TABLE t (query String) ENGINE = QueryRunner",
        "CREATE TABLE t (query String) ENGINE `QueryRunner`",
        "CREATE TABLE t (query String) ENGINE = `\\x51ueryRunner`",
        "CREATE TABLE t (query String) ENGINE/**/= QueryRunner",
        "SELECT file\u2060('/etc/passwd')",
        "SELECT arrayMap(file, ['/etc/passwd'])",
        "SELECT arrayMap(`file` , ['/etc/passwd'])",
        "SELECT arrayMap(file/**/, ['/etc/passwd'])",
        "SELECT * APPLY(file) FROM (SELECT '/etc/passwd' AS p)",
        "SELECT COLUMNS('p') APPLY file FROM (SELECT '/etc/passwd' AS p)",
        "SELECT * APPLY(\"fi\\x6ce\") FROM (SELECT '/etc/passwd' AS p)",
        "SELECT arrayMap(\u201cfile\u201d, ['/etc/passwd'])",
        "SELECT arrayMap(\u201cfi\\x6ce\u201d, ['/etc/passwd'])",
    ],
)
def test_statement_guard_refuses_statements_that_reach_outside_store(sql: str) -> None:
    guard = StatementGuard(["url", "remoteSecure", "numbers", "SQLite", "QueryRunner", "Memory", "view"])

    with pytest.raises(ForbiddenError):
        guard.check(sql)


def test_statement_guard_refuses_parameters_and_structures_that_reach_outside() -> None:
    guard = StatementGuard(["url", "numbers"])
    for value in ("file", "FILE", "fi\\x6ce", "a.url"):
        with pytest.raises(ForbiddenError, match="Identifier"):
            guard.check("SELECT arrayMap({f:Identifier}, ['/etc/passwd'])", [value])
    guard.check("SELECT {t:Identifier} FROM t WHERE x = {x:String}", ["trace_id", "numbers"])
    guard.check("SELECT * FROM t WHERE x = {x:String}", ["file('/etc/passwd')", "a\\b"])
    with pytest.raises(ForbiddenError):
        guard.check("SELECT * FROM t", structures=["a UInt8", "a UInt8 DEFAULT file('/etc/passwd')"])
    guard.check("SELECT * FROM t", structures=["file String DEFAULT upper('x')"])


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT arrayExists(x -> x LIKE '%file%' OR x = 'a file', mapValues(SpanAttributes)) AS found FROM otel.otel_traces",
        "SELECT url, file FROM otel.otel_traces WHERE SpanName = 'file' AND url IN ('a', 'b')",
        "SELECT * FROM numbers(10)",
        "CREATE TABLE t (file String, url String) ENGINE = Memory",
        "SELECT profile(1), my_url(2), urlHash(x)",
        "SELECT 'C:\\\\dir' AS path, \"a\\\\b\"",
        "SELECT * FROM view(SELECT 1)",
        "CREATE TABLE t (a UInt8, b UInt8 ALIAS (a + 1)) ENGINE = ReplacingMergeTree(a) ORDER BY a",
        "SELECT engine, count() FROM system.tables WHERE engine = 'QueryRunner' GROUP BY engine",
        "INSERT INTO t VALUES ('say \"a\\nb (c)\"')",
        f"SELECT '{' ' * (2**16 - 8 + 248)}outfiles'",
    ],
)
def test_statement_guard_passes_other_statements(sql: str) -> None:
    StatementGuard(["url", "remoteSecure", "numbers", "SQLite", "QueryRunner", "Memory", "view", "Alias", "ReplacingMergeTree"]).check(sql)


@pytest.mark.parametrize(
    "sql",
    ["engine" + " " * 500_000, '"' + "\\" * 500_000, "'\"" + "a\\n" * 200_000, "file" + " " * 500_000, "`" * 500_000],
    ids=["engine", "backslashes", "text", "spaces", "quotes"],
)
def test_statement_guard_takes_linear_time(sql: str) -> None:
    begin = time.thread_time()

    StatementGuard(["url"]).check(sql)
    assert time.thread_time() - begin < 2


def test_guardian_accepts_token_in_every_form() -> None:
    guardian = Guardian("secret", "eyes")

    for token, role in (("secret", TokenRole.WRITER), ("eyes", TokenRole.READER)):
        basic = b64encode(f"default:{token}".encode()).decode()
        assert guardian.clickhouse_role({"X-ClickHouse-Key": token}, {}) is role
        assert guardian.clickhouse_role({"Authorization": f"Basic {basic}"}, {}) is role
        assert guardian.clickhouse_role({"Authorization": f"bearer {token}"}, {}) is role
        assert guardian.clickhouse_role({}, {"password": token}) is role
        assert guardian.admits_bearer(f"Bearer {token}") is (role is TokenRole.WRITER)


def test_guardian_lets_agents_send_spans_and_nothing_else() -> None:
    guardian, shown = Guardian("secret", "eyes"), agent_token("secret")

    assert guardian.admits_bearer(f"Bearer {shown}")
    assert guardian.clickhouse_role({"Authorization": f"Bearer {shown}"}, {}) is None
    assert not guardian.admits_bearer(f"Bearer {agent_token('eyes')}")


def test_guardian_without_token_admits_all_but_readers_as_writer() -> None:
    assert Guardian(None).clickhouse_role({}, {"password": "x"}) is TokenRole.WRITER
    assert Guardian(None).admits_bearer("")
    assert Guardian(None, "eyes").clickhouse_role({}, {}) is TokenRole.WRITER
    assert Guardian(None, "eyes").clickhouse_role({}, {"password": "eyes"}) is TokenRole.READER
    assert not Guardian(None, "eyes").admits_bearer("Bearer eyes")


def test_guardian_wrong_or_missing_token_is_refused() -> None:
    guardian = Guardian("secret", "eyes")
    shown = [
        ({}, {}),
        ({"Authorization": "Basic !"}, {}),
        ({"Authorization": "Basic ä"}, {}),
        ({"Authorization": "secret"}, {}),
        ({"Authorization": f"Basic {b64encode(bytes([58, 255])).decode()}"}, {}),
        ({"X-ClickHouse-Key": "other"}, {"password": "other"}),
    ]

    assert [guardian.clickhouse_role(headers, parameters) for headers, parameters in shown] == [None] * 6
    assert [guardian.admits_bearer(shown) for shown in ("", "Bearer other", "secret")] == [False] * 3


def test_reader_limits_allow_narrower_limits_and_format_settings() -> None:
    limits = ReaderLimits(max_rows=100, max_seconds=10)
    held = {"max_result_rows": "100", "max_execution_time": "10", "result_overflow_mode": "throw", "timeout_overflow_mode": "throw"}

    assert limits.settings({}) == held
    assert limits.settings({"max_result_rows": "5", "max_execution_time": "0.5"}) == {
        **held,
        "max_result_rows": "5",
        "max_execution_time": "0.5",
    }
    for wider in ("0", "101", "1e9", "-1", "nan", "inf", "all"):
        assert limits.settings({"max_result_rows": wider}) == held
    assert limits.settings({"output_format_json_quote_64bit_integers": "1"}) == {**held, "output_format_json_quote_64bit_integers": "1"}


@pytest.mark.parametrize("setting", ["readonly", "profile", "max_memory_usage", "result_overflow_mode", "dialect", "max_untracked_memory"])
def test_reader_limits_refuse_other_settings(setting: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ReaderLimits(100, 10).settings({setting: "1"})
    assert caught.value.code == 164
