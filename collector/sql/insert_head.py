"""The head of an INSERT statement, taken apart: what stands before its rows.

In: SQL. Out: the table, its column list and its settings. Invariant: patterns run in time linear in the statement (possessive
quantifiers), since they read what anybody sends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

IDENTIFIER = r"(?:`(?:[^`\\]|\\.|``)*+`|\"(?:[^\"\\]|\\.|\"\")*+\"|[\w$]++)"
LIST = r"\((?:[^()`\"']++|`(?:[^`\\]|\\.|``)*+`|\"(?:[^\"\\]|\\.|\"\")*+\"|\([^()]*+\))*+\)"
SKIP = r"(?:\s++|--[^\n]*+\n|/\*.*?\*/)*+"
HEAD = (
    rf"{SKIP}INSERT\s+INTO\s+(?:TABLE\s+)?(?P<table>{IDENTIFIER}(?:\s*+\.\s*+{IDENTIFIER})?)\s*+(?P<columns>{LIST})?\s*+"
    r"(?P<settings>SETTINGS\s[^;]*?)?"
)
_WHOLE = re.compile(rf"{HEAD}\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class InsertHead:
    """Where rows go."""

    table: str
    """As written, quoted where it was."""
    columns: str
    """What stands between the parentheses; empty: every column that takes values."""
    settings: str
    """The SETTINGS clause; empty: there is none."""


def parse_insert_head(sql: str) -> InsertHead | None:
    """Take a head apart; None when it is no plain INSERT INTO a table."""
    found = _WHOLE.fullmatch(sql)
    if not found:
        return None
    return InsertHead(found["table"], (found["columns"] or "")[1:-1].strip(), (found["settings"] or "").strip())
