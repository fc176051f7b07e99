"""The whole store, through its three ports, with the real clients."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
import urllib.error
import urllib.request
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import clickhouse_connect
import grpc
import pytest
from backports import zstd
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from collector.write.staging import INLINE_BYTES
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.servers import running_store, start_store, store_answers, store_settings

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
ROOT = Path(__file__).parents[2]
FIXTURES = sorted((ROOT / "tests/fixtures/spans").glob("*.jsonl"))
START = 1_700_000_000_000_000_000


@pytest.fixture(scope="module")
def client(store: StoreSettings) -> Iterator[Client]:
    client = connect(store)
    yield client
    client.close()


def spans(
    trace_id: bytes, count: int = 1, scope: str = "test", attributes: dict[str, str | bytes] | None = None
) -> ExportTraceServiceRequest:
    """`count` spans of one trace."""
    values = [
        KeyValue(key=key, value=AnyValue(bytes_value=value) if isinstance(value, bytes) else AnyValue(string_value=value))
        for key, value in (attributes or {}).items()
    ]
    given = [
        Span(trace_id=trace_id, span_id=struct.pack(">Q", place + 1), name="chat", start_time_unix_nano=START + place, attributes=values)
        for place in range(count)
    ]
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(scope=InstrumentationScope(name=scope), spans=given)])]
    )


def new_trace() -> bytes:
    return uuid.uuid4().bytes


def post(url: str, body: bytes, content_type: str = PROTOBUF, **headers: str) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, {"Content-Type": content_type, **named}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def count_spans(client: Client, trace_id: bytes, table: str = "otel.otel_traces") -> int:
    return client.query(f"SELECT count() FROM {table} WHERE TraceId = {{t:String}}", parameters={"t": trace_id.hex()}).result_rows[0][0]


# --- OTLP ---


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("", lambda body: body), ("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd.compress)],
    ids=["plain", "gzip", "deflate", "zstd"],
)
def test_protobuf_spans_are_stored_when_acknowledged(store: StoreSettings, client: Client, encoding: str, pack) -> None:
    trace_id = new_trace()
    body = pack(spans(trace_id, 3).SerializeToString())

    answer = post(f"{store.otlp_endpoint}/v1/traces", body, **({"Content_Encoding": encoding} if encoding else {}))

    assert answer == (200, PROTOBUF, b"")
    assert count_spans(client, trace_id) == 3


def test_json_spans_are_stored_when_acknowledged(store: StoreSettings, client: Client) -> None:
    trace_id = new_trace()
    span = {
        "traceId": trace_id.hex(),
        "spanId": "0102030405060708",
        "name": "s",
        "startTimeUnixNano": str(START),
        "endTimeUnixNano": START + 5,
    }
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()

    assert post(f"{store.otlp_endpoint}/v1/traces", body, JSON) == (200, "application/json; charset=utf-8", b"{}")
    rows = client.query(
        "SELECT SpanId, SpanName, Duration FROM otel.otel_traces WHERE TraceId = {t:String}", parameters={"t": trace_id.hex()}
    )
    assert rows.result_rows == [("0102030405060708", "s", 5)]


def test_logs_are_stored_and_metrics_are_taken(store: StoreSettings, client: Client) -> None:
    trace_id = new_trace()
    record = LogRecord(time_unix_nano=START, trace_id=trace_id, body=AnyValue(string_value="hello"), event_name="gen_ai.evaluation.result")
    record.attributes.append(KeyValue(key="gen_ai.evaluation.score.value", value=AnyValue(double_value=1)))
    resource = Resource(attributes=[KeyValue(key="service.name", value=AnyValue(string_value="agent"))])
    logs = ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=resource, scope_logs=[ScopeLogs(log_records=[record])])])

    assert post(f"{store.otlp_endpoint}/v1/logs", logs.SerializeToString()) == (200, PROTOBUF, b"")
    assert post(f"{store.otlp_endpoint}/v1/metrics", ExportMetricsServiceRequest().SerializeToString()) == (200, PROTOBUF, b"")
    rows = client.query(
        "SELECT ServiceName, Body, EventName, LogAttributes FROM otel.otel_logs WHERE TraceId = {t:String}",
        parameters={"t": trace_id.hex()},
    )
    assert rows.result_rows == [("agent", "hello", "gen_ai.evaluation.result", {"gen_ai.evaluation.score.value": "1"})]
    kinds = client.query("SELECT RowKind FROM spangrad_internal.rollout_spans WHERE TraceId = {t:String}", parameters={"t": trace_id.hex()})
    assert kinds.result_rows == [("evaluation_log",)]


def test_evaluations_of_one_span_and_nanosecond_all_count(store: StoreSettings, client: Client) -> None:
    trace_id, count = new_trace(), 1000
    records = [
        LogRecord(
            time_unix_nano=START,
            trace_id=trace_id,
            event_name="gen_ai.evaluation.result",
            attributes=[KeyValue(key="gen_ai.evaluation.score.value", value=AnyValue(int_value=number))],
        )
        for number in range(count)
    ]
    logs = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=records)])])
    for _ in range(2):
        assert post(f"{store.otlp_endpoint}/v1/logs", logs.SerializeToString()) == (200, PROTOBUF, b"")
    kept = "SELECT count() FROM spangrad_internal.rollout_spans FINAL WHERE TraceId = {t:String}"
    assert client.query(kept, parameters={"t": trace_id.hex()}).result_rows == [(count,)]


def test_attribute_indexes_are_built_when_parts_merge(client: Client) -> None:
    indexes = client.query("SELECT name, expr FROM system.data_skipping_indices WHERE table = 'otel_traces' AND name LIKE '%_attr_%'")
    for name, expression in indexes.result_rows:
        table = f"default.merged_{name}"
        client.command(
            f"CREATE TABLE {table} (SpanAttributes Map(String, String), ResourceAttributes Map(String, String),"
            f" INDEX {name} {expression} TYPE bloom_filter(0.01) GRANULARITY 1) ENGINE = MergeTree ORDER BY tuple()"
        )
        client.command(f"INSERT INTO {table} SELECT map('a', toString(number)), map('b', toString(number)) FROM numbers(1000)")
        size = f"SELECT data_uncompressed_bytes FROM system.data_skipping_indices WHERE name = '{name}' AND table = 'merged_{name}'"
        inserted = client.command(size)
        client.command(f"OPTIMIZE TABLE {table} FINAL")
        merged = client.command(size)
        client.command(f"DROP TABLE {table}")
        assert inserted == 0
        assert int(str(merged)) > 0
    assert len(indexes.result_rows) == 4


def test_otlp_undecodable_body_is_refused_with_reason(store: StoreSettings) -> None:
    status, kind, body = post(f"{store.otlp_endpoint}/v1/traces", b"\xff\xff")
    assert (status, kind, Status.FromString(body).code) == (400, PROTOBUF, 3)
    assert Status.FromString(body).message.startswith("the body is not a protobuf ExportTraceServiceRequest")

    status, kind, body = post(f"{store.otlp_endpoint}/v1/traces", b"{", JSON)
    assert (status, kind) == (400, "application/json; charset=utf-8")
    assert json.loads(body)["message"].startswith("the body is not JSON")

    assert post(f"{store.otlp_endpoint}/v1/traces", b"x", Content_Encoding="gzip")[0] == 400
    assert post(f"{store.otlp_endpoint}/v1/traces", b"x", "text/plain")[0] == 415


def test_otlp_partly_bad_request_stores_good_spans(store: StoreSettings, client: Client) -> None:
    trace_id = new_trace()
    request = spans(trace_id, 2)
    request.resource_spans[0].scope_spans[0].spans.append(Span(name="bad", trace_id=b"\x01"))

    status, _, body = post(f"{store.otlp_endpoint}/v1/traces", request.SerializeToString())

    partial = ExportTraceServiceResponse.FromString(body).partial_success
    assert (status, partial.rejected_spans, partial.error_message) == (200, 1, "span 'bad': id 01 has 1 bytes, 16 are right")
    assert count_spans(client, trace_id) == 2


def test_grpc_stores_spans_and_logs(store: StoreSettings, client: Client) -> None:
    trace_id = new_trace()
    with grpc.insecure_channel(f"127.0.0.1:{store.otlp_grpc_port}", compression=grpc.Compression.Gzip) as channel:
        assert TraceServiceStub(channel).Export(spans(trace_id, 4), timeout=30) == ExportTraceServiceResponse()
        record = LogRecord(time_unix_nano=START, trace_id=trace_id)
        logs = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=[record])])])
        assert LogsServiceStub(channel).Export(logs, timeout=30) == ExportLogsServiceResponse()
        assert MetricsServiceStub(channel).Export(ExportMetricsServiceRequest(), timeout=30) == ExportMetricsServiceResponse()

    assert count_spans(client, trace_id) == 4
    assert count_spans(client, trace_id, "otel.otel_logs") == 1


def test_grpc_undecodable_request_answers_invalid_argument(store: StoreSettings) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{store.otlp_grpc_port}") as channel:
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        with pytest.raises(grpc.RpcError) as caught:
            export(b"\xff\xff", timeout=30)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_framework_spans_are_accepted_and_stored(store: StoreSettings, client: Client, file: Path) -> None:
    traces: dict[str, set[str]] = {}
    for line in file.read_bytes().splitlines():
        assert post(f"{store.otlp_endpoint}/v1/traces", line, JSON)[::2] == (200, b"{}")
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    traces.setdefault(span["traceId"], set()).add(span["spanId"])

    rows = client.query(
        "SELECT TraceId, groupUniqArray(SpanId) FROM spangrad.rollout_spans WHERE TraceId IN {t:Array(String)} GROUP BY TraceId",
        parameters={"t": list(traces)},
    )
    assert {trace: set(ids) for trace, ids in rows.result_rows} == traces


# --- the laws ---


def gateway_call(trace_id: bytes) -> ExportTraceServiceRequest:
    return spans(
        trace_id,
        scope="spangrad.gateway",
        attributes={
            "spangrad.rollout.id": f"rollout-{trace_id.hex()}",
            "spangrad.policy.name": "policy",
            "spangrad.input.token_ids": struct.pack("<3I", 1, 70000, 2**32 - 1),
            "spangrad.output.token_ids": struct.pack("<2I", 4, 5),
            "spangrad.output.logprobs": struct.pack("<2f", -0.5, -1.25),
        },
    )


def test_store_span_delivered_twice_counts_once(store: StoreSettings, client: Client) -> None:
    trace_id = new_trace()
    call = gateway_call(trace_id)
    both = ExportTraceServiceRequest()
    both.MergeFrom(call)
    both.MergeFrom(spans(trace_id, 3))
    for request in (call, both, call):
        assert post(f"{store.otlp_endpoint}/v1/traces", request.SerializeToString())[0] == 200

    # The gateway's span and the first of the three share an id and a time: one span.
    assert count_spans(client, trace_id, "spangrad.rollout_spans") == 4
    assert count_spans(client, trace_id, "spangrad.calls") == 1


def test_spans_view_one_span_with_rollout_id_names_whole_trace(store: StoreSettings, client: Client) -> None:
    by_root, by_session, alone = new_trace(), new_trace(), new_trace()
    named = {"spangrad.rollout.id": f"rollout of {by_root.hex()}", "spangrad.run.id": "r", "spangrad.rollout.attempt": "2"}
    knowing = [spans(by_root, attributes=named), spans(by_session, attributes={"session.id": f"session of {by_session.hex()}"})]
    for body in knowing:
        body.resource_spans[0].scope_spans[0].spans[0].span_id = b"the root"
    others = spans(by_root, 3)
    for body in [others, *knowing, spans(by_session, 2), spans(alone), others]:
        assert post(f"{store.otlp_endpoint}/v1/traces", body.SerializeToString())[0] == 200

    asked = (
        "SELECT RolloutId, RunId, Attempt, count() FROM spangrad.rollout_spans WHERE TraceId IN {t:Array(String)} GROUP BY ALL ORDER BY 4"
    )
    rows = client.query(asked, parameters={"t": [trace.hex() for trace in (by_root, by_session, alone)]}).result_rows
    assert rows == [
        (alone.hex(), "", 0, 1),
        (f"session of {by_session.hex()}", "", 0, 3),
        (f"rollout of {by_root.hex()}", "r", 2, 4),
    ]


def test_calls_ids_sent_as_bytes_are_read_as_arrays(store: StoreSettings, client: Client) -> None:
    trace_id = new_trace()
    post(f"{store.otlp_endpoint}/v1/traces", gateway_call(trace_id).SerializeToString())

    rows = client.query(
        "SELECT RolloutKey, Policy, PromptIds, ResponseIds, Logprobs, IdsSource FROM spangrad.calls WHERE TraceId = {t:String}",
        parameters={"t": trace_id.hex()},
    )
    assert rows.result_rows == [(f"rollout-{trace_id.hex()}", "policy", [1, 70000, 2**32 - 1], [4, 5], [-0.5, -1.25], "engine")]


def test_store_killed_keeps_acknowledged_spans(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    acknowledged: list[bytes] = []
    with running_store(settings, tmp_path / "log") as child:
        for _ in range(20):
            trace_id = new_trace()
            if post(f"{settings.otlp_endpoint}/v1/traces", spans(trace_id, 5).SerializeToString())[0] == 200:
                acknowledged.append(trace_id)
        child.process.kill()
        child.process.wait()

    with running_store(settings, tmp_path / "log"):
        client = connect(settings)
        assert {trace_id: count_spans(client, trace_id) for trace_id in acknowledged} == dict.fromkeys(acknowledged, 5)
        assert len(acknowledged) == 20
        client.close()


def test_store_stopped_commits_and_answers_pending_requests(tmp_path: Path) -> None:
    # A linger that only the stop can end in time.
    settings = store_settings(tmp_path / "data", linger_ms=60_000)
    trace_id = new_trace()
    with running_store(settings, tmp_path / "log") as child:
        body = spans(trace_id, 2).SerializeToString()
        with socket.create_connection(("127.0.0.1", settings.otlp_http_port)) as connection:
            head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            # The metrics request is answered only after the one before it was read.
            post(f"{settings.otlp_endpoint}/v1/metrics", b"")
            child.process.terminate()
            answer = connection.recv(4096)
        assert child.process.wait(60) == 0
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert child.tail().splitlines()[-2:] == [
        f"collector.server INFO store ready: OTLP http://127.0.0.1:{settings.otlp_http_port} and grpc 127.0.0.1:{settings.otlp_grpc_port}, "
        f"ClickHouse http://127.0.0.1:{settings.clickhouse_port}, data in {settings.path}",
        "collector.server INFO store stopped",
    ]

    with running_store(settings, tmp_path / "log"):
        client = connect(settings)
        assert count_spans(client, trace_id) == 2
        client.close()


def test_store_stopped_cancels_long_query(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    address = ("127.0.0.1", settings.clickhouse_port)
    with running_store(settings, tmp_path / "log") as child, socket.create_connection(address) as connection:
        sql = b"SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1"
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(sql), sql))
        client = connect(settings)
        running = "SELECT count() FROM system.processes WHERE query LIKE 'SELECT count() FROM numbers(%'"
        while client.query(running).result_rows != [(1,)]:
            time.sleep(0.02)
        client.close()
        child.process.terminate()
        assert child.process.wait(60) == 0


def test_store_with_full_queue_asks_senders_to_retry(tmp_path: Path) -> None:
    # A linger that only the stop can end in time.
    settings = store_settings(tmp_path / "data", queue_bytes=1000, linger_ms=60_000)
    with running_store(settings, tmp_path / "log") as child:
        body = spans(new_trace(), 100).SerializeToString()
        assert len(body) > 1000
        with socket.create_connection(("127.0.0.1", settings.otlp_http_port)) as connection:
            head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            # Metrics are not stored, so one byte of them gets in unless the queue is full.
            while (refused := post(f"{settings.otlp_endpoint}/v1/metrics", b"x"))[0] == 200:
                pass
            with grpc.insecure_channel(f"127.0.0.1:{settings.otlp_grpc_port}") as channel, pytest.raises(grpc.RpcError) as caught:
                TraceServiceStub(channel).Export(spans(new_trace()), timeout=30)
            child.process.terminate()
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")

        assert refused[0] == 429
        assert Status.FromString(refused[2]).message == "the store's queue is full; send again later"
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        (details,) = [value for name, value in caught.value.trailing_metadata() if name == "grpc-status-details-bin"]
        retry = RetryInfo()
        assert Status.FromString(details).details[0].Unpack(retry)
        assert retry.retry_delay.seconds == 1


def test_store_with_port_or_directory_in_use_names_it(store: StoreSettings, tmp_path: Path) -> None:
    same_port = start_store(store_settings(tmp_path / "data", otlp_http_port=store.otlp_http_port), tmp_path / "log1")
    same_path = start_store(store_settings(store.path), tmp_path / "log2")

    assert (same_port.process.wait(60), same_path.process.wait(60)) == (1, 1)
    assert same_port.tail() == (
        f"cannot listen on 127.0.0.1:{store.otlp_http_port} (Address already in use)."
        " Stop what uses it, or set store.otlp_http_port to another port."
    )
    assert same_path.tail().startswith(f"the store in {store.path} is in use by process ")
    assert store_answers(store)


def test_store_token_is_required_on_every_port(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data", token="secret")
    trace_id = new_trace()
    body = spans(trace_id).SerializeToString()
    with running_store(settings, tmp_path / "log"):
        assert post(f"{settings.otlp_endpoint}/v1/traces", body)[0] == 401
        assert post(f"{settings.otlp_endpoint}/v1/metrics", b"", JSON, Authorization="Bearer other")[0] == 401
        with grpc.insecure_channel(f"127.0.0.1:{settings.otlp_grpc_port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                TraceServiceStub(channel).Export(spans(trace_id), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            TraceServiceStub(channel).Export(spans(trace_id), timeout=30, metadata=(("authorization", "Bearer secret"),))
        with pytest.raises(DatabaseError) as refused:
            clickhouse_connect.get_client(host="127.0.0.1", port=settings.clickhouse_port, password="other")
        assert refused.value.code == 516

        client = connect(settings)
        assert count_spans(client, trace_id, "spangrad.rollout_spans") == 1
        client.close()
        assert post(f"{settings.otlp_endpoint}/v1/traces", body, Authorization="Bearer secret")[0] == 200


def test_otlp_request_that_fails_to_insert_is_not_acknowledged(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log"):
        client, url, trace_id = connect(settings), f"{settings.otlp_endpoint}/v1/traces", new_trace()
        body = spans(trace_id).SerializeToString()
        client.command("CREATE TABLE default.seen (n UInt8) ORDER BY n")
        client.command(
            "CREATE MATERIALIZED VIEW default.picky TO default.seen AS"
            " SELECT throwIf(SpanName != '', 'a view that fails') AS n FROM otel.otel_traces"
        )
        assert post(url, body)[0] in {400, 503}
        client.command("DROP VIEW default.picky")
        client.command("ALTER TABLE otel.otel_traces MODIFY SETTING parts_to_throw_insert = 1, parts_to_delay_insert = 1")
        statuses = [post(url, spans(new_trace()).SerializeToString())[0] for _ in range(6)]
        assert 503 in statuses
        client.command("ALTER TABLE otel.otel_traces RESET SETTING parts_to_throw_insert, parts_to_delay_insert")
        assert post(url, body)[0] == 200
        assert count_spans(client, trace_id, "spangrad.rollout_spans") == 1
        client.close()


def test_insert_violating_constraint_raises_and_defaults_apply(client: Client) -> None:
    client.command("CREATE TABLE small (a UInt8, b UInt8 DEFAULT a + 1, CONSTRAINT small CHECK a < 5) ORDER BY a")
    client.raw_insert("small", ["a"], "1\n", fmt="TabSeparated")
    client.raw_insert("small", None, b'{"a": 2}\n{"a": 3, "b": 9}\n', fmt="JSONEachRow")
    with pytest.raises(DatabaseError, match="VIOLATED_CONSTRAINT"):
        client.raw_insert("small", ["a"], "9\n", fmt="TabSeparated")
    assert client.query("SELECT a, b FROM small ORDER BY a").result_rows == [(1, 2), (2, 3), (3, 9)]
    # Of this table alone: those of our own stages' tables are kept for their next inserts.
    staged = "SELECT create_table_query FROM system.tables WHERE is_temporary AND create_table_query LIKE '%`a` UInt8%'"
    assert client.query(staged).result_rows == []


def test_staging_tables_of_stages_do_not_add_up_as_tables_change(client: Client) -> None:
    own = {"max_threads": 3}  # requests with these settings have a session of their own, which the changes are not made in

    def insert_and_count(table: str) -> object:
        rows = f"{table}{'x' * INLINE_BYTES}\n"  # too long for the statement itself
        client.raw_insert("spangrad_internal.datasets", ["Name"], rows, fmt="TabSeparated", settings=own)
        client.command(f"CREATE TABLE {table} (a UInt8) ORDER BY a")
        return client.query("SELECT count() FROM system.tables WHERE database = ''", settings=own).result_rows

    assert [insert_and_count(f"changed_{number}") for number in range(3)] == [[(1,)]] * 3


def test_insert_of_a_stage_follows_changes_of_its_table(client: Client) -> None:
    client.command("CREATE TABLE spangrad_internal.changed (a UInt8) ORDER BY a")
    own = {"max_threads": 3}
    for kind, value in (("UInt8", "1"), ("UInt16", "300"), ("String", "many")):
        client.command(f"CREATE OR REPLACE TABLE spangrad_internal.changed (a {kind}) ORDER BY a")
        summary = client.raw_insert("spangrad_internal.changed", ["a"], f"{value}\n", fmt="TabSeparated", settings=own)
        assert (summary.written_rows, str(client.query("SELECT a FROM spangrad_internal.changed").first_item["a"])) == (1, value)
    with pytest.raises(DatabaseError, match="CANNOT_PARSE_INPUT_ASSERTION_FAILED"):
        client.raw_insert("spangrad_internal.changed", ["a"], "more\tfields\n", fmt="TabSeparated", settings=own)
    client.command("DROP TABLE spangrad_internal.changed")


def test_calls_view_accepts_malformed_ids(store: StoreSettings, client: Client) -> None:
    for broken in ("not base64!", "abcd", "AAAA"):  # the last: three bytes, no uint32
        trace_id = new_trace()
        request = gateway_call(trace_id)
        for attribute in request.resource_spans[0].scope_spans[0].spans[0].attributes:
            if attribute.key == "spangrad.input.token_ids":
                attribute.value.string_value = broken
        assert post(f"{store.otlp_endpoint}/v1/traces", request.SerializeToString())[0] == 200
        rows = client.query("SELECT PromptIds FROM spangrad.calls WHERE TraceId = {t:String}", {"t": trace_id.hex()}).result_rows
        assert [len(ids) <= 1 for (ids,) in rows] == [True] * len(rows)
        assert len(rows) > 0


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1 INTO/*x*/OUTFILE '{path}' FORMAT TSVRaw",
        "INSERT INTO p (l) FROM/*x*/INFILE '/etc/passwd' FORMAT LineAsString",
        "CREATE TABLE r (k UInt8, v String, PRIMARY KEY k) ENGINE = EmbeddedRocksDB(0, '{path}')",
        "CREATE TABLE x (a String) ENGINE = ExecutablePool('x.sh', 'CSV')",
        "CREATE TABLE f (a String) ENGINE = File(CSV)",
    ],
)
def test_sql_statement_on_files_is_refused(client: Client, tmp_path: Path, statement: str) -> None:
    client.command("CREATE TABLE IF NOT EXISTS p (l String) ORDER BY l")
    with pytest.raises(DatabaseError):
        client.command(statement.format(path=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert client.query("SELECT count() FROM p").result_rows == [(0,)]


def test_insert_with_long_column_list_is_read(client: Client) -> None:
    client.command("CREATE TABLE wide (cccccccccccccccccccccccc UInt8, dddddddddddddddddddddddd UInt8) ORDER BY tuple()")
    client.command("INSERT INTO wide (cccccccccccccccccccccccc, dddddddddddddddddddddddd) VALUES (1, 2)")
    assert client.query("SELECT * FROM wide").result_rows == [(1, 2)]


# --- ClickHouse's interface ---


def test_clickhouse_connect_reads_and_writes(store: StoreSettings, client: Client) -> None:
    kinds = ("UInt32", "LowCardinality(String)", "Map(String, String)", "Array(UInt32)", "Nullable(Float64)")
    columns = ", ".join(f"{name} {kind}" for name, kind in zip("abcde", kinds, strict=True))
    client.command(f"CREATE TABLE readwrite ({columns}) ORDER BY a")
    rows = [(1, "x", {"k": "v"}, [1, 2], None), (2, "y", {}, [], 0.5)]

    summary = client.insert("readwrite", rows, column_names=list("abcde"))

    assert summary.written_rows == 2
    assert client.query("SELECT * FROM readwrite ORDER BY a").result_rows == rows
    assert client.query("SELECT * FROM readwrite LIMIT 0").column_names == tuple("abcde")
    assert client.command("SELECT count() FROM readwrite") == 2
    assert client.query_arrow("SELECT a, d FROM readwrite ORDER BY a").to_pylist() == [{"a": 1, "d": [1, 2]}, {"a": 2, "d": []}]
    with client.query_row_block_stream("SELECT number FROM numbers(200000)") as stream:
        assert sum(len(block) for block in stream) == 200_000
    client.raw_insert("readwrite", ["a", "b"], "3\tz\n", fmt="TabSeparated")
    assert client.raw_query("SELECT a, b FROM readwrite WHERE a = 3", fmt="JSONEachRow") == b'{"a":3,"b":"z"}\n'
    assert client.ping()


@pytest.mark.parametrize("compress", [False, "lz4", "zstd", "gzip"])
def test_clickhouse_connect_reads_and_writes_in_every_compression(store: StoreSettings, client: Client, compress: str | bool) -> None:
    packed = clickhouse_connect.get_client(host="127.0.0.1", port=store.clickhouse_port, compress=compress)
    table = f"compression_{compress or 'none'}"
    client.command(f"CREATE TABLE {table} (a UInt64, b String) ORDER BY a")
    rows = [(number, "text " * 20) for number in range(20_000)]

    packed.insert(table, rows, column_names=["a", "b"])

    assert packed.query(f"SELECT * FROM {table} ORDER BY a").result_rows == rows
    packed.close()


async def test_clickhouse_connect_async_client_round_trips(store: StoreSettings) -> None:
    client = await clickhouse_connect.get_async_client(host="127.0.0.1", port=store.clickhouse_port)
    await client.command("CREATE TABLE async_client (a UInt32, b String) ORDER BY a")
    await client.insert("async_client", [(1, "x")], column_names=["a", "b"])

    result = await client.query("SELECT a, b FROM async_client WHERE b = {b:String}", parameters={"b": "x"})

    assert result.result_rows == [(1, "x")]
    await client.close()


def test_sql_parameters_of_all_types_arrive(client: Client) -> None:
    parameters = {"s": "a'b\\c\td\ne", "n": -5, "l": ["x'y", "z"], "none": None}

    result = client.query("SELECT {s:String}, {n:Int64}, {l:Array(String)}, {none:Nullable(String)}", parameters=parameters)

    assert result.result_rows == [("a'b\\c\td\ne", -5, ["x'y", "z"], None)]


def test_sql_long_parameters_sent_as_form_arrive(store: StoreSettings) -> None:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=store.clickhouse_port, form_encode_query_params=True)
    ids = [f"{number:032x}" for number in range(5000)]

    assert client.query("SELECT length({ids:Array(String)})", parameters={"ids": ids}).result_rows == [(5000,)]
    client.close()


def test_sql_settings_apply_to_their_request_only(client: Client) -> None:
    sql = "SELECT getSetting('max_block_size')"
    default = client.query(sql).result_rows

    assert client.query(sql, settings={"max_block_size": 77}).result_rows == [(77,)]
    client.command("SET max_block_size = 99")
    assert client.query(sql).result_rows == default


def test_sql_session_keeps_its_temporary_tables(store: StoreSettings) -> None:
    port = store.clickhouse_port
    first, second = (clickhouse_connect.get_client(host="127.0.0.1", port=port, session_id=name) for name in ("session-1", "session-2"))
    first.command("CREATE TEMPORARY TABLE kept (a UInt32)")
    first.insert("kept", [(1,)], column_names=["a"])

    assert first.query("SELECT a FROM kept").result_rows == [(1,)]
    with pytest.raises(DatabaseError, match="UNKNOWN_TABLE"):
        second.query("SELECT a FROM kept")
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELECT * FROM nowhere", 60),
        ("SELEC 1", 62),
        ("SELECT unknown_column", 47),
        ("SELECT * FROM nodb.t", 81),
        ("SELECT throwIf(1)", 395),
        ("SELECT file('/etc/passwd')", 497),
        ("SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'x String')", 497),
        ("SELECT * FROM executable('x', 'CSV', 'x String')", 497),
        ("SELECT * FROM `/etc/passwd`", 60),
        ("SELECT * FROM _local.`/etc/passwd`", 497),
        ("CREATE USER u", 497),
        ("SYSTEM SHUTDOWN", 497),
    ],
)
def test_sql_errors_have_clickhouse_code(client: Client, sql: str, code: int) -> None:
    with pytest.raises(DatabaseError) as caught:
        client.command(sql)
    assert caught.value.code == code


def test_insert_whose_client_disconnects_inserts_nothing(store: StoreSettings, client: Client) -> None:
    client.command("CREATE TABLE left_early (a UInt32) ORDER BY a")
    with socket.create_connection(("127.0.0.1", store.clickhouse_port)) as connection:
        head = "POST /?query=INSERT+INTO+left_early+FORMAT+TabSeparated HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b"1\n2\n3\n")

    client.insert("left_early", [(9,)], column_names=["a"])
    assert client.query("SELECT a FROM left_early").result_rows == [(9,)]


def test_migrations_are_recorded(client: Client) -> None:
    rows = client.query("SELECT Number, Name FROM spangrad_internal.schema_migrations FINAL ORDER BY Number").result_rows
    assert rows[:2] == [(1, "0001_otel.sql"), (2, "0002_rollouts.sql")]
