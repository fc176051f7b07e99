"""OTLP of tests: requests at random, ordinary and odd, their packings, a server that keeps the spans it gets, a full disk.

Invariant: requests are the same for the same seed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, Self

import clickhouse_cityhash.cityhash as cityhash
import lz4.frame
import pytest
from backports import zstd
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from gateway.recorder import exporter

DEPTH = 3
_DAYS = tuple(day * 86_400 * 10**9 for day in (0, 1, 15_000, 19_000, 19_001, 19_002))
_LETTERS = (
    "abcXYZ 0123.-_",
    "quoted \"\\/ <a href='x'>&amp;",
    "\x00\x01\x07\b\t\n\v\f\r\x1b\x1f\x7f\x80\x9f",
    "éßñ日本語 العربية \u2028\u2029\u200b\ufeff\ufffd",
    "\U0001f600\U0001f468\u200d\U0001f469 e\u0301",
)
_INTS = (0, 1, -1, 42, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
_DOUBLES = (
    *(0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3, 1e-6, 9.99e-7, 1.5e-7, 123456789.0, 1e15, 1e16, 1e20, 1e21, -1e22, 5e-324, 1.7976931348623157e308),
    *(float("nan"), float("inf"), float("-inf"), 2.0**53, 4.35, 100.0, 1e100),
)
_KEYS = (
    *("llm.model_name", "gen_ai.request.model", "input.value", "output.value", "http.status", "Upper", "upper", "a.b", "a.b.c", "é"),
    *("", " ", "session.id", "openinference.span.kind", "k" * 200),
)
_ODD_ENUMS = (-3, 6, 99, 2**31 - 1)


class _Random(Random):
    """Dice that know how often things are odd."""

    def __init__(self, seed: int, odd: float) -> None:
        super().__init__(seed)
        self.odd = odd

    def flat(self) -> bool:
        """Draw whether the next thing holds flat values only: texts, numbers, booleans, bytes, arrays of texts."""
        return self.random() >= self.odd


def traces(seed: int, spans: int, odd: float) -> ExportTraceServiceRequest:
    """A request with that many spans; of their resources, scopes and themselves the share `odd` holds more than flat values."""
    random, request, added = _Random(seed, odd), ExportTraceServiceRequest(), 0
    while added < spans:
        resource = ResourceSpans(schema_url=_text(random), resource=_resource(random))
        for _ in range(random.randint(0, 2)):
            count = min(random.randint(0, 8), spans - added)
            scope = ScopeSpans(schema_url=_text(random), scope=_scope(random) if random.random() < 0.8 else None)
            scope.spans.extend(_span(random, added + i) for i in range(count))
            resource.scope_spans.append(scope)
            added += count
        request.resource_spans.append(resource)
    return request


def logs(seed: int, records: int, odd: float) -> ExportLogsServiceRequest:
    """A request with that many log records; `odd` as for `traces`."""
    random, request, added = _Random(seed, odd), ExportLogsServiceRequest(), 0
    while added < records:
        resource = ResourceLogs(schema_url=_text(random), resource=_resource(random))
        for _ in range(random.randint(0, 2)):
            count = min(random.randint(0, 8), records - added)
            scope = ScopeLogs(schema_url=_text(random), scope=_scope(random) if random.random() < 0.8 else None)
            scope.log_records.extend(_record(random, added + i) for i in range(count))
            resource.scope_logs.append(scope)
            added += count
        request.resource_logs.append(resource)
    return request


def _span(random: _Random, number: int) -> Span:
    flat = random.flat()
    start = _time(random)
    span = Span(
        trace_id=_id(random, 16),
        span_id=_id(random, 8),
        parent_span_id=_id(random, 8),
        trace_state=random.choice(("", "a=b", "vendor=é,other=1")),
        flags=random.choice((0, 1, 0x301)),
        name=f"{number:06d} {_text(random)}",
        start_time_unix_nano=start,
        end_time_unix_nano=start + random.choice((0, 1, 10**9, -min(start, 50), 3 * 10**18)),
        attributes=_attributes(random, flat),
        dropped_attributes_count=random.choice((0, 0, 0, 7)),
    )
    # Enumerations are open: a newer sender may know more members.
    span.kind = random.choice((*range(6), *_ODD_ENUMS)) if not flat else random.randint(0, 5)  # type: ignore[assignment]
    if random.random() < 0.7:
        code = random.choice((0, 1, 2, *_ODD_ENUMS)) if not flat else random.randint(0, 2)
        span.status.CopyFrom(Status(code=code, message=_text(random)))  # type: ignore[arg-type]
    for _ in range(random.choice((0, 0, 1, 3))):
        span.events.add(time_unix_nano=_time(random), name=_text(random), attributes=_attributes(random, flat), dropped_attributes_count=1)
    for _ in range(random.choice((0, 0, 1, 3))):
        span.links.add(trace_id=_id(random, 16), span_id=_id(random, 8), trace_state=_text(random), attributes=_attributes(random, flat))
    return span


def _record(random: _Random, number: int) -> LogRecord:
    flat = random.flat()
    record = LogRecord(
        time_unix_nano=random.choice((0, _time(random))),
        observed_time_unix_nano=_time(random),
        severity_text=_text(random),
        attributes=[KeyValue(key="case", value=AnyValue(string_value=f"{number:06d}")), *_attributes(random, flat)],
        flags=random.choice((0, 1, 255, 256, 0x1FF, 2**32 - 1)),
        trace_id=_id(random, 16),
        span_id=_id(random, 8),
        event_name=random.choice(("", _text(random))),
    )
    record.severity_number = random.choice((0, 1, 9, 24, 25, 255, 256, 1000))  # type: ignore[assignment]
    if random.random() < 0.9:
        record.body.CopyFrom(_value(random, flat))
    if random.random() < 0.2:
        record.attributes.append(KeyValue(key="event.name", value=_value(random, flat)))
    return record


def _resource(random: _Random) -> Resource:
    resource = Resource(attributes=_attributes(random, random.flat()))
    if random.random() < 0.8:
        service = AnyValue(string_value=_text(random)) if random.random() < 0.8 else _value(random, random.flat())
        resource.attributes.append(KeyValue(key="service.name", value=service))
    return resource


def _scope(random: _Random) -> InstrumentationScope:
    return InstrumentationScope(
        name=random.choice(("", "openinference.instrumentation.openai", _text(random))),
        version=random.choice(("", "1.2")),
        attributes=_attributes(random, random.flat()),
    )


def _attributes(random: _Random, flat: bool) -> list[KeyValue]:
    """Some pairs; keys may come twice, and values may be missing."""
    count = random.choice((0, 1, 3, 8))
    return [KeyValue(key=_key(random), value=_value(random, flat)) for _ in range(count)]


def _key(random: _Random) -> str:
    return random.choice(_KEYS) if random.random() < 0.8 else _text(random)


def _value(random: _Random, flat: bool, depth: int = DEPTH) -> AnyValue:
    if flat:
        return random.choice((_string, _string, _number, _bytes, _strings))(random)
    makers: list[Callable[[_Random], AnyValue]] = [_string, _number, _bytes, _strings, lambda _: AnyValue()]
    if depth:
        makers += [lambda r: _array(r, depth - 1), lambda r: _pairs(r, depth - 1)]
    return random.choice(makers)(random)


def _string(random: _Random) -> AnyValue:
    return AnyValue(string_value=_text(random))


def _number(random: _Random) -> AnyValue:
    match random.randrange(5):
        case 0:
            return AnyValue(bool_value=random.random() < 0.5)
        case 1:
            return AnyValue(int_value=random.choice(_INTS))
        case 2:
            return AnyValue(int_value=random.randint(-(2**63), 2**63 - 1))
        case 3:
            return AnyValue(double_value=random.choice(_DOUBLES))
        case _:
            # Any bits: each magnitude is as likely as another.
            return AnyValue(double_value=struct.unpack("<d", random.randbytes(8))[0])


def _bytes(random: _Random) -> AnyValue:
    return AnyValue(bytes_value=random.randbytes(random.choice((0, 1, 2, 3, 4, 400))))


def _strings(random: _Random) -> AnyValue:
    return AnyValue(array_value=ArrayValue(values=[_string(random) for _ in range(random.choice((0, 1, 4)))]))


def _array(random: _Random, depth: int) -> AnyValue:
    return AnyValue(array_value=ArrayValue(values=[_value(random, flat=False, depth=depth) for _ in range(random.randint(0, 4))]))


def _pairs(random: _Random, depth: int) -> AnyValue:
    pairs = [KeyValue(key=_key(random), value=_value(random, flat=False, depth=depth)) for _ in range(random.randint(0, 4))]
    return AnyValue(kvlist_value=KeyValueList(values=pairs))


def _text(random: _Random) -> str:
    letters = _LETTERS[0] if random.random() < 0.5 else random.choice(_LETTERS)
    return "".join(random.choices(letters, k=random.choice((0, 1, 5, 20, 300))))


def _time(random: _Random) -> int:
    return random.choice(_DAYS) + random.randrange(86_400 * 10**9) if random.random() < 0.95 else 0


def _id(random: _Random, size: int) -> bytes:
    kind = random.random()
    return random.randbytes(size) if kind < 0.9 else bytes(size) if kind < 0.95 else b""


# Bodies as they are sent: packed, and in frames of ClickHouse's.

LZ4, ZSTD, PLAIN = 0x82, 0x90, 0x02
"""Methods of ClickHouse's frames."""


