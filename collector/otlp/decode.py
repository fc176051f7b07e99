"""Decoder of OTLP bodies: protobuf, and OTLP/JSON.

Invariant: a body that cannot be read raises `UndecodableError`, with a message for the sender.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from collector.otlp.texts import with_utf8_texts
from spangrad.errors import JSON_ERRORS

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

M = TypeVar("M", bound=Message)

# OTLP/JSON writes ids in hex, against protobuf's own JSON, which would have base64.
_IDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_DOWN = (
    *("resourceSpans", "scopeSpans", "spans", "links", "resourceLogs", "scopeLogs", "logRecords"),
    *("resource_spans", "scope_spans", "resource_logs", "scope_logs", "log_records"),
)
_HALF = re.compile(rb"(\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\[^u])|\\u[dD][89a-fA-F]\w\w")
"""JSON's escape of half of a surrogate pair; whole pairs and other escapes, which are kept, are the first group."""


class UndecodableError(ValueError):
    """A body does not match its content type."""


def decode(message: type[M], body: bytes, content_type: str) -> tuple[M, bytes]:
    """Read a body; return the message and its protobuf bytes.

    Raises:
        UndecodableError: the body is not such a message.
    """
    if content_type == JSON:
        read = _from_json(message, body)
        return read, read.SerializeToString()
    try:
        return message.FromString(body), body
    except DecodeError as error:
        refusal = UndecodableError(f"the body is not a protobuf {message.DESCRIPTOR.name}: {error}")
    try:
        repaired = with_utf8_texts(message, body)
        return message.FromString(repaired), repaired
    except DecodeError:
        raise refusal from None


def _from_json(message: type[M], body: bytes) -> M:
    try:
        tree = _tree(body)
    except JSON_ERRORS as error:
        raise UndecodableError(f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UndecodableError(f"the body is not an OTLP/JSON {message.DESCRIPTOR.name}: it is no object")
    for node in _nodes(cast(dict[str, Any], tree)):
        for key in _IDS:
            if isinstance(hexadecimal := node.get(key), str):
                node[key] = _base64(key, hexadecimal)
    try:
        return json_format.ParseDict(tree, message(), ignore_unknown_fields=True)
    # The parser lets other errors through where a value's type is quite wrong.
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UndecodableError(f"the body is not an OTLP/JSON {message.DESCRIPTOR.name}: {error}") from None


def _tree(body: bytes) -> Any:
    """Return the value of a JSON text; half of a surrogate pair, as JavaScript leaves where it cuts a text, becomes U+FFFD.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        # As the Collector reads it: the sender would drop the whole request for one character.
        whole = _HALF.sub(lambda escape: escape[1] or rb"\ufffd", body)
        if whole == body:
            raise
        return msgspec.json.decode(whole)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for key in _DOWN:
        if isinstance(children := node.get(key), list):
            for child in cast(list[Any], children):
                if isinstance(child, dict):
                    yield from _nodes(cast(dict[str, Any], child))


def _base64(key: str, hexadecimal: str) -> str:
    try:
        return b64encode(binascii.unhexlify(hexadecimal)).decode()
    except ValueError:
        raise UndecodableError(f"{key} {hexadecimal[:64]!r} is not hexadecimal") from None
