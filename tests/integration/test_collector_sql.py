"""SQL over HTTP while it runs: answers that stream, fail, are left or killed, with the real store and raw requests."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from clickhouse_connect.driver.client import Client

from collector.encodings import SUPPORTED, decompress
from collector.sql.frames import unframe
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.servers import ask, begin, form, running_store, store_settings

ENDLESS = "SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1"
LARGE = "SELECT number, repeat('x', 100) FROM numbers(20000000)"
FAILING = "SELECT number, throwIf(number = 5000000, 'half way') FROM numbers(10000000)"


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for something to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def client(store: StoreSettings) -> Iterator[Client]:
    client = connect(store)
    yield client
    client.close()


def running(client: Client, query_id: str) -> list[str]:
    """The engine's ids of the statements that a client named so."""
    asked = "SELECT query_id FROM system.processes WHERE query LIKE {part:String} AND query_id != queryID()"
    return [row[0] for row in client.query(asked, parameters={"part": f"%query_id: {query_id} %"}).result_rows]


# --- answers ---


def test_sql_small_answer_has_body_and_summary_headers(store: StoreSettings) -> None:
    reply = ask(store, "SELECT number FROM numbers(3) FORMAT CSV", query_id="small-1")

    assert (reply.status, reply.body) == (200, b"0\n1\n2\n")
    headers = {name: reply.headers[name] for name in ("X-ClickHouse-Query-Id", "X-ClickHouse-Format", "X-ClickHouse-Server-Display-Name")}
    assert headers == {
        "X-ClickHouse-Query-Id": "small-1",
        "X-ClickHouse-Format": "CSV",
        "X-ClickHouse-Server-Display-Name": "spangrad",
    }
    assert (reply.headers["Content-Length"], reply.headers["X-ClickHouse-Timezone"] != "") == ("6", True)
    summary = json.loads(reply.headers["X-ClickHouse-Summary"])
    assert (summary["read_rows"], int(summary["elapsed_ns"]) > 0) == ("3", True)


@pytest.mark.parametrize("form", ["TabSeparated", "CSVWithNames", "JSON", "JSONEachRow", "Native", "RowBinaryWithNamesAndTypes", "Parquet"])
@pytest.mark.parametrize("rows", [10, 200_000])
def test_sql_answer_in_each_format_is_whole_document_at_any_size(store: StoreSettings, client: Client, form: str, rows: int) -> None:
    body = ask(store, f"SELECT number AS n, toString(number) AS s FROM numbers({rows}) FORMAT {form}").body

    table = f"read_back_{form}_{rows}"
    client.command(f"CREATE TABLE {table} (n UInt64, s String) ORDER BY n")
    if form == "JSON":
        assert json.loads(body)["rows"] == rows
    else:
        client.raw_insert(table, None, body, fmt=form)
        assert client.query(f"SELECT count(), sum(n), sum(toUInt64(s)) FROM {table}").result_rows == [
            (rows, sum(range(rows)), sum(range(rows)))
        ]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "SELECT 1;",
        "SELECT 1 -- FORMAT JSON",
        "SELECT 1 FORMAT TSV",
        "SELECT 1 FORMAT TSV SETTINGS max_threads = 1",
        "SELECT 1 SETTINGS max_threads = 1 FORMAT TSV;",
        "(SELECT 1)",
        "WITH 1 AS x SELECT x",
        "SELECT 1 UNION DISTINCT SELECT 1",
        "SELECT '-- it;s' = '' OR 1 FORMAT TSV",
        "EXISTS TABLE system.one",
        "SELECT 1 /* FORMAT JSON */",
        "SELECT toUInt8(count()) AS format FROM numbers(1) GROUP BY 'x' ORDER BY format DESC",
    ],
)
def test_sql_statement_with_format_clause_anywhere_is_answered(store: StoreSettings, sql: str) -> None:
    assert (ask(store, sql).status, ask(store, sql).body) == (200, b"1\n")


