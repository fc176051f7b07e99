"""The embedded database (chDB, which is ClickHouse in this process); the only module that imports it.

Invariant: one process owns a directory; statements reach tables, never files, URLs or other servers (chdb_config/users.xml).
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collector.sql.answer_clause import AnswerClause
from spangrad.errors import StoreError
from spangrad.processes import lock_alone, make_private

CONFIG = Path(__file__).parent / "chdb_config"
HANDLE_SETTINGS = {
    # Bytes that one statement may use; the database as a whole is bounded in chdb_config/config.xml.
    "max_memory_usage": 2 * 2**30,
    "max_partitions_per_insert_block": 0,
    # Parts that a skip index excludes are left out of the plan; else each part is opened to ask its index, by a reader of its own.
    "use_skip_indexes_on_data_read": 0,
    # A format's schema is given in the setting itself, never in a file that it names.
    "format_schema_source": "string",
}
"""Settings of every handle that differ from the database's defaults."""
UNREADABLE_CODES = frozenset({6, 25, 26, 27, 32, 33, 38, 41, 72, 117, 130, 321, 376, 427, 441, 467, 675, 676})
"""ClickHouse's error codes of values that cannot be read: CANNOT_PARSE_TEXT and all others that begin with CANNOT_PARSE or CANNOT_READ,
ATTEMPT_TO_READ_AFTER_EOF, INCORRECT_DATA, VALUE_IS_OUT_OF_RANGE_OF_DATA_TYPE, CANNOT_COMPILE_REGEXP."""
# ARGUMENT_OUT_OF_BOUND, CANNOT_CONVERT_TYPE, TOO_LARGE_ARRAY_SIZE, TOO_LARGE_STRING_SIZE, ILLEGAL_DIVISION, SIZES_OF_ARRAYS_DONT_MATCH,
# CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN, INDEX_OF_POSITIONAL_ARGUMENT_IS_OUT_OF_RANGE, FUNCTION_THROW_IF_VALUE_IS_NON_ZERO,
# DECIMAL_OVERFLOW, VIOLATED_CONSTRAINT, UNKNOWN_ELEMENT_OF_ENUM. Not those of types: a view that was broken by a change of its table
# refuses every span until it is repaired.
_DATA_CODES = UNREADABLE_CODES | {69, 70, 128, 131, 153, 190, 349, 353, 395, 407, 469, 691}
"""ClickHouse's error codes by which a table, its constraints or views refuse a value: the rows are at fault."""
_UNKNOWN = 1002
_OWNER = "owner"
"""The file in a store's directory that its process locks, and into which it writes its id."""
_FORMAT = re.compile(r"[A-Za-z]\w*", re.ASCII)
_PYTHON_FORMATS = frozenset({"dataframe", "datastore", "arrowtable"})
"""Formats of chDB's own, in which it answers with Python objects instead of bytes."""
_CODE = re.compile(r"Code: (\d+)\.")


class EngineRefusedError(StoreError):
    """The database refused a statement; `code` is ClickHouse's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def of_the_data(self) -> bool:
        """Return whether the rows themselves are at fault, so that sending them again is of no use."""
        return self.code in _DATA_CODES


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """Result of one statement."""

    body: bytes
    rows_read: int = 0
    bytes_read: int = 0
    rows_written: int = 0
    """Rows inserted; those of materialized views are left out where rows were parsed, and counted where a statement made them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Result of parsing a text as SQL: the number of statements, and whether they only read."""

    statements: int
    """Number of statements. 0: the text does not parse."""
    reads_only: bool


def quoted_name(name: str) -> str:
    """Return a name as an identifier, which it cannot end: a backslash escapes in it, too."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


