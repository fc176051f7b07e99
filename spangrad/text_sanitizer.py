"""Texts of somebody else's that are to be kept: models, agents and services say what no database takes.

In: any text. Out: one that every store, queue and ledger keeps. Invariant: it is valid UTF-8, and holds no null character, which
PostgreSQL refuses.
"""

from __future__ import annotations


def storable(text: str) -> str:
    """The text without null characters, and with a question mark for each half of a surrogate pair."""
    return text.replace("\x00", "").encode(errors="replace").decode()
