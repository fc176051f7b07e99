"""Transactions on SQLite or PostgreSQL, the two databases for durable state.

Invariant: on either database a transaction begins by taking the only write lock, so that what it has read still holds when it writes; all
statements of a reader see the rows of one moment; and what is committed is on disk (SQLite: WAL with synchronous=FULL; PostgreSQL: by
default). Nothing waits for a PostgreSQL server for ever, and a server gives the locks of a client that was cut off to others. A database
is opened with the schema that made its tables, or not at all: rows of another release are never misread.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.schema import CreateIndex, CreateTable

from spangrad.errors import SpangradError

_POSTGRESQL = "postgresql+psycopg"
_DRIVERS = {"sqlite": "sqlite", "postgresql": _POSTGRESQL, "postgres": _POSTGRESQL, _POSTGRESQL: _POSTGRESQL}
_KNOWN = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
_SILENT_SECONDS = 120.0
"""Time limit of a statement until the next byte of its result, in seconds: our longest ones change a million rollouts in less."""
_CONNECTION: dict[str, int] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Parameters of a connection to PostgreSQL, where its URL has no others: the server counts as lost once it was away for a minute."""
_SESSION: dict[str, object] = {
    "lock_timeout": "10s",  # as long as SQLite waits for its lock
    # The server, too, must notice a client that was cut off and holds a lock: by default it does after two hours.
    **{f"tcp_{name}": value for name, value in _CONNECTION.items() if name.startswith("keepalives")},
    "tcp_user_timeout": _CONNECTION["tcp_user_timeout"],
}
"""Parameters that PostgreSQL keeps for a session, where `options` of its URL has no others."""
TransactionRetries = Callable[[Callable[[], Any]], Any]
"""Function that does work, may repeat it while a database is away, and returns what the work returns."""
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Owner:
    """The part of spangrad that a database belongs to: the texts of its errors, and its lock."""

    name: str
    """Name of the database in a sentence: `the ledger`."""
    setting: str
    """Setting that names the database."""
    error: type[SpangradError]
    guarantee: str
    """End of a sentence: what still holds when the database fails."""
    lock: int
    """Key of the PostgreSQL advisory lock that each of its transactions holds: any number, the same for all processes."""
    beginning: str
    """Sentence that says how to begin with an empty database."""


class Database:
    """A database with the tables of one owner."""

    def __init__(self, url: sa.URL, tables: sa.MetaData, owner: Owner) -> None:
        """Open it, and create its tables where it has none.

        Raises:
            SpangradError: the owner's: the database cannot be reached, or has tables of another schema.
        """
        self.shown = url.render_as_string(hide_password=True)
        self.engine = sa.create_engine(url, pool_pre_ping=True)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._owner = owner
        self.retries: TransactionRetries = lambda work: work()
        """Beginnings of transactions go through this, and methods that are `repeated`."""
        if self.is_sqlite:
            if url.database not in {None, "", ":memory:"} and "uri" not in url.query:
                _make_private_file(str(url.database))
            event.listen(self.engine, "connect", _configure_sqlite)
        else:
            event.listen(self.engine, "do_connect", _connect_postgresql)
        event.listen(self.engine, "begin", self._begin)
        # PostgreSQL by default shows each statement what was committed before that statement; SQLite shows a transaction one moment.
        snapshot = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = self.engine.execution_options(spangrad_reading=True, **snapshot)
        try:
            with self.transaction() as transaction:
                self._require_schema(transaction, tables)
        except BaseException:
            self.engine.dispose()
            raise

    def transaction(self) -> AbstractContextManager[sa.Connection]:
        """Run one transaction: all of it happens, or nothing.

        Raises:
            SpangradError: the owner's: the database failed. The commit may have happened: check before repeating it.
        """
        return self._within(self.engine)

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """Open a connection that only reads, beside a transaction: all its statements see the rows of the moment of the first.

        Raises:
            SpangradError: the owner's: the database failed.
        """
        return self._within(self._reader)

    @contextmanager
    def _within(self, engine: sa.Engine) -> Generator[sa.Connection]:
        """Commit a transaction at the end of the block, or roll it back when the block fails."""
        connection: sa.Connection
        with self.translated(), self.retries(lambda: self._open(engine)) as connection:
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def close(self) -> None:
        """Close its connections."""
        self.engine.dispose()

    def _require_schema(self, transaction: sa.Connection, tables: sa.MetaData) -> None:
        """Create the tables and record their schema, or require that they were created with the same."""
        # A table of the owner's own: two owners that share a database have no lock in common.
        schema = sa.Table(f"schema_of_{self._owner.setting.replace('.', '_')}", sa.MetaData(), sa.Column("version", sa.String))
        schema.create(transaction, checkfirst=True)
        recorded, version = transaction.execute(sa.select(schema)).scalar(), _schema_version(tables)
        if recorded is None and tables.tables.keys().isdisjoint(sa.inspect(transaction).get_table_names()):
            tables.create_all(transaction)
            transaction.execute(schema.insert().values(version=version))
        elif recorded != version:
            raise self._owner.error(
                f"{self._owner.name} {self.shown} has tables of schema {recorded or 'unknown'}, and this spangrad's are of schema "
                f"{version}. Use the release of spangrad that made them. {self._owner.beginning}"
            )

    def _open(self, engine: sa.Engine) -> sa.Connection:
        """Return a connection with a transaction that has begun."""
        with self.translated():
            connection = engine.connect()
            try:
                connection.begin()
            except BaseException:
                connection.close()
                raise
            return connection

    def _begin(self, connection: sa.Connection) -> None:
        reads = "spangrad_reading" in connection.get_execution_options()
        if self.is_sqlite:
            connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
        elif not reads:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({self._owner.lock})")

    @contextmanager
    def translated(self) -> Generator[None]:
        """Raise a driver's errors as the owner's."""
        try:
            yield
        except IntegrityError:
            raise
        except (DBAPIError, PoolTimeoutError) as error:  # the latter where it answers none of as many requests as may be made at once
            cause = error.orig if isinstance(error, DBAPIError) else error
            reason = str(cause).strip().splitlines()
            raise self._owner.error(
                f"{self._owner.name} {self.shown} failed ({reason[0] if reason else type(cause).__name__}). See that the database "
                f"runs, that its disk has room, then start again: {self._owner.guarantee}"
            ) from error


