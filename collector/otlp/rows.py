"""Encoder of spans and log records: from OTLP messages to RowBinary, in the layout of the Collector's ClickHouse exporter.

Invariant: rows of several requests may simply be concatenated; only a span that no row can hold is rejected, counted and named; so are the
attributes, events and links that a sender had dropped.
"""

from __future__ import annotations

import struct
from binascii import b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.otlp.values import value_text
from spangrad.encoding.varint import varint

TRACES_INSERT = (
    "INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, ParentSpanId, TraceState, SpanName, SpanKind, ServiceName,"
    " ResourceAttributes, ScopeName, ScopeVersion, SpanAttributes, Duration, StatusCode, StatusMessage,"
    " `Events.Timestamp`, `Events.Name`, `Events.Attributes`, `Links.TraceId`, `Links.SpanId`, `Links.TraceState`, `Links.Attributes`)"
)
LOGS_INSERT = (
    "INSERT INTO otel.otel_logs (Timestamp, TraceId, SpanId, TraceFlags, SeverityText, SeverityNumber, ServiceName, Body,"
    " ResourceSchemaUrl, ResourceAttributes, ScopeSchemaUrl, ScopeName, ScopeVersion, ScopeAttributes, LogAttributes, EventName)"
)
DROPPED_INSERT = (
    "INSERT INTO spangrad_internal.dropped_attributes"
    " (Signal, Timestamp, ServiceName, ScopeName, Name, TraceId, SpanId, Attributes, Events, Links)"
)

_KINDS = tuple(len(name).to_bytes(1) + name for name in (b"Unspecified", b"Internal", b"Server", b"Client", b"Producer", b"Consumer"))
_STATUS_CODES = tuple(len(name).to_bytes(1) + name for name in (b"Unset", b"Ok", b"Error"))
_EMPTY = b"\0"
_SPAN, _LOG = b"\x04span", b"\x03log"
_LATEST = 2**63 - 1
_CACHED_LENGTH = 128
_REASON_CHARACTERS, _REASON_BYTES = 100, 32
"""Longest parts of a span's name and of an id that a reason repeats: it is answered, to clients that accept 4 MiB by default."""
_KEY = itemgetter(0)
_IDS, _SPAN_IDS = (0, 16), (0, 8)
"""Valid lengths in bytes of trace ids and of span ids."""
_signed = struct.Struct("<q").pack
_unsigned = struct.Struct("<Q").pack
_counts = struct.Struct("<QQQ").pack


class _UnstorableError(ValueError):
    """A span or record that no row can hold."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded rows of one request."""

    data: bytes
    count: int
    rejected: int = 0
    """Number of spans or records that no row can hold."""
    reason: str = ""
    """Reason for the first of them; empty when there is none."""
    dropped: bytes = b""
    """Rows of spangrad_internal.dropped_attributes, for spans and records of which the sender dropped a part."""

    @property
    def size(self) -> int:
        """Return the number of bytes of the rows."""
        return len(self.data)


def encode_traces(request: ExportTraceServiceRequest, selection: Mapping[tuple[int, int], Sequence[int]] | None = None) -> Rows:
    """Encode spans of a request as rows of otel.otel_traces: all of them, or those of a selection.

    A selection has indices of spans, by the indices of their resource and scope, all from 0.
    """
    out: list[bytes] = []
    dropped: list[bytes] = []
    count, refusals = 0, list[str]()
    for resource_place, resource_spans in enumerate(request.resource_spans):
        service, resource = _resource(resource_spans.resource)
        for scope_place, scope_spans in enumerate(resource_spans.scope_spans):
            spans: Iterable[Span] = scope_spans.spans
            if selection is not None:
                spans = [scope_spans.spans[index] for index in selection.get((resource_place, scope_place), ())]
            scope_name = _name(scope_spans.scope.name)
            scope = scope_name + _name(scope_spans.scope.version)
            for span in spans:
                start = len(out)
                try:
                    _span(out, span, service, resource, scope)
                    count += 1
                except _UnstorableError as error:
                    del out[start:]
                    refusals.append(_refusal("span", span.name, error))
                    continue
                if counts := _dropped_counts(span):
                    dropped += (_SPAN, _time(span.start_time_unix_nano), service, scope_name, _name(span.name))
                    dropped += (_id(span.trace_id, 16), _id(span.span_id, 8), counts)
    return Rows(b"".join(out), count, len(refusals), refusals[0] if refusals else "", b"".join(dropped))


