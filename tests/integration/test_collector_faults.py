"""Faults at the store: odd rows, failing writes and too many bytes are reported, and nothing is lost in silence."""

from __future__ import annotations

import socket
import struct
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.servers import running_store, store_settings


@pytest.fixture(scope="module")
def client(store: StoreSettings) -> Iterator[Client]:
    client = connect(store)
    yield client
    client.close()


def call(trace_id: bytes, **attributes: str | bytes) -> ExportTraceServiceRequest:
    """A gateway's span; two underscores in a name stand for a dot."""
    values = [
        KeyValue(
            key=f"spangrad.{name.replace('__', '.')}",
            value=AnyValue(bytes_value=value) if isinstance(value, bytes) else AnyValue(string_value=value),
        )
        for name, value in attributes.items()
    ]
    span = Span(trace_id=trace_id, span_id=b"\1" * 8, name="chat", start_time_unix_nano=1_700_000_000_000_000_000, attributes=values)
    scope = ScopeSpans(scope=InstrumentationScope(name="spangrad.gateway"), spans=[span])
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scope])])


def post(url: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/x-protobuf"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def calls_of(client: Client, trace_id: bytes) -> list[tuple[object, ...]]:
    columns = "ChoiceIndex, PromptIds, ResponseIds, Logprobs, IdsSource"
    asked = f"SELECT {columns} FROM spangrad.calls WHERE TraceId = {{t:String}} ORDER BY ChoiceIndex"
    return [tuple(row) for row in client.query(asked, parameters={"t": trace_id.hex()}).result_rows]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ("[1, 2]", [(0, [1, 2], [3], [-0.5], "engine"), (1, [1, 2], [4, 5], [-1.0, -1.5], "engine")]),
        ("[0, 3]", [(0, [1, 2], [], [], "engine"), (1, [1, 2], [3, 4, 5], [-0.5, -1.0, -1.5], "engine")]),
        ("not json", [(0, [1, 2], [3, 4, 5], [-0.5, -1.0, -1.5], "engine")]),
        ("[1, 1]", [(0, [], [], [], "none"), (1, [], [], [], "none")]),
        ("[0, 0]", [(0, [], [], [], "none"), (1, [], [], [], "none")]),
        ("[4294967295, 4]", [(0, [], [], [], "none"), (1, [], [], [], "none")]),
        (f"[{'0,' * 300_000}3]", [(0, [], [], [], "none")]),
    ],
    ids=["sound", "one empty", "none", "short", "zeros", "huge", "many"],
)
def test_calls_with_inconsistent_lengths_have_no_ids(
    store: StoreSettings, client: Client, lengths: str, expected: list[tuple[object, ...]]
) -> None:
    trace_id = uuid.uuid4().bytes
    ids = {"input__token_ids": struct.pack("<2I", 1, 2), "output__token_ids": struct.pack("<3I", 3, 4, 5)}
    span = call(trace_id, **ids, output__logprobs=struct.pack("<3f", -0.5, -1.0, -1.5), output__lengths=lengths)

    assert post(f"{store.otlp_endpoint}/v1/traces", span.SerializeToString())[0] == 200
    assert calls_of(client, trace_id) == expected


def test_calls_with_too_few_logprobs_have_none(store: StoreSettings, client: Client) -> None:
    trace_id = uuid.uuid4().bytes
    span = call(trace_id, output__token_ids=struct.pack("<2I", 3, 4), output__logprobs=struct.pack("<1f", -1.0), output__lengths="[1, 1]")

    post(f"{store.otlp_endpoint}/v1/traces", span.SerializeToString())

    assert calls_of(client, trace_id) == [(0, [], [3], [], "engine"), (1, [], [4], [], "engine")]


def test_insert_with_failing_default_raises_and_stores_no_row(client: Client) -> None:
    client.command("CREATE TABLE picky (a UInt8, b UInt8 DEFAULT throwIf(a = 7)) ORDER BY a")
    with pytest.raises(DatabaseError, match="of 2 rows that were read 0 could be held"):
        client.raw_insert("picky", ["a"], "1\n7\n", fmt="TabSeparated")
    client.raw_insert("picky", ["a"], "1\n2\n", fmt="TabSeparated")

    assert client.query("SELECT a, b FROM picky ORDER BY a").result_rows == [(1, 0), (2, 0)]


def test_insert_columns_of_every_kind_are_stored(client: Client) -> None:
    client.command(
        "CREATE TABLE kinds (a UInt8, m UInt8 MATERIALIZED a + 1, l UInt8 ALIAS a + 2, e String EPHEMERAL 'x', d String DEFAULT e,"
        " `o``dd\\\\` LowCardinality(UInt8) DEFAULT m) ORDER BY a SETTINGS allow_suspicious_low_cardinality_types = 1"
    )
    client.raw_insert("kinds", None, b'{"a": 1}', fmt="JSONEachRow")
    client.raw_insert("kinds", ["a", "e"], b'{"a": 2, "e": "y"}', fmt="JSONEachRow")

    assert client.query("SELECT a, m, l, d, `o``dd\\\\` FROM kinds ORDER BY a").result_rows == [(1, 2, 3, "x", 2), (2, 3, 4, "y", 3)]


