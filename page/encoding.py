"""JSON and CSV of the page's answers: what senders wrote is in them letter by letter, as far as it is text.

In: plain values. Out: bytes, and answers that hold them. Invariant: any value can be encoded; what UTF-8 cannot hold is replaced, a number
that is none becomes null in JSON; no text becomes a formula where a spreadsheet opens CSV.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from page.access import HEADERS

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters with which a text becomes a formula where a spreadsheet opens the file."""


def encode(value: Any) -> bytes:
    """Return a value as JSON."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, ValueError):
        # Texts of spans may hold halves of surrogate pairs, as escapes of JSON.
        return msgspec.json.encode(_repaired(value))


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_repaired(str(key)): _repaired(item) for key, item in value.items()}
    return [_repaired(item) for item in value] if isinstance(value, list | tuple) else value


def json_answer(content: bytes, status: int = 200) -> web.Response:
    """Return an answer that holds encoded JSON, and that no browser keeps."""
    return web.Response(status=status, body=content, content_type="application/json", headers={"Cache-Control": "no-store"})


def error_answer(sentence: str, status: int) -> web.Response:
    """Return an answer that holds a sentence on why there is no other."""
    return json_answer(encode({"error": sentence}), status)


async def begin_events(request: web.Request) -> web.StreamResponse:
    """Begin an answer of server-sent events."""
    response = web.StreamResponse(headers={**HEADERS, "Cache-Control": "no-store"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    return response


def csv_line(values: Sequence[object]) -> bytes:
    """Return a line of CSV; lists and mappings are JSON in their cells."""
    text = io.StringIO()
    csv.writer(text).writerow([_cell(value) for value in values])
    return text.getvalue().encode(errors="replace")


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet takes for a formula: an apostrophe marks a text that begins like one."""
    text = value if isinstance(value, str) else json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else None
    if text is None:
        return value
    return f"'{text}" if text.startswith(_FORMULA) else text