def unstorable(request: ExportTraceServiceRequest) -> list[str]:
    """Return the reason for each span that no row can hold: those that `encode_traces` rejects."""
    return [
        reason
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
        # A fast check first, which nearly every span passes.
        if not (
            len(span.trace_id) in _IDS
            and len(span.span_id) in _SPAN_IDS
            and len(span.parent_span_id) in _SPAN_IDS
            and span.start_time_unix_nano <= _LATEST
            and not span.events
            and not span.links
        )
        and (reason := _unstorable(span))
    ]


def encode_logs(request: ExportLogsServiceRequest) -> Rows:
    """Encode every log record of a request as a row of otel.otel_logs."""
    out: list[bytes] = []
    dropped: list[bytes] = []
    count, refusals = 0, list[str]()
    for resource_logs in request.resource_logs:
        service, resource = _resource(resource_logs.resource)
        resource = _name(resource_logs.schema_url) + resource
        for scope_logs in resource_logs.scope_logs:
            scope = b"".join(
                (
                    _name(scope_logs.schema_url),
                    _name(scope_logs.scope.name),
                    _name(scope_logs.scope.version),
                    _map(scope_logs.scope.attributes),
                )
            )
            for record in scope_logs.log_records:
                start = len(out)
                try:
                    _record(out, record, service, resource + scope)
                    count += 1
                except _UnstorableError as error:
                    del out[start:]
                    refusals.append(_refusal("log record", record.event_name, error))
                    continue
                if record.dropped_attributes_count:
                    dropped += (_LOG, _record_time(record), service, _name(scope_logs.scope.name), _name(record.event_name))
                    dropped += (_id(record.trace_id, 16), _id(record.span_id, 8), _counts(record.dropped_attributes_count, 0, 0))
    return Rows(b"".join(out), count, len(refusals), refusals[0] if refusals else "", b"".join(dropped))


def _unstorable(span: Span) -> str:
    """Return the reason why no row can hold a span; empty when one can."""
    # In the order of `_span`, so that both give the same reason.
    try:
        _time(span.start_time_unix_nano)
        _id(span.trace_id, 16)
        _id(span.span_id, 8)
        _id(span.parent_span_id, 8)
        for event in span.events:
            _time(event.time_unix_nano)
        for link in span.links:
            _id(link.trace_id, 16)
        for link in span.links:
            _id(link.span_id, 8)
    except _UnstorableError as error:
        return _refusal("span", span.name, error)
    return ""


def _refusal(kind: str, name: str, error: _UnstorableError) -> str:
    return f"{kind} {name[:_REASON_CHARACTERS]!r}: {error}"


def _span(out: list[bytes], span: Span, service: bytes, resource: bytes, scope: bytes) -> None:
    put = out.append
    start = span.start_time_unix_nano
    put(_time(start))
    put(_id(span.trace_id, 16))
    put(_id(span.span_id, 8))
    put(_id(span.parent_span_id, 8))
    put(_name(span.trace_state))
    put(_name(span.name))
    put(_KINDS[span.kind] if 0 <= span.kind < len(_KINDS) else _EMPTY)
    put(service)
    put(resource)
    put(scope)
    _put_map(out, span.attributes)
    # A clock set back inside the span: the exporter, too, keeps the difference modulo 2^64.
    put(_unsigned((span.end_time_unix_nano - start) % 2**64))
    put(_STATUS_CODES[span.status.code] if 0 <= span.status.code < len(_STATUS_CODES) else _EMPTY)
    put(_string(span.status.message.encode()))
    events = span.events
    if events:
        count = varint(len(events))
        put(count)
        out.extend([_time(event.time_unix_nano) for event in events])
        put(count)
        out.extend([_name(event.name) for event in events])
        put(count)
        for event in events:
            _put_map(out, event.attributes)
    else:
        put(b"\0\0\0")
    links = span.links
    if links:
        count = varint(len(links))
        put(count)
        out.extend([_id(link.trace_id, 16) for link in links])
        put(count)
        out.extend([_id(link.span_id, 8) for link in links])
        put(count)
        out.extend([_name(link.trace_state) for link in links])
        put(count)
        for link in links:
            _put_map(out, link.attributes)
    else:
        put(b"\0\0\0\0")


