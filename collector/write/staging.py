"""Inserts whose every error is seen: rows go through a temporary table in memory.

In: the head of an INSERT, and rows in any of the engine's formats. Out: how many rows are committed.
Invariant: all rows of an insert are committed, those of views included, or an error is raised (docs/decisions/0006).
"""

from __future__ import annotations

import json
import uuid

from collector.database import Answer, EngineRefusedError, Handle
from collector.sql.insert_head import InsertHead, parse_insert_head

_ANY_TYPE = "SETTINGS " + ", ".join(f"allow_suspicious_{kind}_types = 1" for kind in ("low_cardinality", "fixed_string", "variant"))
"""What the target has, its staging table may have."""
_ALL = "SETTINGS limit = 0, offset = 0, max_threads = 1"
"""Every row, in the order they came, whatever the session's own settings are."""


def require_held(handle: Handle, staged: str, sent: int, what: str, why: str) -> None:
    """See that a table in memory holds all that it was sent: what it can't hold it leaves out without an error.

    Args:
        handle: whose temporary table it is.
        staged: the table, and which of its rows, as behind FROM.
        sent: how many there must be.
        what: they are.
        why: there may be fewer, and what to do then.

    Raises:
        EngineRefusedError: there are more or fewer.
    """
    held = int(handle.query(f"SELECT count() FROM {staged} {_ALL}").body)
    if held != sent:
        raise EngineRefusedError(f"Code: 241. DB::Exception: of {sent} {what} {held} could be held: {why} (MEMORY_LIMIT_EXCEEDED)", 241)


class Staging:
    """Inserts through one handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._kept: dict[str, tuple[str, str]] = {}
        """Temporary tables that are kept, and their columns, by head of insert."""

    def insert(self, head: str, input_format: str, rows: bytes, *, keep_staging: bool = False) -> Answer:
        """Insert rows: `head` is the statement before its FORMAT clause. Returns after the commit.

        chDB reports what goes wrong while rows are parsed, and swallows what goes wrong while they are written (too many parts, a
        violated constraint, a view that fails). So rows are parsed into a temporary table in memory, which takes all of them or
        none, counted there, and moved by a statement, whose errors it does report.

        Args:
            head: INSERT INTO a table, with or without columns and settings.
            input_format: of the rows.
            rows: in that format.
            keep_staging: keep the temporary table for the next insert with this head: for heads of ours, on tables that do not change.

        Raises:
            EngineRefusedError: the rows, or those of a view, were not all inserted.
        """
        parts = parse_insert_head(head)
        if parts is None:
            raise EngineRefusedError(f"Code: 62. DB::Exception: cannot read this INSERT: {head[:200]} (SYNTAX_ERROR)", 62)
        staging, columns = self._kept.pop(head, None) or self._stage(parts)
        try:
            read = self._handle.send(f"INSERT INTO {staging} ({columns}) {parts.settings}", input_format, [rows])
            why = "memory is short, or the default of a column that they leave out fails. Send fewer at once, or every column."
            require_held(self._handle, staging, read, "rows that were read", why)
            if read:
                self._handle.query(f"INSERT INTO {parts.table} ({columns}) {parts.settings} SELECT {columns} FROM {staging} {_ALL}")
            if keep_staging:
                self._handle.query(f"TRUNCATE TABLE {staging}")
                self._kept[head] = staging, columns
        finally:
            # A table that may still hold rows is never used again.
            if head not in self._kept:
                self._handle.query(f"DROP TEMPORARY TABLE {staging}")
        return Answer(b"", rows_written=read)

    def _stage(self, head: InsertHead) -> tuple[str, str]:
        """Make a temporary table that takes what the head's table takes, defaults included; its name and the columns."""
        described = self._handle.query(f"DESCRIBE TABLE {head.table} SETTINGS describe_compact_output = 0", "JSONEachRow").body
        known = [json.loads(line) for line in described.splitlines()]
        fields = [
            f"{_quoted(one['name'])} {one['type']} {_staged_default(one['default_type'], one['default_expression'])}" for one in known
        ]
        name = f"staging_{uuid.uuid4().hex}"
        self._handle.query(f"CREATE TEMPORARY TABLE {name} ({', '.join(fields)}) ENGINE = Memory {_ANY_TYPE}")
        taken = [_quoted(one["name"]) for one in known if one["default_type"] in {"", "DEFAULT"}]
        return name, head.columns or ", ".join(taken)


def _staged_default(kind: str, expression: str) -> str:
    """How a staging table has a column's default: what rows leave out is filled in as the target would."""
    match kind:
        case "":
            return ""
        # Computed while rows are written, a column that throws would lose them in silence. As an alias it is computed on demand.
        case "MATERIALIZED" | "ALIAS":
            return f"ALIAS {expression}"
        # An ephemeral column could not be read again.
        case _:
            return f"DEFAULT {expression}"


def _quoted(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
