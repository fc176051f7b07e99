"""Cursors of lists: the place of a row in a list's order, as a text in an address.

In: values of a row. Out: a text, and the values again. Invariant: a text that is no cursor of the list is refused, never guessed at.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from spangrad.errors import JSON_ERRORS

Value = int | float | str
T = TypeVar("T")


def encode_cursor(values: Sequence[Value]) -> str:
    """Return the cursor of a row by its values in the list's order."""
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


def cut_page(rows: Sequence[T], most: int, place: Callable[[T], Sequence[Value]]) -> tuple[list[T], str | None]:
    """Return the rows of a page, and the cursor of what follows; None: nothing does.

    The rows are one more than `most` where others follow; `place` returns a row's values in the list's order.
    """
    return list(rows[:most]), encode_cursor(place(rows[most - 1])) if len(rows) > most else None


def decode_cursor(text: str, *kinds: type | tuple[type, ...]) -> list[Value]:
    """Return the values of a cursor, each of a type or one of several.

    Raises:
        ValueError: the text is no cursor of such a list.
    """
    try:
        values = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except JSON_ERRORS:
        values = None
    if isinstance(values, list) and len(values) == len(kinds) and all(map(isinstance, values, kinds)):  # pyright: ignore[reportUnknownArgumentType]
        return values  # pyright: ignore[reportUnknownVariableType]
    raise ValueError("after is no cursor of this list. Leave it out: the list then begins at its first row.")
