"""The schema, brought up to date: numbered SQL files, each applied once and recorded.

In: collector/schema/*.sql and anything that runs a statement. Out: tables, and rows of `otel.schema_migrations`.
Invariant: an applied file never changes; a file stopped in its middle is applied again, so its statements are idempotent.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spangrad.errors import StoreError

logger = logging.getLogger(__name__)

SCHEMA = Path(__file__).parent / "schema"
_FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_PIECE = re.compile(r"'(?:[^'\\]|\\.|'')*'|`[^`]*`|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|;|[^'`\"\-/;]+|.", re.DOTALL)
_RECORD = """CREATE TABLE IF NOT EXISTS otel.schema_migrations (
    Number UInt32, Name String, Sha256 String, AppliedAt DateTime64(6) DEFAULT now64(6)
) ENGINE = ReplacingMergeTree ORDER BY Number"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One SQL file."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Of the file's bytes."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrate(execute: Callable[[str], str], directory: Path = SCHEMA) -> list[Migration]:
    """Apply what was not applied yet, in order.

    Args:
        execute: runs one statement and returns its rows as TabSeparated text: the embedded engine, or a client of a server.
        directory: of the SQL files.

    Returns:
        What was applied now.

    Raises:
        StoreError: an applied file was changed or is gone, or a file's name or number is wrong.
    """
    migrations = read_migrations(directory)
    execute("CREATE DATABASE IF NOT EXISTS otel")
    execute(_RECORD)
    applied = {
        int(number): (name, sha256)
        for number, name, sha256 in (
            line.split("\t")
            for line in execute("SELECT Number, Name, Sha256 FROM otel.schema_migrations FINAL ORDER BY Number").splitlines()
        )
    }
    known = {migration.number: migration for migration in migrations}
    for number, (name, sha256) in applied.items():
        if number not in known:
            raise StoreError(
                f"the store was migrated by {name}, which {directory} does not have: this spangrad is older than the store. Upgrade it."
            )
        if known[number].sha256 != sha256:
            raise StoreError(
                f"{directory / known[number].name} was changed after it was applied to this store (as {name})."
                " Restore it, and put the change in a new file."
            )
    new = [migration for migration in migrations if migration.number not in applied]
    for migration in new:
        for statement in statements(migration.sql):
            execute(statement)
        execute(
            "INSERT INTO otel.schema_migrations (Number, Name, Sha256)"
            f" VALUES ({migration.number}, '{migration.name}', '{migration.sha256}')"
        )
        logger.info("applied migration %s", migration.name)
    return new


def read_migrations(directory: Path) -> list[Migration]:
    """The directory's SQL files, in order.

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


def statements(sql: str) -> list[str]:
    """The statements of a file, without comments; semicolons in strings and comments separate nothing."""
    found = [""]
    for piece in _PIECE.findall(sql):
        if piece == ";":
            found.append("")
        elif not piece.startswith(("--", "/*")):
            found[-1] += piece
    return [statement.strip() for statement in found if statement.strip()]
