"""External data: tables that are sent with a query, and dropped after it.

Invariant: the database reads a structure as a list of columns and nothing else; all rows of a file are held, or an error is raised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from collector.database import Handle, quoted_name
from collector.sql.errors import BadRequestError

_SUFFIXES = ("structure", "types", "format")


@dataclass(frozen=True, slots=True)
class ExternalTable:
    """An external table."""

    name: str
    structure: str
    """Its columns, as in CREATE TABLE."""
    format: str
    rows: bytes

    @property
    def quoted(self) -> str:
        """Return its name, quoted for a statement."""
        return quoted_name(self.name)


def take_tables(files: Mapping[str, bytes], parameters: Mapping[str, str]) -> tuple[tuple[ExternalTable, ...], Mapping[str, str]]:
    """Return the tables, and the parameters that do not describe tables.

    Raises:
        BadRequestError: a file has neither structure nor types.
    """
    if not files:
        return (), parameters
    tables: list[ExternalTable] = []
    for name, rows in files.items():
        structure = parameters.get(f"{name}_structure") or _structure(parameters.get(f"{name}_types", ""))
        if not structure:
            raise BadRequestError(36, f"external table {name!r} needs {name}_structure or {name}_types.", "BAD_ARGUMENTS")
        tables.append(ExternalTable(name, structure, parameters.get(f"{name}_format") or "TabSeparated", rows))
    table_parameters = {f"{name}_{suffix}" for name in files for suffix in _SUFFIXES}
    return tuple(tables), {key: value for key, value in parameters.items() if key not in table_parameters}


def load_tables(handle: Handle, tables: tuple[ExternalTable, ...]) -> None:
    """Create and fill the tables.

    Raises:
        EngineRefusedError: a structure or rows cannot be read.
        BadRequestError: memory is short.
    """
    for table in tables:
        # As a text it cannot end the statement.
        text = table.structure.replace("\\", "\\\\").replace("'", "\\'")
        columns = [json.loads(line) for line in handle.query(f"DESCRIBE TABLE null('{text}')", "JSONEachRow").body.splitlines()]
        fields = ", ".join(f"{quoted_name(column['name'])} {column['type']}" for column in columns)
        handle.query(f"CREATE TEMPORARY TABLE {table.quoted} ({fields}) ENGINE = Memory")
        read = handle.send(f"INSERT INTO {table.quoted}", table.format, [table.rows]) if table.rows else 0
        if int(handle.query(f"SELECT count() FROM {table.quoted}").body) != read:
            raise BadRequestError(241, f"external table {table.name!r} has more rows than can be held.", "MEMORY_LIMIT_EXCEEDED")


def drop_tables(handle: Handle, tables: tuple[ExternalTable, ...]) -> None:
    """Drop the tables; idempotent."""
    for table in tables:
        handle.query(f"DROP TEMPORARY TABLE IF EXISTS {table.quoted}")


def _structure(types: str) -> str:
    """Return the columns _1, _2, ... for a list of types."""
    parts, depth = [""], 0
    for character in types:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return ", ".join(f"_{index} {part.strip()}" for index, part in enumerate(parts, 1)) if types.strip() else ""
