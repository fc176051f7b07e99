"""The embedded ClickHouse engine (chDB), and the only module that imports it.

In: a directory. Out: handles that run statements and inserts, each usable by one thread at a time.
Invariant: one process owns a directory; statements reach tables, never files, URLs or other servers (chdb_config/users.xml).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collector.insert_head import InsertHead, parse_insert_head
from spangrad.errors import StoreError

CONFIG = Path(__file__).parent / "chdb_config"
STATEMENT_MEMORY = 2 * 2**30
"""Bytes that one statement may use; the engine as a whole is bounded in chdb_config/config.xml."""
_DATA_CODES = frozenset({6, 27, 33, 72, 117, 395})
"""CANNOT_PARSE_TEXT, CANNOT_PARSE_INPUT_ASSERTION_FAILED, CANNOT_READ_ALL_DATA, CANNOT_PARSE_NUMBER, INCORRECT_DATA, THROW_IF."""
_CODE = re.compile(r"Code: (\d+)\.")
_ANY_TYPE = "SETTINGS " + ", ".join(f"allow_suspicious_{kind}_types = 1" for kind in ("low_cardinality", "fixed_string", "variant"))
"""What the target has, its staging table may have."""
_ALL = "SETTINGS limit = 0, offset = 0, max_threads = 1"
"""Every row, in the order they came, whatever the session's own settings are."""


class EngineRefusedError(StoreError):
    """The engine refused a statement; `code` is ClickHouse's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def of_the_data(self) -> bool:
        """Whether the rows themselves are at fault, so that sending them again is of no use."""
        return self.code in _DATA_CODES


@dataclass(frozen=True, slots=True)
class Answer:
    """What one statement gave."""

    body: bytes
    rows_read: int = 0
    bytes_read: int = 0
    rows_written: int = 0
    """Rows inserted, those of materialized views left out."""


class Handle:
    """One session of the engine: its current database, its settings and its temporary tables."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._staging: dict[str, tuple[str, str]] = {}
        """Temporary tables that are kept, and their columns, by head of insert."""

    def query(self, sql: str, output_format: str = "TabSeparated", parameters: Mapping[str, str] | None = None) -> Answer:
        """Run any statement; a FORMAT clause in it wins over `output_format`.

        Raises:
            EngineRefusedError: the engine did not run it.
        """
        try:
            result = self._connection.query(sql, output_format, params=dict(parameters or {}))
        except RuntimeError as error:
            raise _refused(error) from None
        return Answer(result.bytes() or b"", result.rows_read(), result.bytes_read())

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
        staging, columns = self._staging.pop(head, None) or self._stage(parts)
        try:
            read = self._parse(f"INSERT INTO {staging} ({columns}) {parts.settings}", input_format, rows)
            held = int(self.query(f"SELECT count() FROM {staging} {_ALL}").body)
            if held != read:
                raise EngineRefusedError(
                    f"Code: 241. DB::Exception: of {read} rows that were read {held} could be held: memory is short, or the default of a"
                    " column that they leave out fails. Send fewer at once, or every column. (MEMORY_LIMIT_EXCEEDED)",
                    241,
                )
            if read:
                self.query(f"INSERT INTO {parts.table} ({columns}) {parts.settings} SELECT {columns} FROM {staging} {_ALL}")
            if keep_staging:
                self.query(f"TRUNCATE TABLE {staging}")
                self._staging[head] = staging, columns
        finally:
            # A table that may still hold rows is never used again.
            if head not in self._staging:
                self.query(f"DROP TEMPORARY TABLE {staging}")
        return Answer(b"", rows_written=read)

    def _stage(self, head: InsertHead) -> tuple[str, str]:
        """Make a temporary table that takes what the head's table takes, defaults included; its name and the columns."""
        described = self.query(f"DESCRIBE TABLE {head.table} SETTINGS describe_compact_output = 0", "JSONEachRow").body
        known = [json.loads(line) for line in described.splitlines()]
        fields = [
            f"{_quoted(one['name'])} {one['type']} {_staged_default(one['default_type'], one['default_expression'])}" for one in known
        ]
        name = f"staging_{uuid.uuid4().hex}"
        self.query(f"CREATE TEMPORARY TABLE {name} ({', '.join(fields)}) ENGINE = Memory {_ANY_TYPE}")
        taken = [_quoted(one["name"]) for one in known if one["default_type"] in {"", "DEFAULT"}]
        return name, head.columns or ", ".join(taken)

    def _parse(self, head: str, input_format: str, rows: bytes) -> int:
        try:
            stream = self._connection.send_insert(head, input_format)
            try:
                stream.append(rows)
                result = stream.finish()
            finally:
                stream.cancel()
        except RuntimeError as error:
            raise _refused(error) from None
        return result.rows_written

    def close(self) -> None:
        """Forget the session; idempotent."""
        self._connection.close()


class Engine:
    """The engine over one directory."""

    def __init__(self, path: Path) -> None:
        """Open `path`, creating it when it is not there.

        Raises:
            StoreError: another process owns the directory, or the engine does not start on it.
        """
        self.path = path.resolve()
        if "?" in str(self.path):
            raise StoreError(
                f"store.path = {str(path)!r} has a question mark, which the engine takes for options. Choose another directory."
            )
        self._lock = _own(self.path)
        _plain_default_database(self.path)
        # The engine finds the second file only by an absolute path.
        self._config = self.path / "config.xml"
        self._config.write_text((CONFIG / "config.xml").read_text().replace("@USERS@", str(CONFIG / "users.xml")))
        self._keeper = self.handle()
        version, self.timezone = self._keeper.query("SELECT version(), timezone()").body.decode().split()
        self.version = version

    def handle(self) -> Handle:
        """Open one more session; cheap.

        Raises:
            StoreError: the engine does not start.
        """
        import chdb

        try:
            return Handle(
                chdb.connect(
                    f"{self.path}?config-file={self._config}&max_memory_usage={STATEMENT_MEMORY}&max_partitions_per_insert_block=0"
                )
            )
        except RuntimeError as error:
            raise StoreError(f"the engine does not start on {self.path}: {error}") from None

    def kill_queries(self) -> None:
        """Cancel every statement that is still running."""
        handle = self.handle()
        handle.query("KILL QUERY WHERE query_id != queryID() ASYNC")
        handle.close()

    def close(self) -> None:
        """Close the engine, when all other handles are closed, and give up the directory."""
        self._keeper.close()
        os.close(self._lock)


def _own(path: Path) -> int:
    """Lock the directory; the lock goes with the process, however it ends."""
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path / "owner", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode().strip()
        os.close(lock)
        raise StoreError(
            f"the store in {path} is in use by process {owner or 'unknown'}. Stop that process, or set store.path to another directory."
        ) from None
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _plain_default_database(path: Path) -> None:
    """Make `default` an ordinary database before the engine's first start: its own overlays this machine's files.

    The engine's own takes the tables of whatever this link names, `default` then takes them again, and the process aborts. The
    link is a convenience that the engine makes anew; `default` is known by its file.
    """
    (path / "metadata" / "default").unlink(missing_ok=True)
    metadata = path / "metadata" / "default.sql"
    if not metadata.exists():
        metadata.parent.mkdir(parents=True, exist_ok=True)
        part = metadata.with_suffix(".part")
        part.write_text(f"ATTACH DATABASE _ UUID '{uuid.uuid4()}'\nENGINE = Atomic\n")
        part.rename(metadata)


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


def _refused(error: Exception) -> EngineRefusedError:
    message = str(error)
    found = _CODE.search(message)
    return EngineRefusedError(message[found.start() :] if found else message, int(found.group(1)) if found else 1002)
