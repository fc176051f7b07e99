"""The ledger's tables, and the two databases that they may lie in.

In: where the ledger lies, a directory or a URL. Out: transactions that come one after the other, and rows as types. Invariant: on either
database a transaction begins by taking the one right to write, so that what it has read still holds when it writes.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from spangrad.errors import LedgerError
from spangrad.settings import TrainerSettings
from spangrad.types import PolicyVersion, VersionStatus

FILE = "ledger.db"
_POSTGRESQL = "postgresql+psycopg"
_DRIVERS = {"sqlite": "sqlite", "postgresql": _POSTGRESQL, "postgres": _POSTGRESQL, _POSTGRESQL: _POSTGRESQL}
_ADVISORY_LOCK = 0x7370616E
"""Any number, the same for all trainers: PostgreSQL's lock that a transaction of the ledger holds."""

METADATA = sa.MetaData()
BRANCH = ("policy", "branch")


def _branch_key() -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String, primary_key=True) for name in BRANCH]


VERSIONS = sa.Table(
    "versions",
    METADATA,
    *_branch_key(),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("parent", sa.Integer, comment="NULL: training began with these weights"),
    sa.Column("parent_branch", sa.String, nullable=False, server_default="", comment="the parent's; empty where there is none"),
    sa.Column("batch_id", sa.String, unique=True, comment="NULL: training began with these weights"),
    sa.Column("run_id", sa.String, nullable=False),
    sa.Column("modes", sa.String, nullable=False, comment="of the rollouts that trained it, comma-separated"),
    sa.Column("status", sa.String, comment="NULL: the step is under way"),
    sa.Column("checksum", sa.String, nullable=False, server_default=""),
    sa.Column("path", sa.String, nullable=False, server_default=""),
    sa.Column("tokenizer_hash", sa.String, nullable=False, server_default=""),
    sa.Column("metrics", sa.String, nullable=False, server_default="{}"),
)
HEADS = sa.Table(
    "heads",
    METADATA,
    *_branch_key(),
    sa.Column("version", sa.Integer, nullable=False, comment="that the branch's next step trains"),
)
LEASES = sa.Table(
    "leases",
    METADATA,
    *_branch_key(),
    sa.Column("batch_id", sa.String, nullable=False, unique=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("holder", sa.String, nullable=False, comment="the process, as trainer/holder.py names it"),
    sa.Column("expires", sa.Float, nullable=False, comment="seconds since 1970, by the database's clock"),
    comment="a row a step that is under way: one a branch, since each trains what the one before it made",
)
BATCH_ROLLOUTS = sa.Table(
    "batch_rollouts",
    METADATA,
    *_branch_key(),
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("batch_id", sa.String, nullable=False, index=True),
    sa.Column("mode", sa.String, nullable=False),
    sa.Column("group_id", sa.String, nullable=False),
    sa.Column("build_spec", sa.String, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
)
TUNINGS = sa.Table(
    "tunings",
    METADATA,
    sa.Column("batch_id", sa.String, primary_key=True),
    *[sa.Column(name, sa.String, nullable=False) for name in (*BRANCH, "method")],
    sa.Column("run", sa.String, nullable=False, comment="names what is trained how: trainer/tunings.py"),
    sa.Column("step", sa.Integer, nullable=False, comment="optimiser steps of the run once this batch is trained"),
    sa.Column("steps", sa.Integer, nullable=False, comment="of the whole run"),
    sa.Column("examples", sa.String, nullable=False, comment="digest of what the run trains"),
    sa.Column("files", sa.String, nullable=False, comment="JSON: name, checksum, size and rows of each file of the batch"),
    comment="a row a batch that was made of files",
)
TUNED_ROLLOUTS = sa.Table(
    "tuned_rollouts",
    METADATA,
    sa.Column("batch_id", sa.String, primary_key=True),
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    *[sa.Column(name, sa.String, nullable=False) for name in (*BRANCH, "mode", "group_id", "build_spec")],
    sa.Column("revision", sa.Integer, nullable=False),
    comment="the rollouts that rows of a batch of TUNINGS came from: named, not claimed, since a run goes through its rows several times",
)
EXPIRED = sa.Table(
    "expired_groups",
    METADATA,
    *_branch_key(),
    *[sa.Column(name, sa.String, primary_key=True) for name in ("run_id", "mode", "build_spec", "group_id")],
    sa.Column("reason", sa.String, nullable=False),
)
PINS = sa.Table(
    "pins",
    METADATA,
    sa.Column("policy", sa.String, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    comment="versions whose files are kept, on whichever branches they are",
)


@dataclass(frozen=True, slots=True)
class LedgerVersion:
    """A version as the ledger knows it."""

    policy_version: PolicyVersion
    branch: str
    parent_branch: str
    """Its own, or the one that this branch comes from; empty for the weights that training began with."""
    run_id: str
    modes: str
    """Comma-separated; empty for the weights that training began with."""
    tokenizer_hash: str
    status: VersionStatus | None
    """None: its step is under way."""
    metrics: dict[str, float]

    @property
    def version(self) -> int:
        """Its number."""
        return self.policy_version.version


def version_of(row: sa.RowMapping) -> LedgerVersion:
    """A row of VERSIONS."""
    facts = PolicyVersion(row["policy"], row["version"], row["parent"], row["batch_id"], row["checksum"], row["path"])
    status = VersionStatus(row["status"]) if row["status"] else None
    metrics = json.loads(row["metrics"])
    return LedgerVersion(facts, row["branch"], row["parent_branch"], row["run_id"], row["modes"], row["tokenizer_hash"], status, metrics)


def ledger_place(settings: TrainerSettings) -> Path | str:
    """Where the settings put the ledger: a directory for SQLite's file, or a URL."""
    return settings.directory if settings.ledger_url is None else settings.ledger_url.get_secret_value()


class Database:
    """The ledger's database, with its tables."""

    def __init__(self, place: Path | str) -> None:
        """Open it, and make the tables that are missing.

        Args:
            place: the directory of SQLite's file, which is made; or a URL, sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.

        Raises:
            LedgerError: the URL is none that the ledger knows, or nobody answers there.
        """
        url = _url(place)
        self.shown = url.render_as_string(hide_password=True)
        self._engine = sa.create_engine(url, pool_pre_ping=True)
        self._sqlite = self._engine.dialect.name == "sqlite"
        if self._sqlite:
            event.listen(self._engine, "connect", _configure_sqlite)
        event.listen(self._engine, "begin", _begin_sqlite if self._sqlite else _begin_postgresql)
        with self.transaction() as transaction:
            METADATA.create_all(transaction)

    @contextmanager
    def transaction(self) -> Generator[sa.Connection]:
        """One transaction: all of it happens, or nothing.

        Raises:
            LedgerError: the database failed. What was asked to commit may have been committed: ask again before doing it again.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except DBAPIError as error:
            reason = str(error.orig).strip().splitlines()
            raise LedgerError(
                f"the ledger {self.shown} failed ({reason[0] if reason else type(error.orig).__name__}). See that the database runs, that "
                "its disk has room, then start again: nothing is lost, and nothing is trained twice."
            ) from error

    def now(self, transaction: sa.Connection) -> float:
        """Seconds since 1970 by the database's clock, which all trainers share."""
        text = "SELECT (julianday('now') - 2440587.5) * 86400" if self._sqlite else "SELECT extract(epoch FROM clock_timestamp())"
        return float(transaction.execute(sa.text(text)).scalar_one())

    def insert_new(self, transaction: sa.Connection, table: sa.Table, rows: Iterable[dict[str, object]]) -> None:
        """Insert the rows whose key is not there yet."""
        insert = (sqlite if self._sqlite else postgresql).insert(table).on_conflict_do_nothing()
        if rows := list(rows):
            transaction.execute(insert, rows)

    def close(self) -> None:
        """Close its connections."""
        self._engine.dispose()


def _url(place: Path | str) -> sa.URL:
    if isinstance(place, Path):
        place.mkdir(parents=True, exist_ok=True)
        return sa.URL.create("sqlite", database=str(place / FILE))
    known = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    try:
        url = sa.make_url(place)
        return url.set(drivername=_DRIVERS[url.drivername])
    except (ArgumentError, NoSuchModuleError):
        raise LedgerError(f"trainer.ledger_url is no URL of a database. Give {known}.") from None
    except KeyError as error:
        raise LedgerError(f"trainer.ledger_url names {error.args[0]!r}, which the ledger does not know. Give {known}.") from None


def _configure_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are ours: pysqlite would begin them late, and without a write lock
    for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_postgresql(connection: sa.Connection) -> None:
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
