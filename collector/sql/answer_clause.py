"""Parser of the clause that names the format of the answer, at the end of SELECT, SHOW, DESCRIBE and similar statements.

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
"""Matches texts, quoted names and comments."""
_TAIL = 1 << 12
"""Number of characters at the end that are searched: a statement may be as long as the rows in it."""


@dataclass(frozen=True, slots=True)
class AnswerClause:
    """A statement, split at the place for INTO OUTFILE."""

    before: str
    after: str
    """The clauses FORMAT and SETTINGS; empty: there are none."""
    format: str
    """The named format; empty: none is named."""


def find_answer_clause(sql: str) -> AnswerClause:
    """Split a statement. One that has no such clause, or ends with something unusual, is split at its end."""
    start = max(0, len(sql) - _TAIL)
    match = _LAST.search(sql, start)
    if not match or _is_comment(sql, match.start()):
        return AnswerClause(sql.rstrip("; \t\r\n"), "", "")
    return AnswerClause(sql[: match.start()], sql[match.start() : match.start("end")], match["format"])


def _is_comment(sql: str, offset: int) -> bool:
    line = sql[sql.rfind("\n", 0, offset) + 1 : offset]
    # Rarely: then the whole statement must be searched.
    return bool(_COMMENT.search(line)) and any(match.start() < offset < match.end() for match in _COVERED.finditer(sql))