def insert_new(transaction: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert the rows whose key is not there yet."""
    if rows:
        dialect = sqlite if transaction.dialect.name == "sqlite" else postgresql
        transaction.execute(dialect.insert(table).on_conflict_do_nothing(), rows)


def _schema_version(tables: sa.MetaData) -> str:
    """Return a digest of the statements that create tables and indexes: the same for either database."""
    statements = [CreateTable(table) for table in tables.tables.values()]
    statements += [CreateIndex(index) for table in tables.tables.values() for index in table.indexes]
    texts = sorted(str(statement.compile(dialect=sqlite.dialect())) for statement in statements)
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def database_url(text: str, owner: Owner) -> sa.URL:
    """Return a database's URL, with the driver that we use.

    Raises:
        SpangradError: the owner's: it is no URL, or names an unknown kind of database.
    """
    try:
        url = sa.make_url(text)
        return url.set(drivername=_DRIVERS[url.drivername])
    except (ArgumentError, NoSuchModuleError, ValueError):  # the last of a port that is no number
        raise owner.error(f"{owner.setting} is no URL of a database. Give {_KNOWN}.") from None
    except KeyError as error:
        name = owner.name
        raise owner.error(f"{owner.setting} names {error.args[0]!r}, which {name} does not know. Give {_KNOWN}.") from None


def _make_private_file(path: str) -> None:
    """Make a file that other users of the machine cannot read, unless it exists; where that fails, SQLite says why."""
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _configure_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are ours: pysqlite would begin them late, and without a write lock
    for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


@cache
def _limited_connection() -> type[Any]:
    """Return the driver's class of connections, which here close and fail once the server is silent."""
    import psycopg

    class LimitedConnection(psycopg.Connection[Any]):
        def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
            return super().wait(self._limited(gen), *arguments, **options)

        def _limited(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
            end = time.monotonic() + _SILENT_SECONDS
            try:
                state = next(gen)
                while True:
                    ready = yield state  # 0 where nothing has happened for a moment
                    if ready:
                        end = time.monotonic() + _SILENT_SECONDS
                    elif time.monotonic() > end:
                        self.close()
                        raise psycopg.OperationalError(f"no answer for {_SILENT_SECONDS:g} s")
                    state = gen.send(ready)
            except StopIteration as stop:
                return stop.value

    return LimitedConnection


def _connect_postgresql(_dialect: object, _record: object, arguments: Iterable[Any], parameters: Mapping[str, Any]) -> Any:
    """Return a connection with time limits; the signature is that of SQLAlchemy's event `do_connect`."""
    connection = _limited_connection().connect(*arguments, **{**_CONNECTION, **parameters})
    try:
        connection.autocommit = True
        options = str(parameters.get("options", ""))
        connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in _SESSION.items() if name not in options))
        connection.autocommit = False
    except BaseException:
        connection.close()
        raise
    return connection


class _Holder(Protocol):
    @property
    def database(self) -> Database: ...


H = TypeVar("H", bound=_Holder)


def repeated(method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
    """Return a method that starts over, by its database's `retries`, where the database went away within it or at its commit.

    Args:
        method: one that leaves the same when it is done twice, such as one that only reads.
    """

    @wraps(method)
    def repeating(self: H, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.retries(lambda: method(self, *args, **kwargs))

    return repeating
