"""ClickHouse's HTTP interface, the parts without an engine: requests, frames, encodings, the guard, the token."""

from __future__ import annotations

import gzip
import time
import zlib
from base64 import b64encode

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from collector.auth import Guardian
from collector.clickhouse_frames import frame, unframe
from collector.clickhouse_request import BadRequestError, Statement, read_statement
from collector.encodings import EncodingError, TooLargeError, compress, decompress
from collector.guard import ForbiddenError, StatementGuard


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
def test_a_request_is_taken_apart(query: str, body: bytes, expected: Statement) -> None:
    assert read_statement({"query": query}, {}, body) == expected


def test_parameters_settings_and_session_are_told_apart() -> None:
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
    ],
    ids=["letters", "names", "spaces", "formats", "comments", "end"],
)
def test_long_statements_are_read_in_linear_time(sql: str) -> None:
    begin = time.process_time()

    assert read_statement({"query": sql}, {}, b"") == statement(sql)
    # Linear takes milliseconds, quadratic many seconds, exponential for ever.
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(("parameters", "code"), [({"query": " "}, 62), ({"query": "SELECT 1", "a;DROP": "1"}, 115)])
def test_a_request_that_is_no_statement_has_a_code(parameters: dict[str, str], code: int) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_statement(parameters, {}, b"")
    assert caught.value.code == code


@given(st.binary(max_size=4096))
def test_frames_come_back(body: bytes) -> None:
    assert unframe(frame(body), limit=4096) == body


def test_broken_frames_are_refused() -> None:
    framed = bytearray(frame(b"spans" * 100))
    with pytest.raises(TooLargeError):
        unframe(bytes(framed), limit=499)
    with pytest.raises(EncodingError, match="checksum"):
        unframe(bytes(framed[:-1]), limit=1000)
    framed[-1] ^= 1
    with pytest.raises(EncodingError, match="checksum"):
        unframe(bytes(framed), limit=1000)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "lz4", "zstd"])
def test_encodings_unpack_within_a_limit(encoding: str) -> None:
    body = b"spans and logs " * 1000
    packed, name = compress(body, f"br, {encoding};q=1")

    assert name == encoding
    assert decompress(packed, encoding, len(body)) == body
    assert decompress(packed + packed, encoding, 2 * len(body)) == 2 * body
    with pytest.raises(TooLargeError):
        decompress(packed, encoding, len(body) - 1)
    with pytest.raises(EncodingError):
        decompress(b"\x01" + packed, encoding, len(body))


def test_raw_deflate_and_no_encoding_are_read() -> None:
    packer = zlib.compressobj(wbits=-15)

    assert decompress(packer.compress(b"body") + packer.flush(), "deflate", 10) == b"body"
    assert decompress(b"body", "identity", 10) == b"body"
    assert compress(b"body", "br") == (b"body", None)


def test_a_cut_or_unknown_body_is_refused() -> None:
    with pytest.raises(EncodingError, match="ends before its gzip stream does"):
        decompress(gzip.compress(b"body")[:-1], "gzip", 10)
    with pytest.raises(EncodingError, match="ends before its lz4 stream does"):
        decompress(lz4.frame.compress(b"body")[:-1], "lz4", 10)
    with pytest.raises(EncodingError, match="Content-Encoding 'br' is not supported; use one of gzip, deflate, lz4, zstd"):
        decompress(b"body", "br", 10)


def test_a_bomb_stays_small() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    with pytest.raises(TooLargeError):
        decompress(bomb, "zstd", 1 << 16)


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
    ],
)
def test_statements_that_reach_beyond_the_store_are_refused(sql: str) -> None:
    guard = StatementGuard(["url", "remoteSecure", "numbers", "SQLite", "QueryRunner", "Memory", "view"])

    with pytest.raises(ForbiddenError):
        guard.check(sql)


@pytest.mark.parametrize(
    "sql",
    [
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
def test_other_statements_pass(sql: str) -> None:
    StatementGuard(["url", "remoteSecure", "numbers", "SQLite", "QueryRunner", "Memory", "view", "Alias", "ReplacingMergeTree"]).check(sql)


@pytest.mark.parametrize(
    "sql",
    ["engine" + " " * 500_000, '"' + "\\" * 500_000, "'\"" + "a\\n" * 200_000, "file" + " " * 500_000, "`" * 500_000],
    ids=["engine", "backslashes", "text", "spaces", "quotes"],
)
def test_the_guard_takes_linear_time(sql: str) -> None:
    begin = time.process_time()

    StatementGuard(["url"]).check(sql)
    assert time.process_time() - begin < 2


def test_the_token_is_taken_in_every_form() -> None:
    guardian = Guardian("secret")
    basic = b64encode(b"default:secret").decode()

    assert guardian.admits_bearer("Bearer secret")
    assert guardian.admits_clickhouse({"X-ClickHouse-Key": "secret"}, {})
    assert guardian.admits_clickhouse({"Authorization": f"Basic {basic}"}, {})
    assert guardian.admits_clickhouse({"Authorization": "bearer secret"}, {})
    assert guardian.admits_clickhouse({}, {"password": "secret"})
    assert Guardian(None).admits_bearer("")


def test_a_wrong_or_missing_token_is_refused() -> None:
    guardian = Guardian("secret")
    refused = [
        guardian.admits_bearer(""),
        guardian.admits_bearer("Bearer other"),
        guardian.admits_bearer("secret"),
        guardian.admits_clickhouse({}, {}),
        guardian.admits_clickhouse({"Authorization": "Basic !"}, {}),
        guardian.admits_clickhouse({"X-ClickHouse-Key": "other"}, {"password": "other"}),
    ]
    assert refused == [False] * 6
