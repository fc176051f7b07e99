"""The store against the clients written in Go: clickhouse-go, and the real OpenTelemetry Collector with its ClickHouse exporter.

The same spans by both roads leave the same rows. Skipped where the binaries are not there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spangrad.clickhouse import connect
from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import StoreSettings

ROOT = Path(__file__).parents[2]


def binary(variable: str, name: str) -> str:
    """Where a binary is: as the environment says, beside the checkout, or in PATH."""
    shared = ROOT.parent / "shared" / "bin" / name
    found = os.environ.get(variable) or (str(shared) if shared.exists() else shutil.which(name))
    if not found:
        pytest.skip(f"{name} is not here: set {variable} to its path, or put it into PATH")
    return found


# --- clickhouse-go ---


@pytest.fixture(scope="module")
def chgo() -> str:
    return binary("SPANGRAD_CHGO", "chgo")


def run_chgo(chgo: str, store: StoreSettings, sql: str, *flags: str, rows: str = "") -> subprocess.CompletedProcess[str]:
    url = f"http://default:@127.0.0.1:{store.clickhouse_port}/default"
    return subprocess.run([chgo, *flags, url, sql], input=rows, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("compress", ["none", "lz4", "zstd", "gzip", "deflate"])
def test_clickhouse_go_reads_and_writes(chgo: str, store: StoreSettings, compress: str) -> None:
    table = f"chgo_{compress}"
    assert run_chgo(chgo, store, f'CREATE TABLE "{table}" (a Int64, b String) ENGINE = MergeTree ORDER BY a').stderr == ""

    rows = "".join(f'[{number}, "text {number}"]\n' for number in range(2000))
    inserted = run_chgo(chgo, store, f"INSERT INTO {table} (a, b)", "-compress", compress, "-insert", rows=rows)
    assert (inserted.returncode, inserted.stderr) == (0, "")

    read = run_chgo(chgo, store, f"SELECT a, b FROM {table} ORDER BY a", "-compress", compress)
    assert read.stdout.splitlines()[0] == '[["a","Int64"],["b","String"]]'
    assert [json.loads(line) for line in read.stdout.splitlines()[1:]] == [[number, f"text {number}"] for number in range(2000)]


def test_clickhouse_go_passes_parameters_and_settings(chgo: str, store: StoreSettings) -> None:
    sql = "SELECT {x:String} AS x, getSetting('max_block_size') AS y, [toInt32(1), 2] AS a, map('k', 'v') AS m"

    read = run_chgo(chgo, store, sql, "-param", "x=it's", "-setting", "max_block_size=77")

    assert read.stdout.splitlines()[1:] == ['["it\'s",77,[1,2],{"k":"v"}]']


@pytest.mark.parametrize("compress", ["none", "lz4"])
def test_clickhouse_go_sees_errors_with_their_code(chgo: str, store: StoreSettings, compress: str) -> None:
    failed = run_chgo(chgo, store, "SELECT * FROM nowhere", "-compress", compress)

    assert failed.returncode == 1
    assert "Code: 60" in failed.stderr


# --- the Collector ---


@pytest.fixture(scope="module")
def collector(store: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a running Collector whose ClickHouse exporter fills the store."""
    otelcol = binary("SPANGRAD_OTELCOL", "otelcol-spangrad")
    directory = tmp_path_factory.mktemp("otelcol")
    (port,) = free_ports(1)
    config = {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{port}"}}}},
        "exporters": {
            "clickhouse": {
                "endpoint": store.url,
                "database": "otel",
                "create_schema": False,
                "async_insert": False,
                "sending_queue": {"enabled": False},
                "retry_on_failure": {"enabled": False},
            }
        },
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {signal: {"receivers": ["otlp"], "exporters": ["clickhouse"]} for signal in ("traces", "logs")},
        },
    }
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    child = Child("otelcol", [otelcol, "--config", str(file)], directory / "log")
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            post(f"{url}/v1/traces", {})
        except OSError:
            return False
        return True

    try:
        wait_until(ready, 30, "otelcol", [child])
        yield url
    finally:
        child.stop()


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def text(value: str) -> dict[str, Any]:
    return {"stringValue": value}


def array(*values: dict[str, Any]) -> dict[str, Any]:
    return {"arrayValue": {"values": list(values)}}


