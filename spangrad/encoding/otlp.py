"""Encoder of OTLP messages: spans, resources and scopes, written directly in protobuf's wire format.

In: names, times and attributes as Python values. Out: the bytes that `opentelemetry.proto` messages serialize to. Invariant: protobuf's
own classes read back every value as it was given, texts as UTF-8.

Built directly, since protobuf's classes take four times as long: before the last byte of a client's answer in the gateway, and for every
attempt in the runner.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from spangrad.encoding.varint import varint

Value = str | bool | int | float | bytes | Sequence[str] | Sequence[int] | None
"""Value of an attribute. None: the attribute is absent."""

_SAMPLED_FLAG = 1
_FLAGS = b"\x85\x01" + struct.pack("<I", _SAMPLED_FLAG)
_ERROR = bytes((3 << 3, 2))
_TIMES = struct.Struct("<BQBQ")
_EVENT_TIME = struct.Struct("<BQ")
_START, _END = 7 << 3 | 1, 8 << 3 | 1
_DOUBLE = struct.Struct("<Bd")
_VALUE = b"\x12"
"""Tag of an attribute's value."""
_TEXT, _TRUE, _FALSE, _INT, _DOUBLE_TAG, _ARRAY, _BYTES = b"\x0a", b"\x10\x01", b"\x10\x00", b"\x18", 4 << 3 | 1, b"\x2a", b"\x3a"
"""Tags of the kinds of values, of booleans with the value."""


class SpanKind(IntEnum):
    """SpanKind of a span."""

    INTERNAL = 1
    SERVER = 2


@dataclass(frozen=True, slots=True)
class SpanIds:
    """Ids of a span, of its trace and of its parent."""

    trace: bytes
    span: bytes
    parent: bytes = b""
    """Empty: it has none."""

    @property
    def traceparent(self) -> str:
        """Return the span as a W3C `traceparent`, sampled."""
        return f"00-{self.trace.hex()}-{self.span.hex()}-01"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Event of a span."""

    name: str
    at: int
    """Time in nanoseconds since 1970."""
    attributes: Mapping[str, Value]


def message(number: int, body: bytes) -> bytes:
    """Return a field of text, bytes or a message, with a number up to 15."""
    return bytes((number << 3 | 2,)) + varint(len(body)) + body


def span(
    ids: SpanIds,
    name: str,
    kind: SpanKind,
    times: tuple[int, int],
    attributes: Mapping[str, Value],
    *,
    events: Sequence[SpanEvent] = (),
    error: str | None = None,
) -> bytes:
    """Return a sampled span.

    Args:
        ids: of the span.
        name: of the span.
        kind: of the span.
        times: of its beginning and end, in nanoseconds since 1970.
        attributes: absent where the value is None.
        events: of the span.
        error: message of its status. None: it did not fail.
    """
    status = b"" if error is None else message(15, message(2, _utf8(error)) + _ERROR)
    return b"".join(
        (
            *(message(1, ids.trace), message(2, ids.span), message(4, ids.parent) if ids.parent else b"", message(5, _utf8(name))),
            *(bytes((6 << 3, kind)), _TIMES.pack(_START, times[0], _END, times[1]), _attributes(9, attributes)),
            *(message(11, _event(event)) for event in events),
            *(status, _FLAGS),
        )
    )


def request(resource_: bytes, scope_: bytes, spans: Iterable[bytes]) -> bytes:
    """Return an ExportTraceServiceRequest of spans of one resource and one scope."""
    return message(1, message(1, resource_) + message(2, message(1, scope_) + b"".join(message(2, each) for each in spans)))


def resource(attributes: Mapping[str, Value]) -> bytes:
    """Return a resource."""
    return _attributes(1, attributes)


def scope(name: str, version: str = "") -> bytes:
    """Return an instrumentation scope."""
    return message(1, _utf8(name)) + message(2, _utf8(version))


def _attributes(number: int, attributes: Mapping[str, Value]) -> bytes:
    return b"".join(message(number, attribute(key, value)) for key, value in attributes.items() if value is not None)


def _event(event: SpanEvent) -> bytes:
    return _EVENT_TIME.pack(1 << 3 | 1, event.at) + message(2, _utf8(event.name)) + _attributes(3, event.attributes)


def attribute(key: str, value: Value) -> bytes:
    """Return an attribute: a key with its value."""
    encoded = _value(value)
    return b"".join((_key(key), _VALUE, varint(len(encoded)), encoded))


@lru_cache(1024)
def _key(key: str) -> bytes:
    """Return an attribute's field of its key; the keys of spans are few."""
    return message(1, _utf8(key))


def _value(value: Value) -> bytes:
    # bool before int: True is an int.
    match value:
        case str():
            text = _utf8(value)
            return b"".join((_TEXT, varint(len(text)), text))
        case bool():
            return _TRUE if value else _FALSE
        case int() if -(2**63) <= value < 2**63:
            return _INT + varint(value & (1 << 64) - 1)
        case int():
            return _value(str(value))
        case float():
            return _DOUBLE.pack(_DOUBLE_TAG, value)
        case bytes():
            return b"".join((_BYTES, varint(len(value)), value))
        case None:
            return b""
        case _:
            items = b"".join(message(1, _value(item)) for item in value)
            return b"".join((_ARRAY, varint(len(items)), items))


def _utf8(text: str) -> bytes:
    """Return a text as UTF-8; headers may hold bytes that are no UTF-8, which Python carries as lone surrogates."""
    return text.encode("utf-8", "replace")
