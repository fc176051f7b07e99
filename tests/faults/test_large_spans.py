"""Spans as large, as many-sided and as deep as they come: stored whole, or refused in words, by either decoder."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
import uuid

import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from spangrad.encoding.varint import varint
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.load_spans import JSON, PROTOBUF

TIME = 1_767_614_400_000_000_000
DEPTH = 40
"""Number of lists nested in each other, within the 100 messages that protobuf's own parser allows, at two a list."""
TOO_DEEP = 60

by_each_decoder = pytest.mark.parametrize("company", [0, 1000], ids=["by Python", "by the engine"])
"""Small spans in the same request, from a thousand on decoded by the engine."""


def sent(store: StoreSettings, span: Span, company: int) -> tuple[int, bytes]:
    """Status and body of the answer to a request with the span in company."""
    others = [Span(trace_id=uuid.uuid4().bytes, span_id=b"\2" * 8, name="small", start_time_unix_nano=TIME) for _ in range(company)]
    scope = ScopeSpans(spans=[*others[: company // 2], span, *others[company // 2 :]])
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scope])])
    return answered(store, request.SerializeToString(), PROTOBUF)


def answered(store: StoreSettings, body: bytes, content_type: str) -> tuple[int, bytes]:
    """Status and body of the answer to a body."""
    asked = urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", body, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def stored(store: StoreSettings, span: Span, columns: str) -> list[tuple[object, ...]]:
    """Columns of a span."""
    with connect(store) as client:
        asked = f"SELECT {columns} FROM otel.otel_traces WHERE TraceId = {{id:String}}"
        return [tuple(row) for row in client.query(asked, parameters={"id": span.trace_id.hex()}).result_rows]


def new_span() -> Span:
    return Span(trace_id=uuid.uuid4().bytes, span_id=b"\1" * 8, name="large", start_time_unix_nano=TIME, end_time_unix_nano=TIME)


@by_each_decoder
def test_span_with_values_of_5_megabytes_is_stored_whole(store: StoreSettings, company: int) -> None:
    span, text, raw = new_span(), "é" * (5 * 2**19), bytes(range(256)) * (5 * 2**12)
    span.attributes.add(key="text").value.string_value = text
    span.attributes.add(key="raw").value.bytes_value = raw
    span.status.message = text

    assert sent(store, span, company) == (200, b"")
    values = "SpanAttributes['text']", "base64Decode(SpanAttributes['raw'])", "StatusMessage"
    digests = tuple(hashlib.sha256(value).hexdigest() for value in (text.encode(), raw, text.encode()))
    assert stored(store, span, ", ".join(f"lower(hex(SHA256({value})))" for value in values)) == [digests]


@by_each_decoder
def test_span_with_50000_attributes_is_stored_whole(store: StoreSettings, company: int) -> None:
    span = new_span()
    span.attributes.extend(KeyValue(key=f"key {number:05d}", value=AnyValue(int_value=number)) for number in range(50_000))

    assert sent(store, span, company) == (200, b"")
    columns = "mapKeys(SpanAttributes) = arrayMap(n -> concat('key ', leftPad(toString(n), 5, '0')), range(50000))"
    values = "mapValues(SpanAttributes) = arrayMap(n -> toString(n), range(50000))"
    assert stored(store, span, f"{columns}, {values}") == [(1, 1)]


@by_each_decoder
def test_span_with_10000_events_and_links_is_stored_whole(store: StoreSettings, company: int) -> None:
    span = new_span()
    for number in range(10_000):
        event = span.events.add(name=f"event {number}", time_unix_nano=TIME + number)
        event.attributes.add(key="n").value.int_value = number
        span.links.add(trace_id=span.trace_id, span_id=number.to_bytes(8) if number else b"\3" * 8)

    assert sent(store, span, company) == (200, b"")
    columns = (
        "Events.Name = arrayMap(n -> concat('event ', toString(n)), range(10000)), arrayMap(m -> m['n'], Events.Attributes) ="
        f" arrayMap(n -> toString(n), range(10000)), toUnixTimestamp64Nano(Events.Timestamp[10000]) = {TIME + 9999},"
        " length(Links.SpanId), Links.SpanId[10000]"
    )
    assert stored(store, span, columns) == [(1, 1, 1, 10_000, f"{9999:016x}")]


@by_each_decoder
def test_span_with_nested_lists_is_stored_whole(store: StoreSettings, company: int) -> None:
    span = new_span()
    _nest(span.attributes.add(key="deep").value, DEPTH)

    assert sent(store, span, company) == (200, b"")
    assert stored(store, span, "SpanAttributes['deep']") == [("[" * DEPTH + '"end"' + "]" * DEPTH,)]


@pytest.mark.parametrize("depth", [TOO_DEEP, 20_000])
def test_otlp_lists_nested_too_deep_answer_400(store: StoreSettings, depth: int) -> None:
    value = b"\x0a\x03end"
    for _ in range(depth):
        # An AnyValue with an ArrayValue with this AnyValue.
        value = _field(0x2A, _field(0x0A, value))
    span = _field(0x0A, uuid.uuid4().bytes) + _field(0x4A, _field(0x0A, b"deep") + _field(0x12, value))

    status, content = answered(store, _field(0x0A, _field(0x12, _field(0x12, span))), PROTOBUF)

    assert (status, Status.FromString(content).message[:38]) == (400, "the body is not a protobuf ExportTrace")


@pytest.mark.parametrize("depth", [TOO_DEEP, 400, 20_000])
def test_otlp_json_lists_nested_too_deep_answer_400(store: StoreSettings, depth: int) -> None:
    value = '{"arrayValue": {"values": [' * depth + '{"stringValue": "end"}' + "]}}" * depth
    span = f'{{"traceId": "{uuid.uuid4().hex}", "spanId": "{"01" * 8}", "attributes": [{{"key": "deep", "value": {value}}}]}}'

    status, content = answered(store, f'{{"resourceSpans": [{{"scopeSpans": [{{"spans": [{span}]}}]}}]}}'.encode(), JSON)

    assert (status, json_format.Parse(content, Status()).message[:12]) == (400, "the body is ")


def test_otlp_body_over_limit_answers_413(store: StoreSettings) -> None:
    span = new_span()
    span.attributes.add(key="text").value.string_value = "x" * (65 * 2**20)

    status, content = sent(store, span, 0)

    assert (status, Status.FromString(content).message) == (413, "the body has more than 67108864 bytes; send smaller ones")


def _nest(value: AnyValue, depth: int) -> None:
    for _ in range(depth):
        value = value.array_value.values.add()
    value.string_value = "end"


def _field(tag: int, content: bytes) -> bytes:
    return bytes((tag,)) + varint(len(content)) + content