def test_insert_with_limit_setting_stores_every_row(client: Client) -> None:
    client.command("CREATE TABLE unlimited (a UInt8) ORDER BY a")

    client.raw_insert("unlimited", ["a"], "1\n2\n3\n", fmt="TabSeparated", settings={"limit": 1, "offset": 1})

    assert client.query("SELECT count() FROM unlimited").result_rows == [(3,)]


def test_view_that_throws_refuses_its_body_only(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "log"):
        client, url = connect(settings), f"{settings.otlp_endpoint}/v1/traces"
        client.command("CREATE TABLE default.seen (n UInt8) ORDER BY n")
        client.command(
            "CREATE MATERIALIZED VIEW default.picky TO default.seen AS"
            " SELECT throwIf(SpanAttributes['spangrad.bad'] != '', 'bad') AS n FROM otel.otel_traces"
        )
        good, bad = uuid.uuid4().bytes, call(uuid.uuid4().bytes, bad="1")

        status, body = post(url, bad.SerializeToString())
        with grpc.insecure_channel(f"127.0.0.1:{settings.otlp_grpc_port}") as channel, pytest.raises(grpc.RpcError) as caught:
            TraceServiceStub(channel).Export(bad, timeout=30)

        assert (status, b"not stored: Code: 395" in body, caught.value.code()) == (400, True, grpc.StatusCode.INVALID_ARGUMENT)
        assert post(url, call(good).SerializeToString())[0] == 200
        assert len(calls_of(client, good)) == 1
        assert client.query("SELECT count() FROM default.seen").result_rows == [(1,)]
        client.close()


def test_view_that_cannot_read_a_value_refuses_its_body_only(tmp_path: Path) -> None:
    refusals = {
        "toDateTime(if(v = '', '2026-01-02 03:04:05', v)) = 0": 41,
        "toIPv4(if(v = '', '127.0.0.1', v)) = '10.0.0.1'": 675,
        "intDiv(1, v = '')": 153,
        "if(v = '', 1, NULL)": 349,
        "2 * (v != '')": 469,
    }
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "log"):
        client, url = connect(settings), f"{settings.otlp_endpoint}/v1/traces"
        client.command("CREATE TABLE default.seen (n UInt8, CONSTRAINT small CHECK n < 2) ORDER BY n")
        for value, code in refusals.items():
            client.command(
                f"CREATE MATERIALIZED VIEW default.picky TO default.seen AS SELECT {value} AS n FROM"
                " (SELECT SpanAttributes['spangrad.when'] AS v FROM otel.otel_traces)"
            )
            good = uuid.uuid4().bytes

            status, body = post(url, call(uuid.uuid4().bytes, when="soon").SerializeToString())

            assert (status, body.split(b"not stored: ")[1].split(b".")[0]) == (400, b"Code: %d" % code)
            assert post(url, call(good).SerializeToString())[0] == 200
            assert len(calls_of(client, good)) == 1
            client.command("DROP VIEW default.picky SYNC")
        client.close()


def test_default_database_tables_survive_store_restart(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    for turn in (1, 2, 3):
        with running_store(settings, tmp_path / "log") as child:
            client = connect(settings)
            client.command("CREATE TABLE IF NOT EXISTS default.mine (n UInt8) ORDER BY n")
            client.insert("default.mine", [(turn,)], column_names=["n"])
            assert client.query("SELECT n FROM default.mine ORDER BY n").result_rows == [(n + 1,) for n in range(turn)]
            client.close()
            if turn == 2:
                child.process.kill()
                child.process.wait()


def test_store_over_queue_bytes_answers_503(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data", queue_bytes=1000)
    with running_store(settings, tmp_path / "log"):
        with socket.create_connection(("127.0.0.1", settings.clickhouse_port)) as large:
            large.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\nSELECT 1" + b" " * 4000)
            # Held from when the first part of the large body is read.
            begin = time.monotonic()
            while (refused := post(settings.url, b"SELECT 2"))[0] == 200:
                assert time.monotonic() - begin < 20
            large.sendall(b" " * (5000 - 4008))
            assert large.recv(4096).startswith(b"HTTP/1.1 200 OK")

        assert refused[0] == 503
        assert refused[1].startswith(b"Code: 202. DB::Exception: ")
        assert post(settings.url, b"SELECT 3") == (200, b"3\n")


def test_insert_with_long_name_is_answered_without_delay(store: StoreSettings) -> None:
    begin = time.monotonic()

    status, body = post(store.url, f"INSERT INTO nowhere ({'c' * 60_000}) VALUES (1)".encode())

    assert (status, body[:8]) == (404, b"Code: 60")
    assert time.monotonic() - begin < 10
