"""SQLite databases that are asked and never changed.

In: a file and a query. Out: its rows, in an order of their own, or None where it is refused. Invariant: as `examples.text_to_sql.queries`.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from examples.text_to_sql.queries import Rows, restrict, sorted_rows

LONGEST = 20_000_000
"""Instructions of SQLite's machine."""
SHOWN = 5
"""Rows that a model is told."""
SHOWN_CHARACTERS = 300


def _opened(database: str | Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro", uri=True)
    connection.text_factory = _text
    restrict(connection, LONGEST)
    return connection


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def rows(database: str | Path, query: str) -> Rows | None:
    """Return the rows that a query finds, sorted; None where it is refused."""
    with closing(_opened(database)) as connection:
        return sorted_rows(connection, query)


def shown(result: Rows | None) -> str:
    """Return what a model is told of rows."""
    if result is None:
        return "error"
    return " ; ".join(" , ".join(map(str, row)) for row in result[:SHOWN])[:SHOWN_CHARACTERS] or "empty"


def schema(database: str | Path) -> str:
    """Return the statements that make a database's tables, a line each."""
    with closing(_opened(database)) as connection:
        result = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL ORDER BY rowid").fetchall()
    return "\n".join(" ".join(statement.split()) for (statement,) in result)