def test_sql_semicolon_in_text_still_streams(store: StoreSettings) -> None:
    reply = ask(store, "SELECT number, 'a;b' FROM numbers(300000); -- done")
    streamed = ask(store, "SELECT number, 'a;b' FROM numbers(300000);")

    assert ("X-ClickHouse-Exception-Tag" in streamed.headers, streamed.body == reply.body, len(reply.body)) == (True, True, 3_188_890)


def test_sql_several_statements_are_refused(store: StoreSettings) -> None:
    assert [ask(store, sql).code for sql in ("SELECT 1; SELECT 2", "DROP TABLE a; DROP TABLE b")] == [62, 62]


def test_sql_totals_and_empty_answers_are_whole(store: StoreSettings) -> None:
    totals = json.loads(ask(store, "SELECT number % 2 AS k, sum(number) AS s FROM numbers(4) GROUP BY k WITH TOTALS FORMAT JSON").body)
    assert totals["totals"] == {"k": 0, "s": 6}
    assert ask(store, "SELECT 1 AS a LIMIT 0 FORMAT CSVWithNames").body == b'"a"\n'
    assert ask(store, "SELECT 1 FORMAT Null").body == b""


@pytest.mark.parametrize("encoding", SUPPORTED)
def test_sql_large_answers_stream_in_every_encoding(store: StoreSettings, encoding: str) -> None:
    sql = "SELECT number FROM numbers(300000)"
    reply = ask(store, sql, headers={"Accept-Encoding": encoding}, enable_http_compression=1)

    assert (reply.headers["Content-Encoding"], reply.headers["Transfer-Encoding"]) == (encoding, "chunked")
    assert decompress(reply.body, encoding, 10**7) == b"".join(b"%d\n" % number for number in range(300_000))


def test_sql_large_answers_stream_in_native_frames(store: StoreSettings) -> None:
    reply = ask(store, "SELECT number FROM numbers(300000)", compress=1)

    assert unframe(reply.body, 10**7) == b"".join(b"%d\n" % number for number in range(300_000))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["identity", "gzip", "zstd", "lz4"])
def test_sql_answer_of_2_gigabytes_streams_in_bounded_memory(tmp_path: Path, encoding: str) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "log") as child:
        process = psutil.Process(child.process.pid)
        ask(settings, "SELECT number FROM numbers(1000000)", headers={"Accept-Encoding": encoding}, enable_http_compression=1)
        before, most = process.memory_info().rss, 0
        connection = http.client.HTTPConnection("127.0.0.1", settings.clickhouse_port)
        connection.request("POST", "/?enable_http_compression=1", LARGE, {"Accept-Encoding": encoding})
        answer = connection.getresponse()
        received = 0
        while piece := answer.read(1 << 22):
            received += len(piece)
            most = max(most, process.memory_info().rss)
        connection.close()

    assert received == 2_188_888_890 or encoding != "identity"
    assert most - before < 200 * 2**20


def test_sql_client_that_reads_nothing_applies_backpressure_to_database(store: StoreSettings, client: Client) -> None:
    with begin(store, LARGE, query_id="slow-reader") as connection:
        connection.recv(100)

        def read() -> list[tuple[int, int]]:
            asked = "SELECT read_rows, memory_usage FROM system.processes WHERE query LIKE '%query_id: slow-reader %'"
            rows = client.query(f"{asked} AND query_id != queryID()").result_rows
            return [(int(row[0]), int(row[1])) for row in rows]

        until(lambda: len(read()) == 1 and read()[0] == read()[0])
        rows, memory = read()[0]
        assert rows < 2_000_000
        assert memory < 200 * 2**20
    until(lambda: not running(client, "slow-reader"))


