"""Rows: what was encoded comes back, by either OTLP encoding."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from collector.otlp.decode import JSON, PROTOBUF, UndecodableError, decode
from collector.otlp.rows import Rows, encode_logs, encode_traces, unstorable


class RowReader:
    """Reads RowBinary."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def take(self, size: int) -> bytes:
        raw = self.data[self.place : self.place + size]
        assert len(raw) == size
        self.place += size
        return raw

    def varint(self) -> int:
        number = shift = 0
        while (byte := self.take(1)[0]) & 128:
            number |= (byte & 127) << shift
            shift += 7
        return number | byte << shift

    def text(self) -> str:
        return self.take(self.varint()).decode()

    def number(self, form: str) -> int:
        (number,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(number)

    def time(self) -> int:
        return self.number("<q")

    def map(self) -> list[tuple[str, str]]:
        return [(self.text(), self.text()) for _ in range(self.varint())]

    def array(self, read: Any) -> list[Any]:
        return [read() for _ in range(self.varint())]

    def span(self) -> dict[str, Any]:
        row: dict[str, Any] = {"Timestamp": self.time()}
        row |= {name: self.text() for name in ("TraceId", "SpanId", "ParentSpanId", "TraceState", "SpanName", "SpanKind", "ServiceName")}
        row["ResourceAttributes"] = self.map()
        row |= {"ScopeName": self.text(), "ScopeVersion": self.text(), "SpanAttributes": self.map(), "Duration": self.number("<Q")}
        row |= {"StatusCode": self.text(), "StatusMessage": self.text()}
        row["Events"] = (self.array(self.time), self.array(self.text), self.array(self.map))
        row["Links"] = (self.array(self.text), self.array(self.text), self.array(self.text), self.array(self.map))
        return row

    def log(self) -> dict[str, Any]:
        row: dict[str, Any] = {"Timestamp": self.time(), "TraceId": self.text(), "SpanId": self.text(), "TraceFlags": self.number("<B")}
        row |= {"SeverityText": self.text(), "SeverityNumber": self.number("<B"), "ServiceName": self.text(), "Body": self.text()}
        row |= {"ResourceSchemaUrl": self.text(), "ResourceAttributes": self.map(), "ScopeSchemaUrl": self.text(), "ScopeName": self.text()}
        row |= {"ScopeVersion": self.text(), "ScopeAttributes": self.map(), "LogAttributes": self.map(), "EventName": self.text()}
        return row


def read_spans(rows: Rows) -> list[dict[str, Any]]:
    reader = RowReader(rows.data)
    spans = [reader.span() for _ in range(rows.count)]
    assert reader.place == len(rows.data)
    return spans


def text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def request(*spans: Span, resource: Resource | None = None) -> ExportTraceServiceRequest:
    scope = InstrumentationScope(name="scope", version="1")
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=resource or Resource(), scope_spans=[ScopeSpans(scope=scope, spans=spans)])]
    )


ids = st.sampled_from([b"", bytes(8), bytes(range(1, 9))])
trace_ids = st.sampled_from([b"", bytes(16), bytes(range(16))])
times = st.integers(0, 2**63 - 1)
words = st.text(max_size=300)
attributes = st.dictionaries(words, words, max_size=4).map(lambda pairs: [text(key, value) for key, value in pairs.items()])
spans = st.builds(
    Span,
    trace_id=trace_ids,
    span_id=ids,
    parent_span_id=ids,
    trace_state=words,
    name=words,
    kind=st.integers(0, 5),
    start_time_unix_nano=times,
    end_time_unix_nano=times,
    attributes=attributes,
    status=st.builds(Status, code=st.integers(0, 2), message=words),
    events=st.lists(st.builds(Span.Event, time_unix_nano=times, name=words, attributes=attributes), max_size=3),
    links=st.lists(st.builds(Span.Link, trace_id=trace_ids, span_id=ids, trace_state=words, attributes=attributes), max_size=3),
)


def hexadecimal(raw: bytes) -> str:
    return raw.hex() if any(raw) else ""


def sorted_pairs(items: Any) -> list[tuple[str, str]]:
    return sorted((item.key, item.value.string_value) for item in items)


