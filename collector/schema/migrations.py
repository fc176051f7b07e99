"""Migrations of the schema: numbered SQL files, each applied once and recorded.

In: collector/schema/*.sql, the layout of the servers, and a function that runs a statement. Out: tables, and rows of
`schema_migrations`. Invariant: an applied file never changes; a file that failed in its middle, that two processes applied at once, or
whose table, view or index a user has dropped, is applied again: its statements are idempotent, and its record replaces itself.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from collector.schema.cluster import CREATE, Layout, first_line
from collector.schema.columns import comment_columns
from spangrad.errors import StoreError
from spangrad.store.names import DATABASES, INTERNAL, PUBLIC

logger = logging.getLogger(__name__)

Execute = Callable[[str], str]
"""Function that runs one statement, on the embedded database or a server, and returns its rows as TabSeparated text."""
SCHEMA = Path(__file__).parent
_FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_PIECE = re.compile(r"'(?:[^'\\]|\\.|'')*'|`[^`]*`|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|;|[^'`\"\-/;]+|.", re.DOTALL)
_ADD_INDEX = re.compile(r"ALTER TABLE (\w+\.\w+)\b.* ADD INDEX IF NOT EXISTS (\w+)")
# Not of system.data_skipping_indices, which a server may hide from those who only insert.
_INDEXES = "arrayMap(name -> concat('.', name), extractAll(create_table_query, 'INDEX ([0-9A-Za-z_]+)'))"
_EXISTING = f"SELECT concat(database, '.', name, arrayJoin(arrayConcat([''], {_INDEXES}))) FROM system.tables WHERE database IN {DATABASES}"
_OLDER = "EXISTS TABLE otel.schema_migrations"
_RECORD = """CREATE TABLE IF NOT EXISTS spangrad_internal.schema_migrations (
    Number UInt32, Name String, Sha256 String, Layout String, AppliedAt DateTime64(6) DEFAULT now64(6)
) ENGINE = ReplacingMergeTree ORDER BY Number"""
_APPLIED = """SELECT Number, Name, Sha256, Layout, toString(toDateTime(AppliedAt), 'UTC')
FROM spangrad_internal.schema_migrations FINAL ORDER BY Number"""


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration: one SQL file."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file's bytes, in hex."""
        return hashlib.sha256(self.sql.encode()).hexdigest()

    def makes(self, layout: Layout) -> list[str]:
        """Return the qualified names of the tables and views that it creates, and of the indexes that it adds, on these servers."""
        names: list[str] = []
        for statement in layout.statements(statements(self.sql)):
            if (created := CREATE.match(statement)) and created[1] != "DATABASE":
                names.append(f"{created[2]}.{created[3]}")
            elif index := _ADD_INDEX.match(statement):
                names.append(f"{index[1]}.{index[2]}")
        return names

    def script(self, layout: Layout) -> list[str]:
        """Return the file's statements for these servers, and the one that records the migration."""
        record = f"({self.number}, '{self.name}', '{self.sha256}', '{layout}')"
        return [
            *layout.statements(statements(self.sql)),
            f"INSERT INTO spangrad_internal.schema_migrations (Number, Name, Sha256, Layout) VALUES {record}",
        ]


class MigrationState(StrEnum):
    """State of a migration, by comparison of this installation with a store."""

    APPLIED = "applied"
    NEW = "new"
    """The store lacks it; `spangrad schema migrate` applies it."""
    INCOMPLETE = "incomplete"
    """It was applied, and a table, view or index of it is gone, also with its table; `spangrad schema migrate` creates it again."""
    CHANGED = "changed"
    """The file differs from the one that was applied."""
    UNKNOWN = "unknown-newer"
    """A newer spangrad applied it to the store, and this installation has no such file."""


_TO_APPLY = frozenset({MigrationState.NEW, MigrationState.INCOMPLETE})


@dataclass(frozen=True, slots=True)
class Entry:
    """State of one migration in the installation and the store."""

    number: int
    name: str
    state: MigrationState
    applied_at: str
    """Time in UTC; empty when it is not applied."""
    lacks: tuple[str, ...] = ()
    """Tables, views and indexes that it created, and that are missing."""


@dataclass(frozen=True, slots=True)
class _Applied:
    name: str
    sha256: str
    layout: str
    at: str


def preamble(layout: Layout) -> list[str]:
    """Return the statements before the first migration, which create the table that records them."""
    return layout.statements([f"CREATE DATABASE IF NOT EXISTS {INTERNAL}", _RECORD])


def migrate(execute: Execute, layout: Layout, directory: Path = SCHEMA, report: Callable[[str], None] = logger.info) -> list[Migration]:
    """Apply the migrations of a directory that are new or incomplete, in order, and write the comments of columns that lack theirs.

    Returns:
        The migrations that were applied now.

    Raises:
        StoreError: an applied file was changed or is gone, a file's name or number is wrong, the store has another layout, or it
            refused a statement.
    """
    entries = status(execute, layout, directory)
    new = _pending(entries, directory, _TO_APPLY)
    missing_objects = {entry.number: entry.lacks for entry in entries}
    for statement in preamble(layout):
        execute(statement)
    for migration in new:
        script = migration.script(layout)
        for statement in script:
            try:
                execute(statement)
            except StoreError as error:
                raise StoreError(f"{migration.name} stopped at {first_line(statement)!r}: {error}") from error
        recreated = (
            f": {', '.join(lacks)} was missing, and is created again; rows of a dropped table are gone"
            if (lacks := missing_objects[migration.number])
            else ""
        )
        report(f"applied {migration.name} ({len(script) - 1} statements){recreated}")
    created = {name for migration in read_migrations(directory) for name in migration.makes(layout)}
    comment_columns(execute, layout, {table for schema, _, table in (name.partition(".") for name in created) if schema == PUBLIC})
    return new


