"""Tables of the ledger, and the location of its database.

Invariant: the primary key of a table is what must be unique.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event

from spangrad.database import Database as AnyDatabase
from spangrad.database import Owner, database_url, insert_new
from spangrad.errors import LedgerError
from spangrad.processes import make_private
from spangrad.settings import TrainerSettings
from spangrad.types import PolicyVersion, VersionStatus

T = TypeVar("T")
FILE = "ledger.db"
_CHANGED = "spangrad_changed"
"""Key of the changed tables in a connection's `info`."""
_OWNER = Owner(
    "the ledger",
    "trainer.ledger_url",
    LedgerError,
    "nothing is lost, and nothing is trained twice.",
    lock=0x7370616E,
    beginning="Or begin a new ledger with the newest weights as trainer.model: name another trainer.directory, and trainer.ledger_url if "
    "that is set.",
)

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
    # Covers lineage and statuses, so that these reads skip the metrics, which are long.
    sa.Index("versions_in_short", *BRANCH, "version", "status", "batch_id", "parent_branch", "parent"),
    sa.Index("versions_by_number", "policy", "version"),
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
    sa.Column("holder", sa.String, nullable=False, comment="the process, as spangrad/leases.py names it"),
    sa.Column("seconds", sa.Float, nullable=False, comment="that it holds unrenewed, by the clock of each observer"),
    sa.Column("beats", sa.Integer, nullable=False, server_default="0", comment="how often it was renewed"),
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
    sa.Index("batch_rollouts_by_group", *BRANCH, "run_id", "group_id"),
)
FILE_BATCHES = sa.Table(
    "file_batches",
    METADATA,
    sa.Column("batch_id", sa.String, primary_key=True),
    *[sa.Column(name, sa.String, nullable=False) for name in (*BRANCH, "method")],
    sa.Column("run", sa.String, nullable=False, comment="names what is trained how: trainer/ledger/file_batches.py"),
    sa.Column("step", sa.Integer, nullable=False, comment="optimizer steps of the run once this batch is trained"),
    sa.Column("steps", sa.Integer, nullable=False, comment="of the whole run"),
    sa.Column("examples", sa.String, nullable=False, comment="digest of what the run trains"),
    sa.Column("files", sa.String, nullable=False, comment="JSON: name, checksum, size and rows of each file of the batch"),
    comment="a row a batch that was made of files",
)
FILE_BATCH_ROLLOUTS = sa.Table(
    "file_batch_rollouts",
    METADATA,
    sa.Column("batch_id", sa.String, primary_key=True),
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    *[sa.Column(name, sa.String, nullable=False) for name in (*BRANCH, "mode", "group_id", "build_spec")],
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Index("file_batch_rollouts_by_group", *BRANCH, "run_id", "group_id"),
    comment="rollouts that rows of a file batch came from: named, not claimed, since a run goes through its rows several times",
)
SKIPPED = sa.Table(
    "skipped_groups",
    METADATA,
    *_branch_key(),
    *[sa.Column(name, sa.String, primary_key=True) for name in ("run_id", "mode", "build_spec", "group_id")],
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("detail", sa.String, nullable=False, comment="a sentence about this group; empty: the reason says it all"),
    sa.Column("basis", sa.String, nullable=False, comment="JSON: the settings that the reason depends on (trainer/ledger/skips.py)"),
    sa.Column("head", sa.Integer, comment="the reason holds for what comes of this version; NULL: it depends on no version"),
    sa.Column("version", sa.Integer, nullable=False, comment="newest number that the policy had handed out: what was skipped when"),
    sa.Column("committed", sa.Integer, nullable=False, comment="newest version that the branch had committed"),
    sa.Column("skipped_at", sa.BigInteger, nullable=False, comment="microseconds since 1970, for people"),
    sa.Index("skipped_groups_by_version", *BRANCH, "version"),
    sa.Index("skipped_groups_by_reason", *BRANCH, "run_id", "reason", "version"),
)
PINS = sa.Table(
    "pins",
    METADATA,
    sa.Column("policy", sa.String, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.String, primary_key=True, comment="of a publication under way; empty: a user"),
    comment="versions whose files are kept, on whichever branches they are",
)
PHASES = sa.Table(
    "phases",
    METADATA,
    *_branch_key(),
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("phase", sa.Integer, nullable=False, comment="steps of the run that led to the version"),
    comment="a row a version that is served in a phase of policies that are trained together (trainer/phases.py)",
)