@given(st.lists(spans, max_size=4), attributes)
def test_encode_traces_random_spans_round_trip(given_spans: list[Span], resource: list[KeyValue]) -> None:
    rows = encode_traces(request(*given_spans, resource=Resource(attributes=resource)))

    assert read_spans(rows) == [
        {
            "Timestamp": span.start_time_unix_nano,
            "TraceId": hexadecimal(span.trace_id),
            "SpanId": hexadecimal(span.span_id),
            "ParentSpanId": hexadecimal(span.parent_span_id),
            "TraceState": span.trace_state,
            "SpanName": span.name,
            "SpanKind": ["Unspecified", "Internal", "Server", "Client", "Producer", "Consumer"][span.kind],
            "ServiceName": dict(sorted_pairs(resource)).get("service.name", ""),
            "ResourceAttributes": sorted_pairs(resource),
            "ScopeName": "scope",
            "ScopeVersion": "1",
            "SpanAttributes": sorted_pairs(span.attributes),
            "Duration": (span.end_time_unix_nano - span.start_time_unix_nano) % 2**64,
            "StatusCode": ["Unset", "Ok", "Error"][span.status.code],
            "StatusMessage": span.status.message,
            "Events": (
                [event.time_unix_nano for event in span.events],
                [event.name for event in span.events],
                [sorted_pairs(event.attributes) for event in span.events],
            ),
            "Links": (
                [hexadecimal(link.trace_id) for link in span.links],
                [hexadecimal(link.span_id) for link in span.links],
                [link.trace_state for link in span.links],
                [sorted_pairs(link.attributes) for link in span.links],
            ),
        }
        for span in given_spans
    ]


def test_encode_traces_rows_of_several_requests_can_be_joined() -> None:
    first, second = encode_traces(request(Span(name="a"))), encode_traces(request(Span(name="b"), Span(name="c")))

    joined = read_spans(Rows(first.data + second.data, 3))

    assert [row["SpanName"] for row in joined] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Span(name="bad", trace_id=b"\x01\x02"), "span 'bad': id 0102 has 2 bytes, 16 are right"),
        (Span(name="bad", start_time_unix_nano=2**63), "span 'bad': time 9223372036854775808 ns after 1970 is later than the year 2262"),
        (Span(name="bad", links=[Span.Link(span_id=b"\x01")]), "span 'bad': id 01 has 1 bytes, 8 are right"),
    ],
)
def test_encode_traces_unstorable_span_is_rejected_alone(bad: Span, reason: str) -> None:
    rows = encode_traces(request(Span(name="before"), bad, Span(name="after")))

    assert [row["SpanName"] for row in read_spans(rows)] == ["before", "after"]
    assert (rows.rejected, rows.reason) == (1, reason)


@pytest.mark.parametrize("bad", [Span(name="x" * 10**6, trace_id=b"\1"), Span(name="bad", trace_id=bytes(10**6))], ids=["name", "id"])
def test_encode_traces_reason_of_huge_span_is_short(bad: Span) -> None:
    rows, (reason,) = encode_traces(request(bad)), unstorable(request(bad))

    assert rows.reason == reason
    assert len(reason) < 500


def test_encode_logs_reason_of_huge_record_is_short() -> None:
    logs = ResourceLogs(scope_logs=[ScopeLogs(log_records=[LogRecord(event_name="x" * 10**6, span_id=b"\1")])])

    assert len(encode_logs(ExportLogsServiceRequest(resource_logs=[logs])).reason) < 500


IDS = st.sampled_from([b"", bytes(8), bytes(16), bytes(range(8)), bytes(range(16)), b"\x01"])
TIMES = st.sampled_from([0, 2**63 - 1, 2**63, 2**64 - 1])
ANY_SPANS = st.builds(
    Span,
    name=st.sampled_from(["a", "b"]),
    trace_id=IDS,
    span_id=IDS,
    parent_span_id=IDS,
    start_time_unix_nano=TIMES,
    events=st.lists(st.builds(Span.Event, time_unix_nano=TIMES), max_size=2),
    links=st.lists(st.builds(Span.Link, trace_id=IDS, span_id=IDS), max_size=2),
)


@given(st.lists(ANY_SPANS, max_size=6))
def test_unstorable_agrees_with_encode_traces(spans: list[Span]) -> None:
    rows, reasons = encode_traces(request(*spans)), unstorable(request(*spans))

    assert (rows.rejected, rows.reason) == (len(reasons), reasons[0] if reasons else "")


