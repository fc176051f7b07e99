"""Cursors of lists: the place of a row in a list's order, as a text in an address.

In: values of a row. Out: a text, and the values again. Invariant: a text that is no cursor of the list is refused, never guessed at.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

Value = int | float | str


def encode_cursor(values: Sequence[Value]) -> str:
    """Return the cursor of a row by its values in the list's order."""
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


def decode_cursor(text: str, *kinds: type | tuple[type, ...]) -> list[Value]:
    """Return the values of a cursor.

    Args:
        text: the cursor.
        kinds: type of each value, or types.

    Raises:
        ValueError: the text is no cursor of such a list.
    """
    try:
        values = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        values = None
    if isinstance(values, list) and len(values) == len(kinds) and all(map(isinstance, values, kinds)):  # pyright: ignore[reportUnknownArgumentType]
        return values  # pyright: ignore[reportUnknownVariableType]
    raise ValueError("after is no cursor of this list. Leave it out: the list then begins at its first row.")