class Handle:
    """One session of the embedded database: its current SQL database, its settings and its temporary tables."""

    def __init__(self, connection: Any, name: str) -> None:
        self._connection = connection
        self.name = name
        """Name of the handle: the setting `workload` of each of its statements, as system.processes shows it."""

    def kind(self, sql: str) -> Kind:
        """Parse a text without running it; takes some ten microseconds, and 30 ms a megabyte."""
        parsed = self._connection._conn.classify_query(sql)
        return Kind(parsed["statement_count"], parsed["query_class"].name == "READ_ONLY")

    def query(self, sql: str, output_format: str = "TabSeparated", parameters: Mapping[str, str] | None = None) -> QueryAnswer:
        """Run any statement; its own FORMAT clause takes precedence over `output_format`.

        Raises:
            EngineRefusedError: the database did not run it.
        """
        # Statements without rows in their answer are run in any format: its name goes into a header, though.
        if output_format.lower() in _PYTHON_FORMATS or not _FORMAT.fullmatch(output_format):
            raise EngineRefusedError(f"Code: 73. DB::Exception: Unknown format {output_format!r}. (UNKNOWN_FORMAT)", 73)
        try:
            result = self._connection.query(sql, output_format, params=dict(parameters or {}))
        except RuntimeError as error:
            raise _refused(error) from None
        except TypeError:
            # From a header, whose bytes are not checked before.
            raise EngineRefusedError("Code: 36. DB::Exception: the database is not UTF-8. (BAD_ARGUMENTS)", 36) from None
        return QueryAnswer(result.bytes() or b"", result.rows_read(), result.bytes_read(), result.rows_written())

    def write(self, clause: AnswerClause, descriptor: int, output_format: str, parameters: Mapping[str, str]) -> QueryAnswer:
        """Run one statement whose answer goes into a pipe while it is computed, at the pace of the reader; return its counts.

        The descriptor of the pipe's end to write to stays open. When the reading end is closed, the database reports no error and
        continues: the statement must be killed too. The output format is that of the statement, if it names one.

        Raises:
            EngineRefusedError: the database did not run it (SYNTAX_ERROR also where the statement takes no such clause), or failed
                after some of the answer was written.
        """
        sql = f"{clause.before}\nINTO OUTFILE '/dev/fd/{descriptor}' TRUNCATE {clause.after}"
        return self.query(sql, output_format, parameters)

    def send(self, head: str, input_format: str, rows: Iterable[bytes]) -> int:
        """Parse rows, cut anywhere, into the table of a head (INSERT INTO t (columns)); return the number of rows read.

        chDB reports errors while rows are parsed, and swallows errors while they are written: use this only for tables that
        accept every row. `collector.write.staging` inserts into all others.

        Raises:
            EngineRefusedError: the rows were not read.
        """
        try:
            stream = self._connection.send_insert(head, input_format)
            try:
                for piece in rows:
                    stream.append(piece)
                result = stream.finish()
            finally:
                stream.cancel()
        except RuntimeError as error:
            raise _refused(error) from None
        return result.rows_written

    def close(self) -> None:
        """Close the session; idempotent."""
        self._connection.close()


