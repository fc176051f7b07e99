"""The two routes into the store leave the same rows, column by column.

One leads through the real OpenTelemetry Collector and its ClickHouse exporter, the other through the store's own receivers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.otlp import logs, traces
from tests.support.servers import collector_values, otelcol, post, running_collector, running_store, store_settings

ROOT = Path(__file__).parents[2]
FIXTURES = sorted(ROOT.glob("tests/fixtures/spans/*.jsonl"))
ROUTES = ("collector", "direct")
JSON = "application/json"
Rows = list[dict[str, str]]


class Routes:
    """Client of the two routes to one store: through a collector, and directly."""

    def __init__(self, store: StoreSettings, collector: str) -> None:
        self._client = connect(store)
        self._urls = {"collector": collector, "direct": store.otlp_endpoint}
        self._columns = {
            signal: [row[0] for row in self._client.query(f"DESCRIBE otel.otel_{signal}").result_rows] for signal in ("traces", "logs")
        }
        self._requests = 0

    def close(self) -> None:
        self._client.close()

    def rows(
        self, signal: str, body: Callable[[str], bytes], count: int, content_type: str = "application/x-protobuf"
    ) -> tuple[Rows, Rows]:
        """The rows that a request leaves by either route, all columns as text.

        Args:
            signal: traces or logs.
            body: makes the request; every resource must hold the attribute `route` with the text that is given.
            count: how many rows are expected.
            content_type: of the body.
        """
        self._requests += 1
        for route, url in self._urls.items():
            assert post(f"{url}/v1/{signal}", body(f"{route} {self._requests}"), content_type) == 200
        statement = f"SELECT count() FROM otel.otel_{signal} WHERE ResourceAttributes['route'] = {{route:String}}"
        parameters = {"route": f"collector {self._requests}"}
        wait_until(lambda: self._client.query(statement, parameters=parameters).result_rows[0][0] >= count, 30, "the collector's rows")
        return self._read(signal)

    def _read(self, signal: str) -> tuple[Rows, Rows]:
        columns = self._columns[signal]
        # As text, so that the order of a map's keys counts too.
        without_route = {"ResourceAttributes": "mapFilter((k, v) -> k != 'route', ResourceAttributes)"}
        texts = ", ".join(f"toString({without_route.get(column, f'`{column}`')})" for column in columns)
        route = "ResourceAttributes['route']"
        statement = f"SELECT {route}, {texts} FROM otel.otel_{signal} WHERE {route} IN {{routes:Array(String)}} ORDER BY tuple({texts})"
        rows: tuple[Rows, Rows] = [], []
        names = [f"{name} {self._requests}" for name in ROUTES]
        for name, *values in self._client.query(statement, parameters={"routes": names}).result_rows:
            rows[names.index(name)].append(dict(zip(columns, values, strict=True)))
        return rows


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routes]:
    """A store of its own: the fixtures' spans would be met in the shared one."""
    otelcol()  # or skip at once
    directory = tmp_path_factory.mktemp("routes")
    store = store_settings(directory / "data")
    with (
        running_store(store, directory / "store.log"),
        running_collector(store, collector_values(directory), directory / "collector.log") as collector,
    ):
        routes = Routes(store, collector.url)
        yield routes
        routes.close()


def require_equal(by_collector: Rows, direct: Rows, count: int) -> None:
    """Whole values; where rows differ, only the columns that do are shown."""
    assert (len(direct), len(by_collector)) == (count, count)
    differences = [
        {column: (collected[column], received[column]) for column in received if collected[column] != received[column]}
        for collected, received in zip(by_collector, direct, strict=True)
        if collected != received
    ]
    assert differences == []


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_framework_spans_give_same_rows_by_collector_and_receivers(routes: Routes, fixture: Path) -> None:
    requests = [json.loads(line) for line in fixture.read_text().splitlines()]
    whole = {"resourceSpans": [resource_spans for request in requests for resource_spans in request["resourceSpans"]]}
    count = sum(len(scope["spans"]) for resource_spans in whole["resourceSpans"] for scope in resource_spans["scopeSpans"])

    def body(route: str) -> bytes:
        for resource_spans in whole["resourceSpans"]:
            kept = [item for item in resource_spans["resource"].get("attributes", []) if item["key"] != "route"]
            resource_spans["resource"]["attributes"] = [*kept, *attributes({"route": text(route)})]
        return json.dumps(whole).encode()

    assert count > 0
    require_equal(*routes.rows("traces", body, count, JSON), count)


@pytest.mark.parametrize("odd", [0, 0.1, 1])
@pytest.mark.parametrize("seed", range(3))
def test_random_spans_give_same_rows_by_collector_and_receivers(routes: Routes, seed: int, odd: float) -> None:
    request = traces(seed, 200, odd)

    def body(route: str) -> bytes:
        named = ExportTraceServiceRequest.FromString(request.SerializeToString())
        for resource_spans in named.resource_spans:
            resource_spans.resource.attributes.add(key="route").value.string_value = route
        return named.SerializeToString()

    require_equal(*routes.rows("traces", body, 200), 200)


@pytest.mark.parametrize("odd", [0, 0.1, 1])
@pytest.mark.parametrize("seed", range(2))
def test_random_log_records_give_same_rows_by_collector_and_receivers(routes: Routes, seed: int, odd: float) -> None:
    request = logs(seed, 200, odd)

    def body(route: str) -> bytes:
        named = ExportLogsServiceRequest.FromString(request.SerializeToString())
        for resource_logs in named.resource_logs:
            resource_logs.resource.attributes.add(key="route").value.string_value = route
        return named.SerializeToString()

    require_equal(*routes.rows("logs", body, 200), 200)


# --- chosen oddities, as OTLP/JSON ---


def text(value: str) -> dict[str, Any]:
    return {"stringValue": value}


def array(*values: dict[str, Any]) -> dict[str, Any]:
    return {"arrayValue": {"values": list(values)}}


def attributes(values: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


VALUES = attributes(
    {
        "text": text("é<>&\u2028"),
        "halves of surrogate pairs": text("cut \ud83d, \ude00\ud83d, \\ud83d, \U0001f600"),
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


def resource(route: str) -> dict[str, Any]:
    return {"attributes": [*attributes({"route": text(route), "service.name": text("agent")}), *VALUES]}


def odd_spans(route: str) -> dict[str, Any]:
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
    double = {**ids, "name": "twice", "attributes": [*attributes({"k": text("2")}), *attributes({"k": text("1"), "a": text("1")})]}
    scope = {"name": "scope", "version": "1", "attributes": VALUES}
    numbered = {"attributes": attributes({"route": text(route), "service.name": {"intValue": "5"}})}
    return {
        "resourceSpans": [
            {"resource": resource(route), "schemaUrl": "url", "scopeSpans": [{"scope": scope, "spans": [full, empty, backwards, double]}]},
            {"resource": numbered, "scopeSpans": [{"spans": [{**empty, "name": "numbered service"}]}]},
        ]
    }


def odd_logs(route: str) -> dict[str, Any]:
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
    return {"resourceLogs": [{"resource": resource(route), "schemaUrl": "url", "scopeLogs": scope_logs}]}


@pytest.mark.parametrize(("signal", "request_of", "count"), [("traces", odd_spans, 5), ("logs", odd_logs, 2)], ids=["traces", "logs"])
def test_odd_values_give_same_rows_by_collector_and_receivers(
    routes: Routes, signal: str, request_of: Callable[[str], dict[str, Any]], count: int
) -> None:
    require_equal(*routes.rows(signal, lambda route: json.dumps(request_of(route)).encode(), count, JSON), count)
