"""Inserts by a statement that selects the rows, from itself or from a temporary table in memory, so that every error is reported.

Invariant: all rows of an insert are committed, those of views included, or an error is raised (docs/decisions/0006).
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Sequence

from collector.database import EngineRefusedError, Handle, QueryAnswer, quoted_name
from collector.otlp.rows import DROPPED_INSERT, LOGS_INSERT, Rows
from collector.sql.insert_head import InsertHead, parse_insert_head
from collector.write.ingest import Refused

_ANY_TYPE = "SETTINGS " + ", ".join(f"allow_suspicious_{kind}_types = 1" for kind in ("low_cardinality", "fixed_string", "variant"))
"""Settings that allow a staging table every type that its target may have."""
_MOST_KEPT = 16
"""Largest number of temporary tables that are kept."""
_MOST_STRUCTURES = 64
INLINE_BYTES = 2**16
"""Largest size of rows that the inserting statement holds itself: the three statements around a table cost as much as a third of it."""
_ALL = "SETTINGS limit = 0, offset = 0, max_threads = 1"
"""Settings that keep every row, in its order, whatever the session's own settings are."""


def require_held(handle: Handle, staged: str, sent: int, what: str, why: str) -> None:
    """Raise unless a table in memory holds all rows that were sent: rows that it can't hold are left out without an error.

    The table is given with a condition, as after FROM. The error names `what` the rows are, and `why` there may be fewer, with a remedy.

    Raises:
        EngineRefusedError: there are more or fewer.
    """
    held = int(handle.query(f"SELECT count() FROM {staged} {_ALL}").body)
    if held != sent:
        raise EngineRefusedError(f"Code: 241. DB::Exception: of {sent} {what} {held} could be held: {why} (MEMORY_LIMIT_EXCEEDED)", 241)


def structure_of(handle: Handle, columns: str, table: str) -> str:
    """Return the names and types of some columns of a table."""
    described = handle.query(f"DESCRIBE TABLE (SELECT {columns} FROM {table})", "JSONEachRow").body
    return ", ".join(f"{quoted_name(column['name'])} {column['type']}" for column in map(json.loads, described.splitlines()))


def inline(structure: str, input_format: str, rows: bytes) -> str:
    """Return a table function, as after FROM, that gives some rows of a structure."""
    quoted = structure.replace("\\", "\\\\").replace("'", "\\'")
    return f"format({input_format}, '{quoted}', base64Decode('{base64.b64encode(rows).decode()}'))"


class Staging:
    """Inserter through one handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._structures: dict[str, str] = {}
        """Head of an insert -> the names and types of its columns."""
        self._kept: dict[str, tuple[str, str]] = {}
        """Head of an insert -> the temporary table that is kept for it, and its columns."""

    def insert(self, head: str, input_format: str, rows: bytes, *, keep_staging: bool = False) -> QueryAnswer:
        """Insert rows: `head` is the statement before its FORMAT clause. Return after the commit.

        chDB reports errors while rows are parsed, and swallows errors while they are written (too many parts, a violated
        constraint, a view that fails). So rows are parsed into a temporary table in memory, which takes all of them or
        none, counted there, and moved by a statement, whose errors chDB does report. Where the next inserts are alike, a
        statement that holds few rows itself does the same: it reads all of them before it writes.

        With `keep_staging`, what is known of the table is kept for the next insert with this head; call `forget` once the table changes.

        Raises:
            EngineRefusedError: the rows, or those of a view, were not all inserted.
        """
        parts = parse_insert_head(head)
        if parts is None:
            raise EngineRefusedError(f"Code: 62. DB::Exception: cannot read this INSERT: {head[:200]} (SYNTAX_ERROR)", 62)
        if keep_staging and parts.columns and len(rows) <= INLINE_BYTES:
            selected = f"SELECT * FROM {inline(self._structure(head, parts), input_format, rows)}"
            return self._handle.query(f"INSERT INTO {parts.table} ({parts.columns}) {parts.settings} {selected} {_ALL}")
        staging, columns = self._kept.pop(head, None) or self._stage(parts)
        try:
            read = self._handle.send(f"INSERT INTO {staging} ({columns}) {parts.settings}", input_format, [rows])
            why = "memory is short, or the default of a column that they leave out fails. Send fewer at once, or every column."
            require_held(self._handle, staging, read, "rows that were read", why)
            if read:
                self._handle.query(f"INSERT INTO {parts.table} ({columns}) {parts.settings} SELECT {columns} FROM {staging} {_ALL}")
            if keep_staging and len(self._kept) < _MOST_KEPT:
                self._handle.query(f"TRUNCATE TABLE {staging}")
                self._kept[head] = staging, columns
        finally:
            # A table that may still hold rows is never used again.
            if head not in self._kept:
                self._handle.query(f"DROP TEMPORARY TABLE {staging}")
        return QueryAnswer(b"", rows_written=read)

    def forget(self) -> None:
        """Drop the temporary tables that are kept, since those that they are made after may have changed."""
        self._structures.clear()
        while self._kept:
            _, (staging, _) = self._kept.popitem()
            self._handle.query(f"DROP TEMPORARY TABLE {staging}")

    def _structure(self, head: str, parts: InsertHead) -> str:
        structure = self._structures.get(head) or structure_of(self._handle, parts.columns, parts.table)
        if len(self._structures) < _MOST_STRUCTURES:
            self._structures[head] = structure
        return structure

    def _stage(self, head: InsertHead) -> tuple[str, str]:
        """Create a temporary table that accepts the rows of the head's table, defaults included; return its name and the columns."""
        described = self._handle.query(f"DESCRIBE TABLE {head.table} SETTINGS describe_compact_output = 0", "JSONEachRow").body
        target = [json.loads(line) for line in described.splitlines()]
        fields = [
            f"{quoted_name(column['name'])} {column['type']} {_staged_default(column['default_type'], column['default_expression'])}"
            for column in target
        ]
        name = f"staging_{uuid.uuid4().hex}"
        self._handle.query(f"CREATE TEMPORARY TABLE {name} ({', '.join(fields)}) ENGINE = Memory {_ANY_TYPE}")
        insertable = [quoted_name(column["name"]) for column in target if column["default_type"] in {"", "DEFAULT"}]
        return name, head.columns or ", ".join(insertable)


def commit_logs(staging: Staging, bodies: Sequence[Rows]) -> list[Refused]:
    """Insert all log records of all bodies; return the refused records of each.

    Raises:
        EngineRefusedError: they were not inserted.
    """
    for head, parts in ((DROPPED_INSERT, [body.dropped for body in bodies]), (LOGS_INSERT, [body.data for body in bodies])):
        if rows := b"".join(parts):
            staging.insert(head, "RowBinary", rows, keep_staging=True)
    return [Refused(body.rejected, body.reason) for body in bodies]


def _staged_default(kind: str, expression: str) -> str:
    """Return a column's default clause in the staging table, by which omitted values are filled in as in the target."""
    match kind:
        case "":
            return ""
        # Computed while rows are written, a column that throws would lose them in silence. As an alias it is computed on demand.
        case "MATERIALIZED" | "ALIAS":
            return f"ALIAS {expression}"
        # An ephemeral column could not be read again.
        case _:
            return f"DEFAULT {expression}"
