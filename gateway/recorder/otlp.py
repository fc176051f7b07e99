"""Encoder of OTLP messages: spans, resources and scopes, written directly in protobuf's wire format.

In: names, texts and attributes as Python values. Out: the bytes that `opentelemetry.proto` messages serialize to. Invariant: protobuf's
own classes read back every value as it was given, texts as UTF-8.

Built directly, since protobuf's classes take four times as long, before the last byte of a client's answer.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from spangrad.varint import varint

Value = str | bool | int | float | bytes | Sequence[str] | Sequence[int] | None
"""Value of an attribute. None: the attribute is absent."""

_SAMPLED_FLAG = 1
_FLAGS = b"\x85\x01" + struct.pack("<I", _SAMPLED_FLAG)
_KIND = bytes((6 << 3, Span.SPAN_KIND_SERVER))
_ERROR = bytes((3 << 3, Status.STATUS_CODE_ERROR))
_TIMES = struct.Struct("<BQBQ")
_START, _END = 7 << 3 | 1, 8 << 3 | 1
_DOUBLE = struct.Struct("<Bd")
_VALUE = b"\x12"
"""Tag of an attribute's value."""
_TEXT, _TRUE, _FALSE, _INT, _DOUBLE_TAG, _ARRAY, _BYTES = b"\x0a", b"\x10\x01", b"\x10\x00", b"\x18", 4 << 3 | 1, b"\x2a", b"\x3a"
"""Tags of the kinds of values, of booleans with the value."""


def message(number: int, body: bytes) -> bytes:
    """Return a field of text, bytes or a message, with a number up to 15."""
    return bytes((number << 3 | 2,)) + varint(len(body)) + body


def server_span(
    ids: tuple[bytes, bytes, bytes], name: str, times: tuple[int, int], attributes: Mapping[str, Value], error: str | None
) -> bytes:
    """Return a sampled span of kind server.

    Args:
        ids: of its trace, of itself and of its parent; without a parent the last is empty.
        name: of the span.
        times: of its beginning and end, in nanoseconds since 1970.
        attributes: absent where the value is None.
        error: message of its status. None: it did not fail.
    """
    trace, span, parent = ids
    status = b"" if error is None else message(15, message(2, _utf8(error)) + _ERROR)
    return b"".join(
        (
            *(message(1, trace), message(2, span), message(4, parent) if parent else b"", message(5, _utf8(name)), _KIND),
            _TIMES.pack(_START, times[0], _END, times[1]),
            *(message(9, attribute(key, value)) for key, value in attributes.items() if value is not None),
            *(status, _FLAGS),
        )
    )


def resource(attributes: Mapping[str, Value]) -> bytes:
    """Return a resource."""
    return b"".join(message(1, attribute(key, value)) for key, value in attributes.items())


def scope(name: str, version: str) -> bytes:
    """Return an instrumentation scope."""
    return message(1, _utf8(name)) + message(2, _utf8(version))


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