def test_sql_wait_end_of_query_answers_whole_or_an_error(store: StoreSettings) -> None:
    large = ask(store, "SELECT number FROM numbers(3000000)", wait_end_of_query=1)
    failed = ask(store, FAILING, wait_end_of_query=1)

    assert (large.status, len(large.body), json.loads(large.headers["X-ClickHouse-Summary"])["read_rows"]) == (200, 22_888_890, "3000000")
    assert (failed.status, failed.code, b"half way" in failed.body) == (500, 395, True)
    assert len(failed.body) < 1000


def test_sql_buffer_size_delays_answer_up_to_its_size(store: StoreSettings) -> None:
    replies = [ask(store, "SELECT number FROM numbers(600000)", buffer_size=size) for size in (0, 8_000_000)]

    assert ["X-ClickHouse-Summary" in reply.headers for reply in replies] == [False, True]
    assert replies[0].body == replies[1].body


def test_sql_buffer_size_of_thousands_of_digits_is_reduced(store: StoreSettings) -> None:
    reply = ask(store, "SELECT 1", buffer_size="9" * 5000)

    assert (reply.status, reply.body) == (200, b"1\n")


# --- failures ---


@pytest.mark.parametrize("encoding", ["identity", *SUPPORTED, "frames"])
def test_sql_failure_mid_stream_ends_in_exception_block(store: StoreSettings, encoding: str) -> None:
    framed = {"compress": 1} if encoding == "frames" else {"enable_http_compression": 1}
    reply = ask(store, f"{FAILING} FORMAT CSV", headers={"Accept-Encoding": encoding}, **framed)

    tag = reply.headers["X-ClickHouse-Exception-Tag"]
    body = unframe(reply.body, 10**8) if encoding == "frames" else decompress(reply.body, encoding, 10**8)
    rows, message, end = body.split(f"\r\n{tag}".encode())[0], body.split(f"{tag}\r\n".encode())[1], body[-40:]
    assert (reply.status, reply.whole, len(tag)) == (200, False, 16)
    assert rows.startswith(b"0,0\n1,0\n")
    assert rows.endswith(b"\r\n__exception__")
    assert message.startswith(b"Code: 395. DB::Exception: half way")
    assert end.endswith(f"{tag}\r\n__exception__\r\n".encode())


@pytest.mark.parametrize("kind", ["syntax", "table", "guard", "size", "format", "session"])
@pytest.mark.parametrize("encoding", ["identity", *SUPPORTED, "frames"])
def test_sql_errors_are_decodable_in_every_compression(store: StoreSettings, encoding: str, kind: str) -> None:
    sql, code, word, more = {
        "syntax": ("SELEC 1 1", 62, "Syntax error", {}),
        "table": ("SELECT * FROM nowhere", 60, "nowhere", {}),
        "guard": ("SELECT file('/etc/passwd')", 497, "file(...) is not allowed", {}),
        "size": ("SELECT groupArray(number) FROM numbers(100000000)", 241, "emory limit", {"max_memory_usage": 10_000_000}),
        "format": ("SELECT 1 FORMAT None", 73, "None", {}),
        "session": ("SELECT 1", 372, "not found", {"session_id": "never", "session_check": 1}),
    }[kind]
    framed = {"compress": 1} if encoding == "frames" else {"enable_http_compression": 1}
    reply = ask(store, sql, headers={"Accept-Encoding": encoding}, **framed, **more)

    body = unframe(reply.body, 10**6) if encoding == "frames" else decompress(reply.body, reply.headers["Content-Encoding"] or "", 10**6)
    assert (reply.status >= 400, reply.code) == (True, code)
    assert body.decode().startswith(f"Code: {code}. DB::Exception: ")
    assert word in body.decode()


# --- leaving and killing ---


def test_sql_statement_is_cancelled_when_client_disconnects(store: StoreSettings, client: Client) -> None:
    with begin(store, ENDLESS, query_id="left-1"):
        until(lambda: len(running(client, "left-1")) == 1)
    until(lambda: not running(client, "left-1"))


