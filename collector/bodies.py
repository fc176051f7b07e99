"""Bodies of trace requests, ready for either road into rows: messages for Python, wire bytes for the engine.

In: a decoded ExportTraceServiceRequest and its bytes. Out: a `TraceBody`, and for a batch of them one ProtobufList.
Invariant: what stands before the engine was read by protobuf's own parser first; every message keeps its place in the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from collector.values import value_text
from collector.varint import varint

_RESOURCE_SPANS = 0x0A
"""Tag of the only field of a request: number 1, with a length."""
_NUMBER, _SERVICE, _TEXT = b"\xc0\x3e", b"\xca\x3e", b"\xd2\x3e"
"""Tags of the fields that spans.proto adds: 1000 (a varint), 1001 and 1002 (with a length)."""
_EMPTY_LIST = re.compile(rb"\x12\x02\x2a\x00")
"""An attribute whose value is a list without items, which the engine can't tell from no value.

A pattern, because `in` takes half as long again for it.
"""
_CACHED_SIZE = 4096
_PIECE = 2**18
"""About how many bytes of a list are handed over at once."""


@dataclass(frozen=True, slots=True)
class TraceBody:
    """One request's spans."""

    request: ExportTraceServiceRequest
    spans: int
    raw: bytes
    """The request as it came, unpacked, or as protobuf writes what came as JSON."""
    wire: tuple[memoryview, ...] | None
    """Each ResourceSpans of it. None: there is something in the body that only Python reads right."""

    @property
    def size(self) -> int:
        """Bytes on the wire, unpacked."""
        return len(self.raw)


def trace_body(request: ExportTraceServiceRequest, wire: bytes) -> TraceBody:
    """Prepare a request.

    Args:
        request: as protobuf's parser read it.
        wire: the same as bytes.
    """
    spans = sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
    parts = None if _EMPTY_LIST.search(wire) else _resource_spans(wire)
    return TraceBody(request, spans, wire, parts)


def protobuf_list(bodies: Iterable[TraceBody], first: int = 0) -> Iterator[bytes]:
    """The ResourceSpans of bodies, numbered from `first`, each with its resource as texts, in the envelope of FORMAT ProtobufList.

    In pieces: as one, it would be written into memory that the process must be given for it.
    """
    out: list[bytes | memoryview] = [b""]
    number = first
    for body in bodies:
        for part, resource_spans in zip(body.wire or (), body.request.resource_spans, strict=True):
            resource = resource_spans.resource.SerializeToString()
            texts = _cached_texts(resource) if len(resource) <= _CACHED_SIZE else _resource_texts(resource)
            ours = b"".join((_NUMBER, varint(number), texts))
            out += (b"\x0a", varint(len(part) + len(ours)), part, ours)
            number += 1
    out[0] = varint(sum(map(len, out)))
    start, size = 0, 0
    for end, part in enumerate(out, 1):
        size += len(part)
        if size >= _PIECE or end == len(out):
            yield b"".join(out[start:end])
            start, size = end, 0


def resources(bodies: Sequence[TraceBody]) -> list[tuple[int, int]]:
    """Of each number of `protobuf_list`, from its first: the place of its body, and its own in the body."""
    return [(place, index) for place, body in enumerate(bodies) for index in range(len(body.request.resource_spans))]


def _resource_spans(wire: bytes) -> tuple[memoryview, ...] | None:
    """The fields of a request; None when there is one that we don't know."""
    parts: list[memoryview] = []
    view = memoryview(wire)
    at, end = 0, len(wire)
    while at < end:
        if wire[at] != _RESOURCE_SPANS:
            return None
        length, shift, at = 0, 0, at + 1
        while wire[at] > 127:
            length |= (wire[at] & 127) << shift
            shift, at = shift + 7, at + 1
        length |= wire[at] << shift
        at += 1
        parts.append(view[at : at + length])
        at += length
    return tuple(parts)


def _resource_texts(serialized: bytes) -> bytes:
    """A resource as fields of ours."""
    attributes = Resource.FromString(serialized).attributes
    # The exporter sorts by key; of equal keys it keeps all, in their order.
    texts = sorted(((item.key, value_text(item.value)) for item in attributes), key=lambda text: text[0])
    service = next((value_text(item.value) for item in attributes if item.key == "service.name"), "")
    out = [_SERVICE, _text(service)]
    for key, value in texts:
        pair = b"\x0a" + _text(key) + b"\x12" + _text(value)
        out += (_TEXT, varint(len(pair)), pair)
    return b"".join(out)


_cached_texts = lru_cache(maxsize=1024)(_resource_texts)
"""Processes send the same resource again and again."""


def _text(text: str) -> bytes:
    raw = text.encode()
    return varint(len(raw)) + raw