class EmbeddedDatabase:
    """The embedded database of one directory, which this process owns until `close`."""

    def __init__(self, path: Path) -> None:
        """Open `path`; create it if it does not exist.

        Raises:
            StoreError: another process owns the directory, or the database does not start on it.
        """
        self.path = path.resolve()
        if "?" in str(self.path):
            raise StoreError(
                f"store.path = {str(path)!r} has a question mark, which the database takes for options. Choose another directory."
            )
        self._lock = _own(self.path)
        _plain_default_database(self.path)
        # The database finds the second file only by an absolute path.
        self._config = self.path / "config.xml"
        self._config.write_text((CONFIG / "config.xml").read_text().replace("@USERS@", str(CONFIG / "users.xml")))
        self._numbers = itertools.count(1)
        self._open_handle = self.handle()
        self.version, self.timezone = self._open_handle.query("SELECT version(), timezone()").body.decode().split()

    def handle(self, *, schema_files: bool = False) -> Handle:
        """Open one more session; cheap. With `schema_files`, formats read their schemas from files: only for our own statements.

        Raises:
            StoreError: the database does not start.
        """
        import chdb

        name = f"handle-{next(self._numbers)}"
        settings = {**HANDLE_SETTINGS, "workload": name, **({"format_schema_source": "file"} if schema_files else {})}
        options = "&".join(f"{key}={value}" for key, value in settings.items())
        try:
            return Handle(chdb.connect(f"{self.path}?config-file={self._config}&{options}"), name)
        except RuntimeError as error:
            raise StoreError(f"the database does not start on {self.path}: {error}") from None

    def kill_queries(self) -> None:
        """Cancel every statement that is still running."""
        with closing(self.handle()) as handle:
            handle.query("KILL QUERY WHERE query_id != queryID() ASYNC")

    def kill(self, name: str) -> None:
        """Cancel the statement that runs on the handle of this name, if any; it ends soon after.

        Raises:
            EngineRefusedError: that was not possible now, as where memory is short.
        """
        with closing(self.handle()) as handle:
            handle.query(f"KILL QUERY WHERE Settings['workload'] = '{name}' ASYNC")

    def query_id(self, name: str) -> str:
        """Return the database's id of the statement that runs on the handle of this name; empty when none does."""
        with closing(self.handle()) as handle:
            return handle.query(f"SELECT query_id FROM system.processes WHERE Settings['workload'] = '{name}'").body.decode().strip()

    def close(self) -> None:
        """Close the database, after all other handles were closed, and release the directory."""
        self._open_handle.close()
        os.close(self._lock)


def make_directory(path: Path) -> None:
    """Create a store's directory, unless it exists; no file of it asks other users of the machine for a token.

    Raises:
        StoreError: it cannot be made, or is a file.
    """
    try:
        make_private(path)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"store.path = {str(path)!r} cannot be used ({error.strerror}). Set it to a directory that may be made and written.")


def user_of(path: Path) -> str:
    """Return the id of the process that has a store's directory open; empty: none has."""
    try:
        with (path / _OWNER).open() as owner:
            fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return ""
    except BlockingIOError:
        return (path / _OWNER).read_text().strip()
    except OSError:
        return ""


def _own(path: Path) -> int:
    """Lock the directory until the process ends; return the lock's file descriptor."""
    make_directory(path)
    try:
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable(path, error) from None
    if not lock_alone(lock, f"store.path = {str(path)!r}", StoreError):
        owner = os.read(lock, 32).decode().strip()
        os.close(lock)
        raise StoreError(
            f"the store in {path} is in use by process {owner or 'unknown'}. Stop that process, or set store.path to another directory."
        )
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _plain_default_database(path: Path) -> None:
    """Make `default` an ordinary SQL database before chDB's first start: chDB's own one overlays this machine's files.

    chDB's own one loads the tables of the directory that this link names, `default` then loads them again, and the process aborts.
    chDB makes the link again as a convenience; it knows `default` by its file.
    """
    (path / "metadata" / "default").unlink(missing_ok=True)
    metadata = path / "metadata" / "default.sql"
    if not metadata.exists():
        metadata.parent.mkdir(parents=True, exist_ok=True)
        part = metadata.with_suffix(".part")
        part.write_text(f"ATTACH DATABASE _ UUID '{uuid.uuid4()}'\nENGINE = Atomic\n")
        part.rename(metadata)


def _refused(error: Exception) -> EngineRefusedError:
    message = str(error)
    match = _CODE.search(message)
    if not match:
        # A message of chDB's own: it cannot decode ClickHouse's, say, because that quotes bytes that are not UTF-8.
        return EngineRefusedError(f"Code: {_UNKNOWN}. DB::Exception: {message} (UNKNOWN_EXCEPTION)", _UNKNOWN)
    return EngineRefusedError(message[match.start() :], int(match.group(1)))