def test_decode_json_half_of_surrogate_pair_becomes_replacement() -> None:
    body = rb'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "cut \ud83d", "traceState": "\\ud83d \ud83d\ude00 \ude00"}]}]}]}'
    (span,) = decode(ExportTraceServiceRequest, body, JSON)[0].resource_spans[0].scope_spans[0].spans

    assert (span.name, span.trace_state) == ("cut \ufffd", "\\ud83d \U0001f600 \ufffd")


def test_decode_protobuf_text_that_is_no_utf8_is_replaced_and_bytes_are_kept() -> None:
    kept = b"\xed\xa0\xbd\xff"
    span = Span(
        name="cut ???", attributes=[KeyValue(key="ids", value=AnyValue(bytes_value=kept)), text("text", "a ???"), text("b", "\u20ac")]
    )
    body = request(span, resource=Resource(attributes=[text("service.name", "???")])).SerializeToString().replace(b"???", b"\xed\xa0\xbd")
    message, wire = decode(ExportTraceServiceRequest, body, PROTOBUF)
    (read,) = message.resource_spans[0].scope_spans[0].spans

    lost = "\ufffd" * 3
    assert (read.name, message.resource_spans[0].resource.attributes[0].value.string_value) == (f"cut {lost}", lost)
    assert [item.value for item in read.attributes] == [
        AnyValue(bytes_value=kept),
        AnyValue(string_value=f"a {lost}"),
        AnyValue(string_value="\u20ac"),
    ]
    assert message == ExportTraceServiceRequest.FromString(wire)


OTLP_JSON = """{"resourceSpans": [{
  "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "agent"}}]}, "scopeSpans": [{
  "scope": {"name": "spangrad.gateway", "version": "1"}, "spans": [{
    "traceId": "0102030405060708090A0B0C0D0E0F10", "spanId": "0102030405060708", "parentSpanId": "", "name": "chat", "kind": %s,
    "startTimeUnixNano": %s, "endTimeUnixNano": "1700000000000000100", "status": {"code": %s, "message": "m"}, "unknownField": 1,
    "attributes": [{"key": "ids", "value": {"bytesValue": "AQAAAAIAAAA="}}, {"key": "n", "value": {"intValue": %s}}],
    "events": [{"timeUnixNano": "1700000000000000050", "name": "e"}],
    "links": [{"traceId": "0102030405060708090a0b0c0d0e0f10", "spanId": "0102030405060709"}]}]}]}]}"""


@pytest.mark.parametrize(
    ("kind", "start", "code", "number"),
    [("3", '"1700000000000000001"', "2", '"7"'), ('"SPAN_KIND_CLIENT"', "1700000000000000001", '"STATUS_CODE_ERROR"', "7")],
)
def test_decode_json_and_protobuf_give_same_rows(kind: str, start: str, code: str, number: str) -> None:
    from_json = encode_traces(decode(ExportTraceServiceRequest, (OTLP_JSON % (kind, start, code, number)).encode(), JSON)[0])
    span = Span(
        trace_id=bytes(range(1, 17)),
        span_id=bytes(range(1, 9)),
        name="chat",
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=1700000000000000001,
        end_time_unix_nano=1700000000000000100,
        status=Status(code=Status.STATUS_CODE_ERROR, message="m"),
        attributes=[
            KeyValue(key="ids", value=AnyValue(bytes_value=b"\x01\0\0\0\x02\0\0\0")),
            KeyValue(key="n", value=AnyValue(int_value=7)),
        ],
        events=[Span.Event(time_unix_nano=1700000000000000050, name="e")],
        links=[Span.Link(trace_id=bytes(range(1, 17)), span_id=bytes([*range(1, 8), 9]))],
    )
    message = request(span, resource=Resource(attributes=[text("service.name", "agent")]))
    message.resource_spans[0].scope_spans[0].scope.name = "spangrad.gateway"

    assert from_json == encode_traces(decode(ExportTraceServiceRequest, message.SerializeToString(), PROTOBUF)[0])
    assert read_spans(from_json) == [
        {
            "Timestamp": 1700000000000000001,
            "TraceId": "0102030405060708090a0b0c0d0e0f10",
            "SpanId": "0102030405060708",
            "ParentSpanId": "",
            "TraceState": "",
            "SpanName": "chat",
            "SpanKind": "Client",
            "ServiceName": "agent",
            "ResourceAttributes": [("service.name", "agent")],
            "ScopeName": "spangrad.gateway",
            "ScopeVersion": "1",
            "SpanAttributes": [("ids", "AQAAAAIAAAA="), ("n", "7")],
            "Duration": 99,
            "StatusCode": "Error",
            "StatusMessage": "m",
            "Events": ([1700000000000000050], ["e"], [[]]),
            "Links": (["0102030405060708090a0b0c0d0e0f10"], ["0102030405060709"], [""], [[]]),
        }
    ]