def _record(out: list[bytes], record: LogRecord, service: bytes, resource_and_scope: bytes) -> None:
    put = out.append
    put(_record_time(record))
    put(_id(record.trace_id, 16))
    put(_id(record.span_id, 8))
    put((record.flags & 0xFF).to_bytes(1))
    put(_name(record.severity_text))
    put((record.severity_number & 0xFF).to_bytes(1))
    put(service)
    put(_string(value_text(record.body).encode()))
    put(resource_and_scope)
    _put_map(out, record.attributes)
    put(_name(record.event_name))


def _dropped_counts(span: Span) -> bytes:
    """Return the encoded numbers of attributes, events and links that the sender dropped; empty when none."""
    attributes = span.dropped_attributes_count
    if span.events:
        attributes += sum(event.dropped_attributes_count for event in span.events)
    if span.links:
        attributes += sum(link.dropped_attributes_count for link in span.links)
    if not (attributes or span.dropped_events_count or span.dropped_links_count):
        return b""
    return _counts(attributes, span.dropped_events_count, span.dropped_links_count)


def _resource(resource: Resource) -> tuple[bytes, bytes]:
    """Return ServiceName and ResourceAttributes, as encoded in every row of the resource."""
    service = next((value_text(item.value) for item in resource.attributes if item.key == "service.name"), "")
    return _name(service), _map(resource.attributes)


def _map(attributes: Iterable[KeyValue]) -> bytes:
    out: list[bytes] = []
    _put_map(out, attributes)
    return b"".join(out)


def _put_map(out: list[bytes], attributes: Iterable[KeyValue]) -> None:
    items = [(item.key, item.value) for item in attributes]
    # The exporter sorts by key; of equal keys it keeps all, in their order.
    items.sort(key=_KEY)
    out.append(varint(len(items)))
    for key, value in items:
        kind = value.WhichOneof("value")
        if kind == "string_value":
            raw = value.string_value.encode()
        elif kind == "bytes_value":
            raw = b2a_base64(value.bytes_value, newline=False)
        else:
            raw = value_text(value).encode()
        out.append(_name(key))
        out.append(varint(len(raw)))
        out.append(raw)


def _record_time(record: LogRecord) -> bytes:
    return _time(record.time_unix_nano or record.observed_time_unix_nano)


def _time(nanoseconds: int) -> bytes:
    if nanoseconds > _LATEST:
        raise _UnstorableError(f"time {nanoseconds} ns after 1970 is later than the year 2262")
    return _signed(nanoseconds)


def _id(raw: bytes, size: int) -> bytes:
    if len(raw) == size:
        return varint(2 * size) + raw.hex().encode() if any(raw) else _EMPTY
    if raw:
        raise _UnstorableError(f"id {raw[:_REASON_BYTES].hex()} has {len(raw)} bytes, {size} are right")
    return _EMPTY


def _name(text: str) -> bytes:
    """Encode a string of a small vocabulary, cached: names and keys are repeated often."""
    return _cached_name(text) if len(text) <= _CACHED_LENGTH else _string(text.encode())


@lru_cache(maxsize=8192)
def _cached_name(text: str) -> bytes:
    return _string(text.encode())


def _string(raw: bytes) -> bytes:
    return varint(len(raw)) + raw
