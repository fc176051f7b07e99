"""Rights of the write token, of the read token and without a token; no statement reaches beyond the store, with any of them."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from pathlib import Path

import clickhouse_connect
import grpc
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from collector.encodings import SUPPORTED, decompress
from collector.sql.frames import unframe
from spangrad.http.tokens import agent_token
from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.servers import Reply, ask, begin, form, running_store, start_store, store_settings

ENDLESS = "SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1"
TOKENS = {"writer": "write-secret", "reader": "read-secret"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """A store that asks for tokens."""
    directory = tmp_path_factory.mktemp("guarded")
    settings = store_settings(
        directory / "data", token=TOKENS["writer"], read_token=TOKENS["reader"], reader_max_rows=10_000, reader_max_seconds=60
    )
    with running_store(settings, directory / "log"):
        assert as_(settings, "writer", "CREATE TABLE t (a UInt8) ORDER BY a").status == 200
        assert as_(settings, "writer", "INSERT INTO t VALUES (1), (2)").status == 200
        yield settings


def as_(store: StoreSettings, role: str, sql: str | bytes = "", **parameters: object) -> Reply:
    return ask(store, sql, **{"headers": {"X-ClickHouse-Key": TOKENS[role]}, **parameters})


# --- tokens ---


@pytest.mark.parametrize("shown", [{}, {"password": "wrong"}, {"password": ""}])
@pytest.mark.parametrize("encoding", ["identity", *SUPPORTED, "frames"])
def test_sql_wrong_or_missing_token_answers_401_in_every_compression(guarded: StoreSettings, encoding: str, shown: dict[str, str]) -> None:
    framed = {"compress": 1} if encoding == "frames" else {"enable_http_compression": 1}
    reply = ask(guarded, "SELECT 1", headers={"Accept-Encoding": encoding}, **framed, **shown)

    body = unframe(reply.body, 1000) if encoding == "frames" else decompress(reply.body, reply.headers["Content-Encoding"] or "", 1000)
    assert (reply.status, reply.code, reply.headers["WWW-Authenticate"]) == (401, 516, 'Basic realm="spangrad store"')
    assert body == b"Code: 516. DB::Exception: the token (ClickHouse password) is wrong or missing. (AUTHENTICATION_FAILED)\n"


def test_sql_ping_needs_no_token(guarded: StoreSettings) -> None:
    for path in ("/ping", "/replicas_status"):
        reply = ask(guarded, method="GET", path=path)
        assert (reply.status, reply.body) == (200, b"Ok.\n")


@pytest.mark.parametrize("headers", [{"Host": "rebound.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
def test_sql_without_token_refuses_foreign_sites(store: StoreSettings, headers: dict[str, str]) -> None:
    assert ask(store, "SELECT 1", headers=headers).status == 403
    assert ask(store, method="GET", headers=headers, query="SELECT 1").status == 403


def test_sql_answers_contain_no_token(guarded: StoreSettings) -> None:
    for role, token in TOKENS.items():
        for sql in (
            "SELECT * FROM system.processes",
            "SELECT * FROM system.settings",
            "SELECT * FROM system.server_settings",
            "SHOW GRANTS",
        ):
            reply = ask(guarded, sql, user="default", password=token, max_result_rows=900_000)
            assert token not in reply.body.decode(), (role, sql)


def test_otlp_ports_require_token_of_writer_or_agent(guarded: StoreSettings) -> None:
    agents = agent_token(TOKENS["writer"])
    http = guarded.model_copy(update={"clickhouse_port": guarded.otlp_http_port})
    statuses = {
        token: ask(
            http, b"", path="/v1/traces", headers={"Content-Type": "application/x-protobuf", "Authorization": f"Bearer {token}"}
        ).status
        for token in (*TOKENS.values(), agents, "wrong")
    }
    assert statuses == {TOKENS["writer"]: 200, TOKENS["reader"]: 401, agents: 200, "wrong": 401}
    assert ask(guarded, "SELECT 1", password=agents).status == 401

    metadata = (("authorization", f"Bearer {TOKENS['reader']}"),)
    with grpc.insecure_channel(f"127.0.0.1:{guarded.otlp_grpc_port}") as channel, pytest.raises(grpc.RpcError) as caught:
        TraceServiceStub(channel).Export(ExportTraceServiceRequest(), timeout=30, metadata=metadata)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_store_with_same_token_and_read_token_refuses_to_start(tmp_path: Path) -> None:
    child = start_store(store_settings(tmp_path / "data", token="same", read_token="same"), tmp_path / "log")

    assert child.process.wait(60) == 2
    assert child.tail() == "store.read_token is the same as store.token, so its bearer could write. Set another one."


# --- the reader ---


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sum(a) FROM t",
        "WITH 1 AS x SELECT x FROM t",
        "SELECT count() FROM spangrad.rollout_spans",
        "SELECT * FROM spangrad.calls LIMIT 1",
        "SHOW TABLES FROM otel",
        "SHOW CREATE TABLE otel.otel_traces",
        "DESCRIBE TABLE spangrad_internal.calls",
        "EXISTS TABLE t",
        "EXPLAIN SELECT 1",
        "(SELECT 1)",
        "SELECT name FROM system.settings LIMIT 1",
    ],
)
def test_read_token_allows_queries(guarded: StoreSettings, sql: str) -> None:
    assert as_(guarded, "reader", sql).status == 200
    assert as_(guarded, "reader", method="GET", query=sql).status == 200


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO t VALUES (3)",
        "INSERT INTO t SELECT 3",
        "INSERT INTO t FORMAT CSV\n3\n",
        "INSERT INTO FUNCTION null('a UInt8') SELECT 1",
        "/* SELECT */ INSERT INTO t SELECT 3",
        "WITH 3 AS x INSERT INTO t SELECT x",
        "SELECT 1; INSERT INTO t SELECT 3",
        "SELECT 1; KILL QUERY WHERE 1; SELEC 1 1",
        "CREATE TABLE u (a UInt8) ORDER BY a",
        "CREATE TEMPORARY TABLE u (a UInt8)",
        "CREATE OR REPLACE VIEW v AS SELECT 1",
        "CREATE DATABASE d",
        "CREATE FUNCTION f AS x -> x",
        "ALTER TABLE t DELETE WHERE 1",
        "ALTER TABLE t ADD COLUMN b UInt8",
        "DELETE FROM t WHERE 1",
        "UPDATE t SET a = 1 WHERE 1",
        "TRUNCATE TABLE t",
        "DROP TABLE t",
        "DETACH TABLE t",
        "RENAME TABLE t TO u",
        "EXCHANGE TABLES t AND t",
        "OPTIMIZE TABLE t",
        "KILL QUERY WHERE 1",
        "KILL MUTATION WHERE 1",
        "SYSTEM STOP MERGES",
        "SYSTEM FLUSH LOGS",
        "SET max_threads = 1",
        "SET profile = 'default'",
        "USE otel",
        "EXECUTE AS default SELECT 1",
        "SELECT 1 SETTINGS max_result_rows = 0",
        "SELECT 1 FORMAT CSV SETTINGS max_execution_time = 0",
        "SELECT 1 SETTINGS profile = 'default', max_result_rows = 0",
        "SELECT 1 SETTINGS readonly = 0",
    ],
)
def test_read_token_allows_no_change(guarded: StoreSettings, sql: str) -> None:
    packed, headers = form(query=(None, sql.encode()))
    replies = [
        as_(guarded, "reader", sql),
        as_(guarded, "reader", sql, session_id="reader-session"),
        as_(guarded, "reader", method="GET", query=sql),
        as_(guarded, "reader", packed, headers={**headers, "X-ClickHouse-Key": TOKENS["reader"]}),
    ]

    assert {reply.code for reply in replies} <= {164, 62, 48, 344, 497}
    assert as_(guarded, "writer", "SELECT sum(a) FROM t").body == b"3\n"
    assert as_(guarded, "writer", "SHOW TABLES").body == b"t\n"


@pytest.mark.parametrize("role", ["reader", "writer"])
@pytest.mark.parametrize("name", ["x`", "x\\", "x\\`"])
def test_sql_database_of_request_is_quoted_as_a_name(guarded: StoreSettings, role: str, name: str) -> None:
    quoted = name.replace("\\", "\\\\").replace("`", "\\`")
    assert as_(guarded, "writer", f"CREATE DATABASE `{quoted}`").status == 200
    try:
        assert as_(guarded, role, "SELECT currentDatabase()", database=name).body == b"%b\n" % name.replace("\\", "\\\\").encode()
        for ending in ("`; DROP TABLE default.t; -- ", "\\`; DROP TABLE default.t; -- "):
            assert as_(guarded, role, "SELECT 1", database=name + ending).code == 81
            assert as_(guarded, role, "SELECT 1", database=name[:-1] + ending).code == 81
    finally:
        assert as_(guarded, "writer", f"DROP DATABASE `{quoted}`").status == 200
    assert as_(guarded, "writer", "SELECT sum(a) FROM t").body == b"3\n"


@pytest.mark.parametrize(
    ("sql", "settings", "code"),
    [
        ("SELECT number FROM numbers(10001)", {}, 396),
        ("SELECT number FROM numbers(10001)", {"max_result_rows": 0}, 396),
        ("SELECT number FROM numbers(10001)", {"max_result_rows": 10**9}, 396),
        ("SELECT number FROM numbers(10001)", {"result_overflow_mode": "break"}, 164),
        ("SELECT number FROM numbers(6)", {"max_result_rows": 5}, 396),
        ("SELECT number FROM numbers(10000)", {"max_result_rows": 50000}, 0),
        (ENDLESS, {"max_execution_time": 1}, 159),
        ("SELECT * FROM (SELECT number FROM numbers(10001) SETTINGS max_result_rows = 0)", {}, 396),
        ("SELECT 1", {"max_memory_usage": 0}, 164),
        ("SELECT 1", {"readonly": 0}, 164),
        ("SELECT 1", {"profile": "default"}, 164),
        ("SELECT 1", {"session_id": "s", "session_check": 1}, 372),
        ("SELECT 1", {"output_format_json_quote_64bit_integers": 1, "session_id": "s"}, 0),
    ],
)
def test_read_token_queries_are_limited(guarded: StoreSettings, sql: str, settings: dict[str, object], code: int) -> None:
    assert as_(guarded, "reader", sql, **settings).code == code


def test_read_token_query_with_wider_limit_ends_at_limit_of_store(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data", token=TOKENS["writer"], read_token=TOKENS["reader"], reader_max_seconds=1)
    with running_store(settings, tmp_path / "log"):
        assert as_(settings, "reader", ENDLESS, max_execution_time=1000).code == 159


def test_read_token_allows_external_data(guarded: StoreSettings) -> None:
    body, headers = form(ext=("", b"1\n7\n"))
    headers["X-ClickHouse-Key"] = TOKENS["reader"]

    for _ in range(2):
        reply = as_(guarded, "reader", body, headers=headers, query="SELECT a FROM t WHERE a IN ext", ext_structure="a UInt8")
        assert (reply.status, reply.body) == (200, b"1\n")
    refused = as_(guarded, "reader", body, headers=headers, query="INSERT INTO t SELECT a FROM ext", ext_structure="a UInt8")
    assert refused.code == 164


def test_read_token_queries_do_not_delay_writers(guarded: StoreSettings) -> None:
    running = "SELECT count() FROM system.processes WHERE query LIKE 'SELECT count() FROM numbers(%'"
    connections = [begin(guarded, ENDLESS, password=TOKENS["reader"]) for _ in range(20)]
    try:
        assert as_(guarded, "writer", "SELECT 1").body == b"1\n"
        wait_until(lambda: as_(guarded, "writer", running).body == b"8\n", 60, "as many of the readers' queries as run at once")
        assert select.select(connections, [], [], 0)[0] == [], "the readers' queries go on"
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: as_(guarded, "writer", running).body == b"0\n", 60, "the end of the readers' queries")


def test_clickhouse_connect_reads_with_read_token(guarded: StoreSettings) -> None:
    client = connect(guarded.model_copy(update={"token": None}))
    assert client.query("SELECT a FROM t ORDER BY a").result_rows == [(1,), (2,)]
    assert client.query_arrow("SELECT a FROM t ORDER BY a").to_pylist() == [{"a": 1}, {"a": 2}]
    assert client.query("SELECT a FROM t WHERE a = {a:UInt8}", parameters={"a": 2}).result_rows == [(2,)]
    with pytest.raises(DatabaseError) as caught:
        client.insert("t", [(3,)], column_names=["a"])
    assert caught.value.code == 164
    client.close()

    session = clickhouse_connect.get_client(host="127.0.0.1", port=guarded.clickhouse_port, password=TOKENS["reader"], compress="lz4")
    assert session.query("SELECT sum(a) FROM t").result_rows == [(3,)]
    session.close()


# --- beyond the store ---

BEYOND = [
    "SELECT file('/etc/passwd')",
    "SELECT * FROM file('/etc/passwd', 'LineAsString', 'l String')",
    "DESCRIBE TABLE file('/etc/passwd', 'LineAsString')",
    "SELECT * FROM view(SELECT * FROM file('/etc/passwd', 'LineAsString', 'l String'))",
    "SELECT * FROM loop(file('/etc/passwd', 'LineAsString', 'l String'))",
    "SELECT * FROM fileCluster('default', '/etc/passwd', 'LineAsString', 'l String')",
    "SELECT * FROM `/etc/passwd`",
    "SELECT * FROM _local.`/etc/passwd`",
    "SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'x String')",
    "SELECT * FROM urlCluster('default', 'http://127.0.0.1:1/', 'CSV', 'x String')",
    "SELECT * FROM s3('http://127.0.0.1:1/b/k', NOSIGN, 'CSV', 'x String')",
    "SELECT * FROM gcs('http://127.0.0.1:1/b/k', NOSIGN, 'CSV', 'x String')",
    "SELECT * FROM azureBlobStorage('http://127.0.0.1:1/', 'c', 'p', 'a', 'k')",
    "SELECT * FROM hdfs('hdfs://127.0.0.1:1/f', 'CSV', 'x String')",
    "SELECT * FROM iceberg('http://127.0.0.1:1/b/k')",
    "SELECT * FROM deltaLake('http://127.0.0.1:1/b/k')",
    "SELECT * FROM remote('127.0.0.1', system.one)",
    "SELECT * FROM remoteSecure('127.0.0.1', system.one)",
    "SELECT * FROM cluster('default', system.one)",
    "SELECT * FROM mysql('127.0.0.1:1', 'd', 't', 'u', 'p')",
    "SELECT * FROM postgresql('127.0.0.1:1', 'd', 't', 'u', 'p')",
    "SELECT * FROM mongodb('127.0.0.1:1', 'd', 't', 'u', 'p', 'x String')",
    "SELECT * FROM redis('127.0.0.1:1', 'k', 'k String, v String')",
    "SELECT * FROM sqlite('/tmp/x', 't')",
    "SELECT * FROM odbc('DSN=x', 't')",
    "SELECT * FROM jdbc('x', 't')",
    "SELECT * FROM executable('id', 'TSV', 'x String')",
    "SELECT * FROM python('x')",
    "SELECT * FROM dictionary('x')",
    "SELECT * FROM system.users",
    "SELECT 1 INTO OUTFILE '{out}'",
    "SELECT 1 INTO OUTFILE '/dev/fd/2' TRUNCATE",
    "SELECT 1 AS x FORMAT Template SETTINGS format_template_row = '/etc/passwd'",
    "SELECT 1 AS x SETTINGS format_template_resultset = '/etc/passwd' FORMAT Template",
    "SELECT 1 AS x FORMAT Template SETTINGS `format\\x5ftemplate_row` = '/etc/passwd'",
    "SELECT 1 AS x FORMAT Protobuf SETTINGS output_format_schema = '{out}'",
    "SELECT 1 AS x FORMAT Protobuf SETTINGS format_schema_source = 'file', format_schema = '/etc/passwd:X'",
    "SELECT 1 AS x FORMAT Protobuf SETTINGS format_schema = '/etc/passwd:X'",
    "SELECT * FROM format(CSV, 'a UInt8', 'x\n') SETTINGS input_format_record_errors_file_path = '{out}'",
    "SELECT * FROM format(AvroConfluent, 'x UInt8', 'a') SETTINGS format_avro_schema_registry_url = 'http://127.0.0.1:1/'",
    "SELECT * FROM t SETTINGS workload = 'mine'",
    "INSERT INTO t FROM INFILE '/etc/passwd' FORMAT CSV",
    "INSERT INTO FUNCTION file('{out}', 'CSV', 'a UInt8') SELECT 1",
    "CREATE TABLE x (l String) ENGINE = File(LineAsString, '/etc/passwd')",
    "CREATE TABLE x (l String) ENGINE = URL('http://127.0.0.1:1/', CSV)",
    "CREATE TABLE x (l String) ENGINE = Distributed('default', 'system', 'one')",
    "CREATE TABLE x ENGINE = MergeTree ORDER BY l AS SELECT * FROM file('/etc/passwd', 'LineAsString', 'l String')",
    "CREATE TABLE x (l String) ENGINE = MergeTree ORDER BY l SETTINGS disk = disk(type = local, path = '/tmp/')",
    "CREATE VIEW x AS SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'x String')",
    "CREATE DATABASE x ENGINE = Filesystem('/etc')",
    "CREATE DATABASE x ENGINE = MySQL('127.0.0.1:1', 'd', 'u', 'p')",
    "CREATE DICTIONARY x (k UInt64, v String) PRIMARY KEY k SOURCE(FILE(path '/etc/passwd' format 'CSV')) LAYOUT(FLAT()) LIFETIME(0)",
    "CREATE NAMED COLLECTION x AS url = 'http://127.0.0.1:1/'",
    "CREATE USER x",
    "GRANT ALL ON *.* TO default",
    "ATTACH TABLE x FROM '/etc' (l String) ENGINE = MergeTree ORDER BY l",
    "BACKUP TABLE t TO File('{out}')",
    "RESTORE TABLE t FROM File('{out}')",
    "SYSTEM SHUTDOWN",
    "SYSTEM RELOAD CONFIG",
    "EXECUTE AS default SELECT 1",
]


@pytest.mark.parametrize("sql", BEYOND)
@pytest.mark.parametrize("role", TOKENS)
def test_sql_statement_that_reaches_outside_store_is_refused(guarded: StoreSettings, tmp_path: Path, role: str, sql: str) -> None:
    reply = as_(guarded, role, sql.replace("{out}", str(tmp_path / "out")))

    assert (reply.code != 0, b"root:" in reply.body, (tmp_path / "out").exists()) == (True, False, False)


@pytest.mark.parametrize(
    "setting", ["format_template_row", "format_schema_source", "output_format_schema", "input_format_record_errors_file_path", "workload"]
)
@pytest.mark.parametrize("role", TOKENS)
def test_sql_parameter_naming_file_is_refused(guarded: StoreSettings, role: str, setting: str) -> None:
    assert as_(guarded, role, "SELECT 1 AS x FORMAT Template", **{setting: "/etc/passwd"}).code in {164, 452, 36}
    assert as_(guarded, "writer", f"SET {setting} = '/etc/passwd'", session_id="sets").code in {452, 36}


def test_sql_format_schema_given_inline_is_used(guarded: StoreSettings) -> None:
    schema = 'syntax = "proto3"; message M { int32 x = 1; }'
    sql = f"SELECT 5 AS x FORMAT Protobuf SETTINGS format_schema = '{schema}', format_schema_message_name = 'M'"

    assert as_(guarded, "writer", sql).body == b"\x02\x08\x05"
    assert json.loads(as_(guarded, "writer", "SELECT 1 AS a FORMAT JSONEachRow").body) == {"a": 1}
