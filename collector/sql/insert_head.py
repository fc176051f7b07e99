"""Parser of the head of an INSERT statement, which precedes its rows.

Invariant: patterns run in time linear in the statement (possessive quantifiers), since they read untrusted input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

IDENTIFIER = r"(?:`(?:[^`\\]|\\.|``)*+`|\"(?:[^\"\\]|\\.|\"\")*+\"|[\w$]++)"
LIST = r"\((?:[^()`\"']++|`(?:[^`\\]|\\.|``)*+`|\"(?:[^\"\\]|\\.|\"\")*+\"|\([^()]*+\))*+\)"
SKIP = r"(?:\s++|(?:--|#)[^\n]*+\n|/\*.*?\*/)*+"
HEAD = (
    rf"{SKIP}INSERT\s+INTO\s+(?:TABLE\s+)?(?P<table>{IDENTIFIER}(?:\s*+\.\s*+{IDENTIFIER})?)\s*+(?P<columns>{LIST})?\s*+"
    r"(?P<settings>SETTINGS\s[^;]*?)?"
)
_WHOLE = re.compile(rf"{HEAD}\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class InsertHead:
    """Head of an INSERT: its table, columns and settings."""

    table: str
    """Name of the table as written, with its quotes."""
    columns: str
    """Column list, without its parentheses; empty: every column that takes values."""
    settings: str
    """The SETTINGS clause; empty: there is none."""


def parse_insert_head(sql: str) -> InsertHead | None:
    """Parse a head; None when it is no plain INSERT INTO a table."""
    match = _WHOLE.fullmatch(sql)
    if not match:
        return None
    return InsertHead(match["table"], (match["columns"] or "")[1:-1].strip(), (match["settings"] or "").strip())