CHANGES = sa.Table(
    "changes",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, nullable=False, comment="transactions that have changed a row, of any policy"),
    sa.Column("freed", sa.BigInteger, nullable=False, comment="the newest of them that freed skipped or trained groups"),
    comment="one row, by which a reader of the ledger sees that it is unchanged",
)


_CHANGES_READ = sa.select(CHANGES.c.number, CHANGES.c.freed)


@dataclass(frozen=True, slots=True)
class LedgerVersion:
    """Version of a policy, as the ledger records it."""

    policy_version: PolicyVersion
    branch: str
    parent_branch: str
    """Branch of the parent: its own, or the one that this branch began from; empty for initial weights."""
    run_id: str
    modes: str
    """Modes of the rollouts that trained it, comma-separated; empty for initial weights."""
    tokenizer_hash: str
    status: VersionStatus | None
    """Status of the version. None: its step is under way."""
    metrics: dict[str, float]

    @property
    def version(self) -> int:
        """Return its number."""
        return self.policy_version.version


def version_of(row: sa.RowMapping) -> LedgerVersion:
    """Return a row of VERSIONS as a `LedgerVersion`."""
    facts = PolicyVersion(row["policy"], row["version"], row["parent"], row["batch_id"], row["checksum"], row["path"])
    status = VersionStatus(row["status"]) if row["status"] else None
    metrics = json.loads(row["metrics"])
    return LedgerVersion(facts, row["branch"], row["parent_branch"], row["run_id"], row["modes"], row["tokenizer_hash"], status, metrics)


def equal_to(table: sa.Table, facts: Mapping[str, object]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that columns have these values."""
    return [table.c[name] == value for name, value in facts.items()]


def ledger_location(settings: TrainerSettings) -> Path | str:
    """Return the ledger's location by the settings: a directory for SQLite's file, or a URL."""
    return settings.directory if settings.ledger_url is None else settings.ledger_url.get_secret_value()


class LedgerDatabase(AnyDatabase):
    """Database of the ledger, with its tables."""

    def __init__(self, location: Path | str) -> None:
        """Open it, and create its tables where it has none.

        Args:
            location: the directory of SQLite's file, which is made; or a URL, sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.

        Raises:
            LedgerError: the URL is of no supported database, no server answers there, or it has tables of another schema.
        """
        super().__init__(_url(location), METADATA, _OWNER)
        self._remembered: dict[Hashable, tuple[Hashable, Any]] = {}
        with super().transaction() as transaction:
            insert_new(transaction, CHANGES, [{"id": 0, "number": 0, "freed": 0}])
        event.listen(self.engine, "after_execute", _note_change)

    @contextmanager
    def transaction(self) -> Generator[sa.Connection]:
        """Open a transaction, which is counted when it changes a row; otherwise as in `spangrad.database`."""
        with super().transaction() as connection:
            connection.info.pop(_CHANGED, None)
            yield connection
            freed = connection.info.pop(_CHANGED, None)
            if freed is not None:
                number = CHANGES.c.number + 1
                connection.execute(CHANGES.update().values(number=number, **({"freed": number} if freed else {})))
                connection.info.pop(_CHANGED, None)

    def remembered(self, name: Hashable, read: Callable[[sa.Connection], T], given: Hashable = None) -> T:
        """Return the result of `read`, cached until the ledger changes, or `given`; the caller must not change it."""

        def newest() -> T:
            with self.reading() as connection:
                state = self.changes(connection), given
                known = self._remembered.get(name)
                if known and known[0] == state:
                    return known[1]
                value = read(connection)
            self._remembered[name] = state, value
            return value

        return self.retries(newest)

    @staticmethod
    def note_freed(connection: sa.Connection) -> None:
        """Count the transaction as one that frees groups of committed batches; taking a row out of skipped_groups is noticed."""
        connection.info[_CHANGED] = True

    def changes(self, connection: sa.Connection) -> tuple[int, int]:
        """Return the number of transactions that have changed a row, and of the newest that freed skipped or trained groups."""
        number, freed = connection.execute(_CHANGES_READ).one()
        return int(number), int(freed)


def _note_change(connection: sa.Connection, statement: object, *_: object) -> None:
    """Record in a connection that a statement changes rows, and whether one has taken rows out of skipped_groups."""
    if isinstance(statement, sa.Insert | sa.Update | sa.Delete):
        frees = isinstance(statement, sa.Delete) and statement.table is SKIPPED
        connection.info[_CHANGED] = connection.info.get(_CHANGED, False) or frees


def _url(location: Path | str) -> sa.URL:
    if isinstance(location, str):
        return database_url(location, _OWNER)
    make_private(location)
    return sa.URL.create("sqlite", database=str(location / FILE))
