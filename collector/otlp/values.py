"""Conversion of OTLP values to text, exactly as the OpenTelemetry Collector writes them.

In: an AnyValue. Out: what Go's `pcommon.Value.AsString` gives (0.161): strings as they are, numbers and booleans as text, bytes
as standard base64, arrays and key-value lists as JSON. Invariant: the same text as the Collector's, which a test compares.
"""

from __future__ import annotations

import math
from base64 import b64encode
from decimal import Decimal
from json.encoder import encode_basestring

from opentelemetry.proto.common.v1.common_pb2 import AnyValue

# Go's encoder keeps its output safe inside JavaScript.
_LINE_ENDS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029"})


class _NoJSONError(ValueError):
    """The value holds a number that JSON cannot represent."""


def value_text(value: AnyValue) -> str:
    """Return the text of a value; empty for a value that is not set, and for a list that holds a NaN or an infinity."""
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return "true" if value.bool_value else "false"
        case "int_value":
            return str(value.int_value)
        case "double_value":
            return double_text(value.double_value)
        case "bytes_value":
            return b64encode(value.bytes_value).decode()
        case None:
            return ""
        case _:
            try:
                return _json(value)
            except _NoJSONError:
                return ""


def double_text(number: float) -> str:
    """Return a float64 as the Collector writes it: shortest digits, an exponent only below 1e-6 and from 1e21."""
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    text = repr(number)
    if "e" not in text:
        return text.removesuffix(".0")
    if 1e-6 <= abs(number) < 1e21:
        return format(Decimal(text), "f")
    return text.replace("e-0", "e-")


def _json(value: AnyValue) -> str:
    match value.WhichOneof("value"):
        case "array_value":
            return f"[{','.join(_json(item) for item in value.array_value.values)}]"
        case "kvlist_value":
            # Go sorts a map's keys, and the last of equal keys wins.
            members = {item.key: item.value for item in value.kvlist_value.values}
            return f"{{{','.join(f'{_quoted(key)}:{_json(members[key])}' for key in sorted(members))}}}"
        case "string_value":
            return _quoted(value.string_value)
        case "bytes_value":
            return f'"{b64encode(value.bytes_value).decode()}"' if value.bytes_value else "null"
        case "double_value" if not math.isfinite(value.double_value):
            raise _NoJSONError
        case None:
            return "null"
        case _:
            return value_text(value)


def _quoted(text: str) -> str:
    return encode_basestring(text).translate(_LINE_ENDS)