def pending(execute: Execute, layout: Layout, directory: Path = SCHEMA, *, incomplete: bool = True) -> list[Migration]:
    """Return the migrations that are not applied yet, in order; change nothing.

    Without `incomplete`, only new ones: a user who may only insert sees few tables, so that most migrations would look incomplete.

    Raises:
        StoreError: as for `migrate`.
    """
    return _pending(status(execute, layout, directory), directory, _TO_APPLY if incomplete else {MigrationState.NEW})


def _pending(entries: list[Entry], directory: Path, states: Collection[MigrationState]) -> list[Migration]:
    for entry in entries:
        if entry.state is MigrationState.CHANGED:
            raise StoreError(
                f"{directory / entry.name} was changed after it was applied to this store. Restore it, and put the change in a new file."
            )
        if entry.state is MigrationState.UNKNOWN:
            raise StoreError(
                f"the store was migrated by {entry.name}, which {directory} does not have: this spangrad is older than the store."
                " Upgrade it."
            )
    numbers = {entry.number for entry in entries if entry.state in states}
    return [migration for migration in read_migrations(directory) if migration.number in numbers]


def status(execute: Execute, layout: Layout, directory: Path = SCHEMA) -> list[Entry]:
    """Return every migration that the installation or the store has, in order; change nothing.

    Raises:
        StoreError: a file's name or number is wrong, or the store has another layout or was made by an earlier spangrad.
    """
    if execute(_OLDER).strip() != "0":
        raise StoreError(
            "this store was made by an earlier spangrad, with all tables in the database `otel`, and is not converted. Begin a new one: set"
            " store.path to an empty directory, or drop the server's database `otel` and run `spangrad schema migrate`."
        )
    known = {migration.number: migration for migration in read_migrations(directory)}
    applied = _applied(execute)
    for other in applied.values():
        if other.layout != str(layout):
            raise StoreError(
                f"the store's tables were made for {other.layout}, and the settings name {layout}. Set store.cluster and store.sharded"
                " as they were, or copy the data into a new store."
            )
    existing = frozenset(execute(_EXISTING).splitlines())

    def entry(number: int) -> Entry:
        migration, record = known.get(number), applied.get(number)
        if migration is None:
            return Entry(number, applied[number].name, MigrationState.UNKNOWN, applied[number].at)
        if record is None:
            return Entry(number, migration.name, MigrationState.NEW, "")
        if migration.sha256 != record.sha256:
            return Entry(number, migration.name, MigrationState.CHANGED, record.at)
        lacks = tuple(name for name in migration.makes(layout) if name not in existing)
        return Entry(number, migration.name, MigrationState.INCOMPLETE if lacks else MigrationState.APPLIED, record.at, lacks)

    return [entry(number) for number in sorted({*known, *applied})]


def _applied(execute: Execute) -> dict[int, _Applied]:
    if execute("EXISTS TABLE spangrad_internal.schema_migrations").strip() == "0":
        return {}
    rows = [line.split("\t") for line in execute(_APPLIED).splitlines()]
    return {int(number): _Applied(*facts) for number, *facts in rows}


def read_migrations(directory: Path) -> list[Migration]:
    """Read the directory's SQL files, in order.

    Raises:
        StoreError: a name is not NNNN_words.sql, or numbers do not run 1, 2, 3, ...
    """
    migrations: list[Migration] = []
    for number, file in enumerate(sorted(directory.glob("*.sql")), start=1):
        matched = _FILE_NAME.fullmatch(file.name)
        if not matched or int(matched.group(1)) != number:
            raise StoreError(f"{file} should be number {number:04d}: name migrations NNNN_words.sql, numbered from 0001 without a gap.")
        migrations.append(Migration(number, file.name, file.read_text()))
    if not migrations:
        raise StoreError(f"{directory} holds no migrations: this installation is incomplete. Install spangrad-server again.")
    return migrations


def materialized_views() -> list[str]:
    """Return the names of the materialized views, which an insert fills."""
    created = (match for migration in read_migrations(SCHEMA) for match in CREATE.findall(migration.sql))
    return [name for kind, _, name in created if kind == "MATERIALIZED VIEW"]


def statements(sql: str) -> list[str]:
    """Split a file into statements, without comments; semicolons in strings and comments separate nothing."""
    parts = [""]
    for piece in _PIECE.findall(sql):
        if piece == ";":
            parts.append("")
        elif not piece.startswith(("--", "/*")):
            parts[-1] += piece
    return [statement.strip() for statement in parts if statement.strip()]