def test_sql_disconnected_clients_free_their_workers(store: StoreSettings, client: Client) -> None:
    # An id of its own for each: one that is still ending refuses the next of its name.
    turns = [[f"crowd-{turn}-{place}" for place in range(8)] for turn in range(3)]
    for query_ids in turns:
        connections = [begin(store, ENDLESS, query_id=query_id) for query_id in query_ids]
        until(lambda last=query_ids[-1]: bool(running(client, last)))
        for connection in connections:
            connection.close()
    until(lambda: not any(running(client, query_id) for query_ids in turns for query_id in query_ids))

    assert ask(store, "SELECT 1").body == b"1\n"


def test_sql_disconnect_mid_answer_cancels_statement(store: StoreSettings, client: Client) -> None:
    with begin(store, "SELECT number FROM system.numbers", query_id="left-2") as connection:
        assert len(connection.recv(1 << 16)) > 0
        assert len(running(client, "left-2")) == 1
    until(lambda: not running(client, "left-2"))


def test_sql_disconnect_frees_session(store: StoreSettings, client: Client) -> None:
    ask(store, "CREATE TEMPORARY TABLE kept (a UInt8)", session_id="left-session")
    with begin(store, ENDLESS, query_id="left-3", session_id="left-session"):
        until(lambda: len(running(client, "left-3")) == 1)
        busy = ask(store, "SELECT 1", session_id="left-session")
        assert (busy.status, busy.code) == (500, 373)
    until(lambda: ask(store, "SELECT count() FROM kept", session_id="left-session").body == b"0\n")


def test_sql_kill_query_by_query_id_cancels_statement(store: StoreSettings, client: Client) -> None:
    with begin(store, ENDLESS, query_id="kill-me") as connection:
        until(lambda: len(running(client, "kill-me")) == 1)
        twin = ask(store, "SELECT 1", query_id="kill-me")
        assert ask(store, "KILL QUERY WHERE query_id = 'no such id'").body == b""
        killed = client.query("KILL QUERY WHERE query_id = 'kill-me'").result_rows
        answer = connection.recv(1 << 16)

    assert (len(killed), killed[0][0]) == (1, "waiting")
    assert (b"500 Internal" in answer, b"QUERY_WAS_CANCELLED" in answer) == (True, True)
    assert twin.code == 216
    assert ask(store, "SELECT 1", query_id="kill-me").body == b"1\n"


def test_sql_insert_continues_when_client_disconnects(store: StoreSettings, client: Client) -> None:
    client.command("CREATE TABLE goes_on (a UInt64) ORDER BY a")
    stored = "SELECT count() FROM goes_on"
    begun = f"SELECT (SELECT count() FROM system.processes WHERE query LIKE 'INSERT INTO goes_on%') + ({stored}) > 0"
    with begin(store, "INSERT INTO goes_on SELECT number FROM numbers(3) WHERE sleepEachRow(0.2) = 0"):
        until(lambda: client.query(begun).result_rows == [(1,)])
    until(lambda: client.query(stored).result_rows == [(3,)])


# --- the rest of the interface ---


def test_sql_get_and_head_are_readonly(store: StoreSettings, client: Client) -> None:
    client.command("CREATE TABLE unchanged (a UInt8) ORDER BY a")

    for sql in ("INSERT INTO unchanged VALUES (1)", "DROP TABLE unchanged", "CREATE TABLE more (a UInt8) ORDER BY a", "KILL QUERY WHERE 1"):
        assert ask(store, method="GET", query=sql).code == 164
    assert ask(store, b"1\n", method="GET", query="INSERT INTO unchanged FORMAT CSV").code == 164
    assert ask(store, method="GET", query="SELECT count() FROM unchanged").body == b"0\n"
    assert ask(store, method="HEAD", query="SELECT 1").headers["X-ClickHouse-Format"] == "TabSeparated"
    assert ask(store, method="HEAD", query=LARGE, query_id="head-1").status == 200
    until(lambda: not running(client, "head-1"))
    assert ask(store, method="GET").body == b"Ok.\n"