def packed(encoding: str, body: bytes) -> bytes:
    """A body, packed as it should be; with a checksum where the encoding knows one."""
    match encoding:
        case "gzip":
            packer = zlib.compressobj(6, wbits=16 + zlib.MAX_WBITS)
            return packer.compress(body) + packer.flush()
        case "deflate":
            return zlib.compress(body)
        case "zstd":
            return zstd.compress(body, options={zstd.CompressionParameter.checksum_flag: 1})
        case "lz4":
            return lz4.frame.compress(body, content_checksum=True)
        case _:
            raise ValueError(encoding)


def frame(method: int, payload: bytes, *, size: int, packed_size: int | None = None) -> bytes:
    """A frame of ClickHouse's with a right checksum, whatever its sizes say: `size` unpacked, `packed_size` of it all if not its own."""
    framed = struct.pack("<BII", method, len(payload) + 9 if packed_size is None else packed_size, size) + payload
    number: int = cityhash.CityHash128(framed)
    return struct.pack("<QQ", number >> 64, number & (2**64 - 1)) + framed


# Servers in threads that stand for others: a sink of OTLP for a store, attempts' announcements for a gateway.


class HttpServer:
    """A small HTTP server in a thread of its own; a subclass answers with (status, headers, body)."""

    def __init__(self, port: int = 0) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, headers, answer = fake.answer(self.command, self.path, dict(self.headers.items()), body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = _handle  # noqa: N815  # http.server's names

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class SunkSpan:
    """A span as it arrived at an OtlpSink; ids are hex, a root's parent is ''."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    status: str
    attributes: dict[str, object]
    events: tuple[tuple[str, dict[str, object]], ...]
    service: str
    scope: str
    began: int
    seconds: float


class OtlpSink(HttpServer):
    """Takes spans by OTLP/HTTP, or answers with `refusals` (status, headers) first; `requests` holds each request's headers."""

    def __init__(self, port: int = 0, refusals: Sequence[tuple[int, dict[str, str]]] = ()) -> None:
        self.spans: list[SunkSpan] = []
        self.requests: list[dict[str, str]] = []
        self.refusals = list(refusals)
        self.changed = threading.Condition()
        super().__init__(port)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        with self.changed:
            self.requests.append({name.lower(): value for name, value in headers.items()})
            self.changed.notify_all()
            if path != "/v1/traces":
                return 404, {}, b"no such path"
            if self.refusals:
                status, more = self.refusals.pop(0)
                return status, more, b"not now"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = str(_plain(resource.resource.attributes).get("service.name", ""))
                for scope in resource.scope_spans:
                    self.spans += [_sunk(span, service, scope.scope.name) for span in scope.spans]
            self.changed.notify_all()
        return 200, {"content-type": "application/x-protobuf"}, b""

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), f"not within {seconds} s; names so far: {[span.name for span in self.spans]}"

    def named(self, name: str) -> list[SunkSpan]:
        with self.changed:
            return [span for span in self.spans if span.name == name]


def _plain(attributes: Iterable[Any]) -> dict[str, object]:
    return {attribute.key: _plain_value(attribute.value) for attribute in attributes}


def _plain_value(value: Any) -> object:
    kind = value.WhichOneof("value")
    return [_plain_value(child) for child in value.array_value.values] if kind == "array_value" else getattr(value, kind) if kind else None


def _sunk(span: Any, service: str, scope: str) -> SunkSpan:
    return SunkSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        status={0: "UNSET", 1: "OK", 2: "ERROR"}[span.status.code],
        attributes=_plain(span.attributes),
        events=tuple((event.name, _plain(event.attributes)) for event in span.events),
        service=service,
        scope=scope,
        began=span.start_time_unix_nano,
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


class FullDisk:
    """A disk of the gateway that takes no span while it is full."""

    def __init__(self, patch: pytest.MonkeyPatch, *, full: bool = True) -> None:
        self.full = full
        self.refused = asyncio.Event()
        self._writev = os.writev
        patch.setattr(os, "writev", self._write)
        patch.setattr(exporter, "DISK_PAUSE_SECONDS", 0.01)

    def _write(self, file: int, parts: tuple[bytes, bytes]) -> int:
        if self.full:
            self.refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._writev(file, parts)
