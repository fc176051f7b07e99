"""Bodies of trace requests, prepared for both decoders: wire bytes for the database, or the parsed message for Python.

Invariant: all bytes that the database decodes were parsed by protobuf's own parser first, and the spans that no row can hold are known
before a body is answered; every message keeps its place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from collector.otlp.rows import unstorable
from collector.otlp.values import value_text
from collector.write.ingest import Refused
from spangrad.encoding.varint import varint

_RESOURCE_SPANS = 0x0A
"""Tag of the only field of a request: number 1, with a length."""
_NUMBER, _SERVICE, _TEXT = b"\xc0\x3e", b"\xca\x3e", b"\xd2\x3e"
"""Tags of the fields that spans.proto adds: 1000 (a varint), 1001 and 1002 (with a length)."""
_EMPTY_LIST = b"\x12\x02\x2a\x00"
"""Bytes of an attribute whose value is a list without items, which the database can't distinguish from no value."""
_WINDOW = 2**20
"""Number of bytes of a body that are searched at once."""
_CACHED_SIZE = 4096
_PIECE = 2**18
"""Approximate number of bytes of a list that are passed on at once."""


@dataclass(frozen=True, slots=True)
class ResourceSpansPlace:
    """Place of a ResourceSpans in a body, and the bytes that are appended to it for the database."""

    start: int
    length: int
    texts: bytes
    """Its resource as protobuf fields of texts."""


@dataclass(frozen=True, slots=True)
class TraceBody:
    """Spans of one request."""

    load: Callable[[], bytes]
    """Function that loads the request from where it is kept: unpacked as it came, or as protobuf if it came as JSON."""
    size: int
    """Bytes of the loaded request."""
    spans: int
    refused: Refused
    """The number of spans that no row can hold, and the reason."""
    wire: tuple[ResourceSpansPlace, ...] | None
    """ResourceSpans that the database decodes. None: the body holds something that only Python decodes correctly."""

    @property
    def request(self) -> ExportTraceServiceRequest:
        """Return the message, parsed again: it is not kept, since it would be larger than its bytes."""
        return ExportTraceServiceRequest.FromString(self.load())


def trace_body(request: ExportTraceServiceRequest, wire: bytes) -> TraceBody:
    """Prepare a request."""
    spans = sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
    reasons = unstorable(request)
    refused = Refused(len(reasons), reasons[0] if reasons else "")
    return TraceBody(lambda: wire, len(wire), spans, refused, None if _has_empty_list(wire) else _places(request, wire))


def protobuf_list(bodies: Sequence[TraceBody], first: int) -> Iterator[bytes]:
    """Yield the ResourceSpans of bodies, numbered from `first`, each with its resource as texts, in the envelope of FORMAT ProtobufList.

    They come in pieces: as one, they would need newly allocated memory.
    """
    positioned = [(body, position) for body in bodies for position in body.wire or ()]
    behind = [b"".join((_NUMBER, varint(number), position.texts)) for number, (_, position) in enumerate(positioned, first)]
    heads = [b"\x0a" + varint(position.length + len(suffix)) for (_, position), suffix in zip(positioned, behind, strict=True)]
    lengths = sum(position.length for _, position in positioned) + sum(map(len, heads)) + sum(map(len, behind))
    piece: list[bytes | memoryview] = [varint(lengths)]
    size = 0
    loaded, wire = None, memoryview(b"")
    for (body, position), head, suffix in zip(positioned, heads, behind, strict=True):
        if body is not loaded:
            loaded, wire = body, memoryview(body.load())
        piece += (head, wire[position.start : position.start + position.length], suffix)
        size += position.length
        if size >= _PIECE:
            yield b"".join(piece)
            piece, size = [], 0
    yield b"".join(piece)


def resources(bodies: Sequence[TraceBody]) -> list[tuple[int, int]]:
    """Return the index of the body and the index within it for each number of `protobuf_list`, from its first."""
    return [(position, index) for position, body in enumerate(bodies) for index in range(len(body.wire or ()))]


def _has_empty_list(wire: bytes) -> bool:
    """Return whether the bytes of an empty list occur anywhere, as such or by chance."""
    # The rarest of the bytes is searched for by vector instructions: a pattern, or `in`, takes three times as long.
    every = np.frombuffer(wire, np.uint8)
    first, second, rare, last = _EMPTY_LIST
    for start in range(0, len(every), _WINDOW):
        window = every[start : start + _WINDOW + len(_EMPTY_LIST) - 1]
        at = np.flatnonzero(window[2:-1] == rare)
        if ((window[at] == first) & (window[at + 1] == second) & (window[at + 3] == last)).any():
            return True
    return False


def _places(request: ExportTraceServiceRequest, wire: bytes) -> tuple[ResourceSpansPlace, ...] | None:
    """Return the places of a request's ResourceSpans; None when it has an unknown field."""
    places: list[ResourceSpansPlace] = []
    at, end = 0, len(wire)
    resources = iter(request.resource_spans)
    while at < end:
        if wire[at] != _RESOURCE_SPANS:
            return None
        length, shift, at = 0, 0, at + 1
        while wire[at] > 127:
            length |= (wire[at] & 127) << shift
            shift, at = shift + 7, at + 1
        length |= wire[at] << shift
        at += 1
        places.append(ResourceSpansPlace(at, length, _texts(next(resources).resource)))
        at += length
    return tuple(places)


def _texts(resource: Resource) -> bytes:
    serialized = resource.SerializeToString()
    return _cached_texts(serialized) if len(serialized) <= _CACHED_SIZE else _resource_texts(serialized)


def _resource_texts(serialized: bytes) -> bytes:
    """Encode a resource as the fields that spans.proto adds."""
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
"""Cache of encoded resources, since processes send the same resource repeatedly."""


def _text(text: str) -> bytes:
    raw = text.encode()
    return varint(len(raw)) + raw
