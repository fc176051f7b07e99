"""Sanitizing of texts from models, agents and services, which may hold characters that no database accepts.

In: any text. Out: a text that every store, queue and ledger accepts. Invariant: it is valid UTF-8 and holds no null character, which
PostgreSQL refuses.
"""

from __future__ import annotations

import traceback


def storable(text: str) -> str:
    """Return the text without null characters, and with a question mark for each half of a surrogate pair."""
    return text.replace("\x00", "").encode(errors="replace").decode()


def storable_trace(error: BaseException) -> str:
    """Return an exception with its traceback as such a text: `exc_info` of a log would keep what the exception quotes as it is."""
    return storable("".join(traceback.format_exception(error)).rstrip())