@given(spans)
def test_decode_json_of_random_span_gives_same_rows(span: Span) -> None:
    message = request(span)
    tree = json_format.MessageToDict(message)
    written = tree["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    for node, original in ((written, span), *zip(written.get("links", []), span.links, strict=True)):
        for key, field in (("traceId", "trace_id"), ("spanId", "span_id"), ("parentSpanId", "parent_span_id")):
            if key in node:
                node[key] = getattr(original, field).hex()

    body = json_format.json.dumps(tree).encode()

    assert encode_traces(decode(ExportTraceServiceRequest, body, JSON)[0]) == encode_traces(message)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"\xff\xff", PROTOBUF, "the body is not a protobuf ExportTraceServiceRequest"),
        (b"{", JSON, "the body is not JSON"),
        (b'{"a": "\xff"}', JSON, "the body is not JSON: 'utf-8'"),
        (b"[" * 5000, JSON, "the body is not JSON: maximum recursion depth exceeded"),
        (b"[]", JSON, "the body is not an OTLP/JSON ExportTraceServiceRequest: it is no object"),
        (b'{"resourceSpans": 3}', JSON, "the body is not an OTLP/JSON ExportTraceServiceRequest"),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"xy"}]}]}]}', JSON, "traceId 'xy' is not hexadecimal"),
    ],
)
def test_decode_undecodable_body_raises(body: bytes, kind: str, message: str) -> None:
    with pytest.raises(UndecodableError, match=message):
        decode(ExportTraceServiceRequest, body, kind)


def test_encode_logs_gives_rows() -> None:
    named = LogRecord(
        time_unix_nano=5,
        observed_time_unix_nano=6,
        severity_number=LogRecord(severity_number=9).severity_number,
        severity_text="INFO",
        body=AnyValue(string_value="hello"),
        attributes=[text("b", "2"), text("a", "1")],
        flags=257,
        trace_id=bytes(range(16)),
        span_id=bytes(range(1, 9)),
        event_name="gen_ai.evaluation.result",
    )
    older = LogRecord(observed_time_unix_nano=6, body=AnyValue(int_value=3), attributes=[text("event.name", "older")])
    logs = ExportLogsServiceRequest(
        resource_logs=[
            ResourceLogs(
                resource=Resource(attributes=[text("service.name", "agent")]),
                schema_url="resource",
                scope_logs=[
                    ScopeLogs(
                        scope=InstrumentationScope(name="scope", version="1", attributes=[text("k", "v")]),
                        schema_url="scope",
                        log_records=[named, older],
                    )
                ],
            )
        ]
    )

    rows = encode_logs(logs)
    reader = RowReader(rows.data)

    shared = {
        "ServiceName": "agent",
        "ResourceSchemaUrl": "resource",
        "ResourceAttributes": [("service.name", "agent")],
        "ScopeSchemaUrl": "scope",
        "ScopeName": "scope",
        "ScopeVersion": "1",
        "ScopeAttributes": [("k", "v")],
    }
    assert [reader.log(), reader.log()] == [
        {
            "Timestamp": 5,
            "TraceId": bytes(range(16)).hex(),
            "SpanId": "0102030405060708",
            "TraceFlags": 1,
            "SeverityText": "INFO",
            "SeverityNumber": 9,
            "Body": "hello",
            "LogAttributes": [("a", "1"), ("b", "2")],
            "EventName": "gen_ai.evaluation.result",
            **shared,
        },
        {
            "Timestamp": 6,
            "TraceId": "",
            "SpanId": "",
            "TraceFlags": 0,
            "SeverityText": "",
            "SeverityNumber": 0,
            "Body": "3",
            "LogAttributes": [("event.name", "older")],
            "EventName": "",
            **shared,
        },
    ]
    assert (rows.count, reader.place) == (2, len(rows.data))
