"""JSON of the page's answers: what senders wrote is in it letter by letter, as far as it is text.

In: plain values. Out: bytes. Invariant: any value can be encoded; what UTF-8 cannot hold is replaced, a number that is none becomes null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


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
