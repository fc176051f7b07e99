"""Values as text: the expectations were read off the OpenTelemetry Collector 0.161 (see the conformance test)."""

from __future__ import annotations

import math

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from collector.otlp.values import double_text, value_text


def array(*values: AnyValue) -> AnyValue:
    return AnyValue(array_value=ArrayValue(values=values))


def pairs(**values: AnyValue) -> AnyValue:
    return AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key=key, value=value) for key, value in values.items()]))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (1.0, "1"),
        (0.1, "0.1"),
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (1.5e-7, "1.5e-7"),
        (1e-10, "1e-10"),
        (1e16, "10000000000000000"),
        (1e20, "100000000000000000000"),
        (1e21, "1e+21"),
        (-1e22, "-1e+22"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (5e-324, "5e-324"),
        (123456789.125, "123456789.125"),
        (1 / 3, "0.3333333333333333"),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
    ],
)
def test_double_text_has_digits_of_collector(number: float, text: str) -> None:
    assert double_text(number) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (AnyValue(string_value='é<>&"'), 'é<>&"'),
        (AnyValue(int_value=-42), "-42"),
        (AnyValue(bool_value=True), "true"),
        (AnyValue(bool_value=False), "false"),
        (AnyValue(bytes_value=b"\x00\x01\x02\xff"), "AAEC/w=="),
        (AnyValue(), ""),
        (array(), "[]"),
        (pairs(), "{}"),
        (
            array(AnyValue(string_value='a"\\\n\t\b\f\x01\x7f<é>&\u2028\U0001f600')),
            '["a\\"\\\\\\n\\t\\b\\f\\u0001\x7f<é>&\\u2028\U0001f600"]',
        ),
        (array(AnyValue(int_value=3), AnyValue(double_value=1), AnyValue(bool_value=True), AnyValue()), "[3,1,true,null]"),
        (array(AnyValue(bytes_value=b"\x00\x01"), AnyValue(bytes_value=b"")), '["AAE=",null]'),
        (array(array(AnyValue(string_value="n")), pairs(z=AnyValue(int_value=1), a=array())), '[["n"],{"a":[],"z":1}]'),
        (pairs(zz=AnyValue(int_value=1), Aa=AnyValue(), aa=AnyValue()), '{"Aa":null,"aa":null,"zz":1}'),
        (array(AnyValue(double_value=math.nan)), ""),
    ],
)
def test_value_text_has_text_of_collector(value: AnyValue, text: str) -> None:
    assert value_text(value) == text
