"""Spans that are encoded directly are the messages that protobuf's own classes read, whatever their attributes hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.recorder import otlp

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS = TEXTS | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.binary(max_size=300)
VALUES = SCALARS | st.lists(TEXTS, max_size=5) | st.lists(INTEGERS, max_size=5)
TIMES = st.integers(0, 2**64 - 1)


def decoded(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [decoded(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@given(st.binary(min_size=8, max_size=8) | st.just(b""), TEXTS, TIMES, TIMES, st.dictionaries(TEXTS, VALUES, max_size=8), st.none() | TEXTS)
def test_server_span_any_content_is_read_by_protobuf(
    parent: bytes, name: str, begin: int, end: int, attributes: dict[str, Any], error: str | None
) -> None:
    span = Span.FromString(otlp.server_span((bytes(16), b"12345678", parent), name, (begin, end), {**attributes, "absent": None}, error))
    read = [(pair.key, decoded(pair.value)) for pair in span.attributes]
    assert (span.trace_id, span.span_id, span.parent_span_id, span.name) == (bytes(16), b"12345678", parent, name)
    assert (span.kind, span.flags, span.start_time_unix_nano, span.end_time_unix_nano) == (Span.SPAN_KIND_SERVER, 1, begin, end)
    assert [(key, type(value), value) for key, value in read] == [(key, type(value), value) for key, value in attributes.items()]
    expected = Status() if error is None else Status(code=Status.STATUS_CODE_ERROR, message=error)
    assert span.status == expected


def test_attribute_integer_beyond_64_bits_is_text() -> None:
    assert KeyValue.FromString(otlp.attribute("seed", 2**63)).value.string_value == str(2**63)


def test_attribute_lone_surrogate_is_replaced() -> None:
    assert KeyValue.FromString(otlp.attribute("agent", "a\udc80b")).value.string_value == "a?b"


def test_resource_and_scope_are_read_by_protobuf() -> None:
    read = Resource.FromString(otlp.resource({"service.name": "gateway", "service.instance.id": "1"}))
    assert {pair.key: pair.value.string_value for pair in read.attributes} == {"service.name": "gateway", "service.instance.id": "1"}
    assert InstrumentationScope.FromString(otlp.scope("gateway", "1.2")) == InstrumentationScope(name="gateway", version="1.2")