def test_sql_setting_of_earlier_request_returns_to_default(store: StoreSettings) -> None:
    sql = "SELECT getSetting('max_block_size'), getSetting('max_memory_usage')"
    default = ask(store, sql).body
    session = {"session_id": "settings"}

    assert ask(store, sql, max_block_size=77, max_memory_usage=10**9).body == b"77\t1000000000\n"
    assert ask(store, sql).body == default
    assert ask(store, sql, max_block_size=77, max_memory_usage=10**9, **session).body == b"77\t1000000000\n"
    assert ask(store, sql, **session).body == default


def test_sql_role_and_log_comment_parameters_are_ignored(store: StoreSettings) -> None:
    assert ask(store, "SELECT 1", role="admin", log_comment="x", quota_key="q", send_progress_in_http_headers=1).body == b"1\n"


def test_sql_database_is_read_from_parameter_or_header(store: StoreSettings) -> None:
    sql = "SELECT currentDatabase()"

    assert ask(store, sql, database="system").body == b"system\n"
    assert ask(store, sql, headers={"X-ClickHouse-Database": "otel"}).body == b"otel\n"


def test_sql_expect_100_continue_is_answered_before_body(store: StoreSettings) -> None:
    with socket.create_connection(("127.0.0.1", store.clickhouse_port)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 8\r\n\r\n")
        assert connection.recv(1024).startswith(b"HTTP/1.1 100 Continue\r\n")
        connection.sendall(b"SELECT 7")
        assert connection.recv(4096).endswith(b"\r\n\r\n7\n")


def test_sql_external_data_is_table_for_one_statement(store: StoreSettings) -> None:
    body, headers = form(ext=("", b"1,a\n2,b\n"), other=("o.tsv", b"5\tx'y, z\n"), query=(None, b"SELECT * FROM ext, other"))
    described = {"ext_structure": "a UInt8, `b``c)` Tuple(x String)", "ext_format": "CSV", "other_types": "UInt8, Enum8('x\\'y, z' = 1)"}

    for session in ({}, {"session_id": "external"}, {"session_id": "external"}):
        reply = ask(store, body, headers=headers, **described, **session)
        assert (reply.body, reply.status) == (b"1\t('a')\t5\tx\\'y, z\n2\t('b')\t5\tx\\'y, z\n", 200)
        assert ask(store, "SELECT * FROM ext", **session).code == 60


@pytest.mark.parametrize(
    ("described", "code"),
    [
        ({}, 36),
        ({"ext_structure": "a UInt8) ENGINE = Memory AS SELECT 1 --"}, 62),
        ({"ext_structure": "a UInt8', 'x"}, 62),
        ({"ext_structure": "a UInt8"}, 27),
        ({"ext_structure": "a NoSuchType"}, 50),
    ],
)
def test_sql_invalid_external_data_is_refused(store: StoreSettings, described: dict[str, str], code: int) -> None:
    body, headers = form(ext=("e", b"not a number\n"))

    assert ask(store, body, headers=headers, query="SELECT * FROM ext", **described).code == code


def test_sql_broken_multipart_form_is_refused(store: StoreSettings) -> None:
    body, headers = form(query=(None, b"SELECT 1"))

    assert ask(store, body[:-10], headers=headers).status in {200, 400}
    assert ask(store, b"nothing", headers=headers).status == 400
    for head in (b"no field", b"X: " + b"x" * 100_000, b"X: 1\r\n" * 5000):
        broken = body.replace(b"Content-Disposition", head + b"\r\nContent-Disposition", 1)
        assert broken != body
        assert ask(store, broken, headers=headers).code == 36, head[:20]
    assert ask(store, body, headers={**headers, "Content-Encoding": "gzip"}).code == 48