def attributes(values: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


VALUES = attributes(
    {
        "text": text("é<>&\u2028"),
        "bytes": {"bytesValue": "AAEC/w=="},
        "no bytes": {"bytesValue": ""},
        "int": {"intValue": "-42"},
        "true": {"boolValue": True},
        "nothing": {},
        **{
            f"double {number}": {"doubleValue": number}
            for number in (0.0, -0.0, 1.0, 0.1, 1e-6, 1.5e-7, 1e16, 1e20, 1e21, -1e22, 5e-324, 1 / 3)
        },
        **{f"double {name}": {"doubleValue": name} for name in ("NaN", "Infinity", "-Infinity")},
        "array": array(
            text('a"\\\n\t\b\f\x01\x7f<é>&\u2028\U0001f600'),
            *({"intValue": "3"}, {"doubleValue": 1.0}, {"doubleValue": 1e-7}, {"boolValue": True}, {}, array(), array(text("n"))),
            *({"bytesValue": "AAEC/w=="}, {"bytesValue": ""}, {"kvlistValue": {"values": attributes({"z": text("1"), "a": {}})}}),
        ),
        "nan": array({"doubleValue": "NaN"}),
        "pairs": {"kvlistValue": {"values": attributes({"zz": text("1"), "aa": array({"intValue": "1"}), "Aa": text("x")})}},
    }
)
TRACE_ID = "0102030405060708090a0b0c0d0e0f10"


def resource(road: str) -> dict[str, Any]:
    return {"attributes": [*attributes({"road": text(road), "service.name": text("agent")}), *VALUES]}


def odd_spans(road: str) -> dict[str, Any]:
    ids = {"traceId": TRACE_ID, "spanId": "0102030405060708"}
    full = {
        **ids,
        "parentSpanId": "0102030405060700",
        "traceState": "a=b",
        "name": "full",
        "kind": 3,
        "startTimeUnixNano": "1700000000000000001",
        "endTimeUnixNano": "1700000000000000100",
        "attributes": VALUES,
        "status": {"code": 2, "message": "bad"},
        "events": [{"name": "e", "timeUnixNano": "1700000000000000050", "attributes": VALUES}, {"name": "empty"}],
        "links": [{**ids, "traceState": "x=y", "attributes": VALUES}],
    }
    empty = {"traceId": "0" * 32, "spanId": "0" * 16, "name": "empty"}
    backwards = {**ids, "name": "backwards", "startTimeUnixNano": "100", "endTimeUnixNano": "50", "kind": 9, "status": {"code": 7}}
    twice = {**ids, "name": "twice", "attributes": [*attributes({"k": text("2")}), *attributes({"k": text("1"), "a": text("1")})]}
    scope = {"name": "scope", "version": "1", "attributes": VALUES}
    numbered = {"attributes": attributes({"road": text(road), "service.name": {"intValue": "5"}})}
    return {
        "resourceSpans": [
            {"resource": resource(road), "schemaUrl": "url", "scopeSpans": [{"scope": scope, "spans": [full, empty, backwards, twice]}]},
            {"resource": numbered, "scopeSpans": [{"spans": [{**empty, "name": "numbered service"}]}]},
        ]
    }


def odd_logs(road: str) -> dict[str, Any]:
    full = {
        "timeUnixNano": "1700000000000000001",
        "observedTimeUnixNano": "1700000000000000002",
        "severityNumber": 9,
        "severityText": "INFO",
        "body": text("hello"),
        "attributes": VALUES,
        "flags": 257,
        "traceId": TRACE_ID,
        "spanId": "0102030405060708",
        "eventName": "event",
    }
    observed = {"observedTimeUnixNano": "1700000000000000003", "body": {"kvlistValue": {"values": VALUES[:3]}}}
    scope = {"name": "scope", "version": "1", "attributes": VALUES}
    scope_logs = [{"scope": scope, "schemaUrl": "scope url", "logRecords": [full, observed]}]
    return {"resourceLogs": [{"resource": resource(road), "schemaUrl": "url", "scopeLogs": scope_logs}]}


@pytest.mark.parametrize(
    ("path", "body", "table", "count"),
    [("/v1/traces", odd_spans, "otel.otel_traces", 5), ("/v1/logs", odd_logs, "otel.otel_logs", 2)],
    ids=["traces", "logs"],
)
def test_both_roads_leave_the_same_rows(store: StoreSettings, collector: str, path: str, body: Any, table: str, count: int) -> None:
    post(collector + path, body("collector"))
    post(store.otlp_endpoint + path, body("direct"))

    client = connect(store)
    # As text, so that the order of a map's keys counts too.
    by_collector, direct = (
        client.query(
            f"SELECT toString(tuple(* EXCEPT ResourceAttributes)), toString(mapFilter((k, v) -> k != 'road', ResourceAttributes))"
            f" FROM {table} WHERE ResourceAttributes['road'] = {{road:String}} ORDER BY 1",
            parameters={"road": road},
        ).result_rows
        for road in ("collector", "direct")
    )
    client.close()

    assert len(direct) == count
    assert direct == by_collector
