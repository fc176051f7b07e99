"""Where a statement says in which format it is answered: the clause that ends a SELECT, SHOW, DESCRIBE and their like.

In: SQL. Out: what stands before and behind the place where the engine can be told where to write the answer.
Invariant: patterns run in time linear in the statement; a clause in a comment or a text is not taken for one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SETTING = r"\w++\s*+=\s*+(?:'(?:[^'\\]|\\.|'')*+'|[\w.+-]++)"
_LAST = re.compile(
    rf"\bFORMAT\s++(?!(?:ASC|DESC)\b)(?P<format>\w++)(?:\s++SETTINGS\s++{_SETTING}(?:\s*+,\s*+{_SETTING})*+)?(?P<end>[\s;]*+)\Z",
    re.IGNORECASE | re.DOTALL,
)
_COMMENT = re.compile(r"--|#")
_COVERED = re.compile(
    r"'(?:[^'\\]|\\.|'')*+(?:'|\Z)|\"(?:[^\"\\]|\\.|\"\")*+(?:\"|\Z)|`(?:[^`\\]|\\.|``)*+(?:`|\Z)"
    r"|--[^\n]*+|\#[!\s][^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z)",
    re.DOTALL,
)
"""Texts, quoted names and comments."""
_TAIL = 1 << 12
"""Only the end is searched: a statement may be as long as the rows in it."""


@dataclass(frozen=True, slots=True)
class AnswerClause:
    """A statement, cut where INTO OUTFILE would stand."""

    before: str
    after: str
    """FORMAT and SETTINGS, or empty."""
    format: str
    """The named format; empty: none is named."""


def find_answer_clause(sql: str) -> AnswerClause:
    """Cut a statement. One that has no such clause, or ends with something unusual, is cut at its end."""
    start = max(0, len(sql) - _TAIL)
    found = _LAST.search(sql, start)
    if not found or _is_comment(sql, found.start()):
        return AnswerClause(sql.rstrip("; \t\r\n"), "", "")
    return AnswerClause(sql[: found.start()], sql[found.start() : found.start("end")], found["format"])


def _is_comment(sql: str, place: int) -> bool:
    line = sql[sql.rfind("\n", 0, place) + 1 : place]
    # Seldom: then the whole statement must be read to know.
    return bool(_COMMENT.search(line)) and any(found.start() < place < found.end() for found in _COVERED.finditer(sql))
