"""Bodies of trace requests, ready for either road into rows: wire bytes for the engine, or the message anew for Python.

In: a decoded ExportTraceServiceRequest and its bytes. Out: a `TraceBody`, and for a batch of them one ProtobufList.
Invariant: what stands before the engine was read by protobuf's own parser first, and what no row can hold is known before anything is
said of a body; every message keeps its place in the batch.
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
from collector.otlp.varint import varint
from collector.write.ingest import Refused

_RESOURCE_SPANS = 0x0A
"""Tag of the only field of a request: number 1, with a length."""
_NUMBER, _SERVICE, _TEXT = b"\xc0\x3e", b"\xca\x3e", b"\xd2\x3e"
"""Tags of the fields that spans.proto adds: 1000 (a varint), 1001 and 1002 (with a length)."""
_EMPTY_LIST = b"\x12\x02\x2a\x00"
"""An attribute whose value is a list without items, which the engine can't tell from no value."""
_WINDOW = 2**20
"""Bytes of a body that are searched at once."""
_CACHED_SIZE = 4096
_PIECE = 2**18
"""About how many bytes of a list are handed over at once."""


@dataclass(frozen=True, slots=True)
class ResourceSpansPlace:
    """Where in a body a ResourceSpans stands, and what is put behind it for the engine."""

    start: int
    length: int
    texts: bytes
    """Its resource as texts."""


@dataclass(frozen=True, slots=True)
class TraceBody:
    """One request's spans."""

    load: Callable[[], bytes]
    """The request as it came, unpacked, or as protobuf writes what came as JSON; from wherever it is kept."""
    size: int
    """Bytes that it has so."""
    spans: int
    refused: Refused
    """Those of them that no row can hold."""
    wire: tuple[ResourceSpansPlace, ...] | None
    """What the engine reads of it. None: there is something in the body that only Python reads right."""

    @property
    def request(self) -> ExportTraceServiceRequest:
        """The message, made anew: kept, it would be larger than its bytes."""
        return ExportTraceServiceRequest.FromString(self.load())


def trace_body(request: ExportTraceServiceRequest, wire: bytes) -> TraceBody:
    """Prepare a request.

    Args:
        request: as protobuf's parser read it.
        wire: the same as bytes.
    """
    spans = sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
    reasons = unstorable(request)
    refused = Refused(len(reasons), reasons[0] if reasons else "")
    return TraceBody(lambda: wire, len(wire), spans, refused, None if _has_empty_list(wire) else _places(request, wire))


def protobuf_list(bodies: Sequence[TraceBody], first: int = 0) -> Iterator[bytes]:
    """The ResourceSpans of bodies, numbered from `first`, each with its resource as texts, in the envelope of FORMAT ProtobufList.

    In pieces: as one, it would be written into memory that the process must be given for it.
    """
    placed = [(body, place) for body in bodies for place in body.wire or ()]
    behind = [b"".join((_NUMBER, varint(number), place.texts)) for number, (_, place) in enumerate(placed, first)]
    heads = [b"\x0a" + varint(place.length + len(ours)) for (_, place), ours in zip(placed, behind, strict=True)]
    lengths = sum(place.length for _, place in placed) + sum(map(len, heads)) + sum(map(len, behind))
    piece: list[bytes | memoryview] = [varint(lengths)]
    size = 0
    loaded, wire = None, memoryview(b"")
    for (body, place), head, ours in zip(placed, heads, behind, strict=True):
        if body is not loaded:
            loaded, wire = body, memoryview(body.load())
        piece += (head, wire[place.start : place.start + place.length], ours)
        size += place.length
        if size >= _PIECE:
            yield b"".join(piece)
            piece, size = [], 0
    yield b"".join(piece)


def resources(bodies: Sequence[TraceBody]) -> list[tuple[int, int]]:
    """Of each number of `protobuf_list`, from its first: the place of its body, and its own in the body."""
    return [(place, index) for place, body in enumerate(bodies) for index in range(len(body.wire or ()))]


def _has_empty_list(wire: bytes) -> bool:
    """Whether the bytes of an empty list stand anywhere, as such or by chance."""
    # A byte of them that is rare is looked for by vector instructions: a pattern, or `in`, takes three times as long.
    every = np.frombuffer(wire, np.uint8)
    first, second, rare, last = _EMPTY_LIST
    for start in range(0, len(every), _WINDOW):
        window = every[start : start + _WINDOW + len(_EMPTY_LIST) - 1]
        at = np.flatnonzero(window[2:-1] == rare)
        if ((window[at] == first) & (window[at + 1] == second) & (window[at + 3] == last)).any():
            return True
    return False


def _places(request: ExportTraceServiceRequest, wire: bytes) -> tuple[ResourceSpansPlace, ...] | None:
    """The fields of a request; None when there is one that we don't know."""
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
