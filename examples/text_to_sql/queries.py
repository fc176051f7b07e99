"""Queries that a model writes, run by SQLite within limits.

In: a connection and a query. Out: its rows, in an order of their own, or None where it is refused. Invariant: a query changes and writes
nothing; one that takes long, or finds much, is refused.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

MOST_ROWS = 100_000
MOST_CHARACTERS = 10_000_000
"""Characters of all rows of a query."""
_VALUE_BYTES = 1_000_000
_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})

Rows = tuple[tuple[object, ...], ...]


def restrict(connection: sqlite3.Connection, instructions: int) -> None:
    """Have a connection refuse all but queries that read, and those that take more instructions of SQLite's machine."""
    # An authorizer, as read-only databases still let VACUUM INTO write files, and ATTACH open others.
    connection.set_authorizer(_authorization)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES)
    connection.set_progress_handler(lambda: 1, instructions)


def sorted_rows(connection: sqlite3.Connection, query: str) -> Rows | None:
    """Return the rows that a query finds, sorted; None where it is none, SQLite refuses it, or they are too many or too long."""
    rows: list[tuple[object, ...]] = []
    characters = 0
    try:
        with closing(connection.execute(query)) as cursor:
            for row in cursor:
                rows.append(tuple(round(value, 6) if isinstance(value, float) else value for value in row))
                characters += len(repr(rows[-1]))
                if len(rows) > MOST_ROWS or characters > MOST_CHARACTERS:
                    return None
    except (sqlite3.Error, sqlite3.Warning, MemoryError):
        return None
    return tuple(sorted(rows, key=repr))


def _authorization(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ACTIONS else sqlite3.SQLITE_DENY
