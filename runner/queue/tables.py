"""Tables of the queue, and the lock that makes one server the owner of its database.

In: a URL. Out: tables, and a database that this process alone serves from. Invariant: the running attempt is part of its rollout's row,
and becomes a row of `attempts` when it ends; so a hand-out is one statement, and each fact is stored once. A server whose lock another one
has taken writes nothing more, even before it notices and after the other one has ended, since what it holds in memory is outdated.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from spangrad.database import Database, Owner, database_url
from spangrad.errors import QueueError
from spangrad.processes import lock_alone, make_private

METADATA = sa.MetaData()
_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_SERVER_LOCK = 0x71756575
"""Key of the PostgreSQL advisory lock that a server holds while it runs."""
_UNLOCK_SECONDS = 2.0
"""Time that PostgreSQL may need to notice that a server was killed, in seconds."""

_ENDED_ONLY: dict[str, Any] = dict.fromkeys(("sqlite_where", "postgresql_where"), sa.text("ended IS NOT NULL"))
"""Options of an index that has an entry for a rollout once it has ended."""

ROLLOUTS = sa.Table(
    "rollouts",
    METADATA,
    sa.Column("seq", _BIG, primary_key=True, comment="in the order of arrival"),
    sa.Column("rollout_id", sa.String, nullable=False, unique=True),
    sa.Column("run_id", sa.String, nullable=False),
    sa.Column("task_id", sa.String, nullable=False),
    sa.Column("input", sa.Text, nullable=False, comment="JSON"),
    sa.Column("mode", sa.String, nullable=False),
    sa.Column("group_id", sa.String, nullable=False),
    sa.Column("group_size", sa.Integer, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("timeout_seconds", sa.Float, nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("prompt_name", sa.String, comment="that its attempts are pinned to, like the column below. NULL: to none"),
    sa.Column("prompt_version", sa.Integer),
    sa.Column("least_sandbox", sa.String, comment="that its attempts may run in. NULL: any, and none as well"),
    sa.Column("sampling", sa.Text, comment="JSON; NULL: the agent's own"),
    sa.Column("limits", sa.Text, comment="of calls, JSON; NULL: the worker's"),
    sa.Column("data_source", sa.String, comment="NULL: none is named"),
    sa.Column("image", sa.String, comment="NULL: the handler's own"),
    sa.Column("attempts_left", sa.Integer, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False, comment="the number of the newest attempt; -1: none was made"),
    sa.Column("worker", sa.String, comment="of the attempt under way, like the columns below. NULL: there is none"),
    sa.Column("lease_seconds", sa.Float),
    sa.Column("boot", sa.String, comment="which boot of the server's machine `began` counts from"),
    sa.Column("began", sa.Float, comment="by that machine's monotonic clock"),
    sa.Column("began_at", sa.Float, comment="seconds since 1970: for people, never compared"),
    sa.Column("ended", _BIG, comment="its place in the order of endings. NULL: it has not ended"),
    sa.Column("ended_at", sa.Float, comment="seconds since 1970: says how long it is kept, and nothing else. NULL: it has not ended"),
    sa.Index("rollouts_by_state", "state", "run_id", sa.text("priority DESC"), "seq"),
    sa.Index("rollouts_by_group", "run_id", "group_id"),
    sa.Index("rollouts_by_run", "run_id", "seq"),
    sa.Index("rollouts_by_end", "run_id", "ended", **_ENDED_ONLY),
    sa.Index("rollouts_by_outcome", "run_id", "state", "seq", **_ENDED_ONLY),
    sa.Index("rollouts_by_outcome_of_any_run", "state", "seq", **_ENDED_ONLY),
)
ATTEMPTS = sa.Table(
    "attempts",
    METADATA,
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("worker", sa.String, nullable=False),
    sa.Column("began_at", sa.Float, nullable=False, comment="seconds since 1970: for people, never compared"),
    sa.Column("ended_at", sa.Float, nullable=False, comment="the same"),
    sa.Column("reason", sa.String, comment="NULL: it succeeded"),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("rewards", sa.Text, comment="JSON; NULL: the agent's spans hold them, or it failed"),
    sa.Column("calls", sa.Integer),
    sa.Column("seconds", sa.Float),
    sa.Column("state", sa.String, nullable=False, comment="that its end put the rollout into"),
    comment="attempts that have ended",
    sqlite_with_rowid=False,
)
GROUPS = sa.Table(
    "groups",
    METADATA,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("group_id", sa.String, primary_key=True),
    sa.Column("mode", sa.String, primary_key=True, comment="a group may have rollouts of several"),
    sa.Column("cancelled", sa.Boolean, nullable=False, server_default=sa.false(), comment="a rollout of it was: it will never be whole"),
    sqlite_with_rowid=False,
)
GROUP_COUNTS = sa.Table(
    "group_counts",
    METADATA,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("mode", sa.String, primary_key=True),
    sa.Column("groups", _BIG, nullable=False),
    sa.Column("cancelled", _BIG, nullable=False, comment="of these"),
    comment="numbers of rows of `groups`: a demand is compared with them several times a second",
    sqlite_with_rowid=False,
)
RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("run_id", sa.String, primary_key=True),
    *[
        sa.Column(name, _BIG, nullable=False, server_default="0", comment=comment)
        for name, comment in (
            ("rollouts", "in whatever state"),
            *((state, "of these") for state in ("succeeded", "failed", "dead", "cancelled")),
            ("closed", "place in the order of endings up to which root spans of lost attempts are in the store"),
        )
    ],
    comment="numbers of a run's rollouts by state, except that of the running ones: a hand-out changes one table alone",
    sqlite_with_rowid=False,
)
DEMANDS = sa.Table(
    "demands",
    METADATA,
    *[sa.Column(name, sa.String, primary_key=True) for name in ("run_id", "policy", "branch")],
    sa.Column("groups", _BIG, nullable=False),
    sa.Column("oldest_version", _BIG),
    sa.Column("filled", _BIG),
)

CALLBACKS = sa.Table(
    "callbacks",
    METADATA,
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("run_id", sa.String, nullable=False),
    sa.Column("url", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("reason", sa.String, comment="for which it was given up. NULL: it was not"),
    sa.Index("callbacks_by_state", "state"),
    comment="URLs that trajectories are posted to",
    sqlite_with_rowid=False,
)

ENDED = sa.Table(
    "ended",
    METADATA,
    sa.Column("highest", _BIG, nullable=False, comment="number of an ending that may have been revoked; one row, or none so far"),
)

TASKS = sa.Table(
    "tasks",
    METADATA,
    sa.Column("digest", sa.String, primary_key=True, comment="SHA-256 of all tasks that were uploaded together"),
    sa.Column("place", _BIG, primary_key=True, autoincrement=False, comment="0, 1, ..."),
    sa.Column("task_id", sa.String, nullable=False),
    sa.Column("input", sa.Text, nullable=False, comment="JSON"),
    sa.Column("prompt_name", sa.String, comment="that its attempts are pinned to, like the column below. NULL: the task names none"),
    sa.Column("prompt_version", sa.Integer),
    sa.Column("least_sandbox", sa.String, comment="that its attempts may run in. NULL: any, and none as well"),
    sa.Column("data_source", sa.String, comment="NULL: none is named"),
)
NAMED_TASKS = sa.Table(
    "named_tasks",
    METADATA,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("tasks", _BIG, nullable=False, comment="how many"),
)
TASK_DEMANDS = sa.Table(
    "task_demands",
    METADATA,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("digest", sa.String, primary_key=True, comment="of the tasks that the name referred to"),
    sa.Column("tasks", _BIG, nullable=False, comment="how many"),
    sa.Column("demand", sa.Text, nullable=False, comment="JSON"),
    sa.Column("groups", _BIG, nullable=False, comment="demanded in all"),
    sa.Column("enqueued", _BIG, nullable=False, comment="groups that are enqueued"),
    comment="groups of stored tasks that the server enqueues",
    sqlite_with_rowid=False,
)
PROMPT_VERSIONS = sa.Table(
    "prompt_versions",
    METADATA,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("checksum", sa.String, nullable=False, comment="SHA-256 of the text in UTF-8, in hex"),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False, comment="seconds since 1970: for people, never compared"),
    sa.UniqueConstraint("name", "checksum"),
)
PROMPT_HEADS = sa.Table(
    "prompt_heads",
    METADATA,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False, comment="what is published"),
)
PROMPT_EDITS = sa.Table(
    "prompt_edits",
    METADATA,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("search", sa.String, primary_key=True),
    *[sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in ("round", "parent", "number")],
    sa.Column("version", sa.Integer, comment="NULL: the model gave no prompt"),
    sa.Column("critique", sa.Text, nullable=False),
)

SERVER = sa.Table(
    "server",
    METADATA,
    sa.Column("id", sa.String, nullable=False, comment="fencing token of the newest server; one row on PostgreSQL, none on SQLite"),
)

_OWNER = Owner(
    "the queue's database",
    "queue.db",
    QueueError,
    "nothing that was acknowledged is lost.",
    lock=_SERVER_LOCK + 1,
    beginning="Or begin an empty queue: name another database by queue.db.",
)


class ServedElsewhereError(QueueError):
    """Another server serves from the database, or has served from it since this one lost its lock."""


class QueueDatabase(Database):
    """The queue's database, from which this process alone serves until it is closed."""

    def __init__(self, location: str) -> None:
        """Open the database, and create its tables where it has none.

        Args:
            location: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; queue.db.

        Raises:
            QueueError: there is no such database, it has tables of another schema, or another server serves from it.
        """
        url = database_url(location, _OWNER)
        self._file: IO[str] | None = None
        if url.get_backend_name() == "sqlite":
            self._file = _only_server(url)
        self._server: str | None = None
        """Fencing token. None: a lock on a file cannot be lost."""
        try:
            super().__init__(url, METADATA, _OWNER)
        except BaseException:
            self._unlock()
            raise
        self._session: sa.Connection | None = None
        self._keep_lock = threading.Lock()
        try:
            self.keep()
            if not self.is_sqlite:
                self._server = self._enter()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def transaction(self) -> Generator[sa.Connection]:
        """Run one transaction as in `spangrad.database`, unless another server has begun to serve since this one did.

        Raises:
            ServedElsewhereError: one has.
            QueueError: the database failed.
        """
        with super().transaction() as connection:
            self._require_newest(connection)
            yield connection

    def _enter(self) -> str:
        """Make this server the newest, after all transactions of the one before, and return its fencing token."""
        server = uuid.uuid4().hex
        with super().transaction() as connection:
            connection.execute(SERVER.delete())
            connection.execute(SERVER.insert().values(id=server))
        return server

    def _require_newest(self, connection: sa.Connection) -> None:
        if self._server is not None and connection.execute(sa.select(SERVER.c.id)).scalar() != self._server:
            raise _other_server_error(self.shown)

    def keep(self) -> None:
        """Renew the lock, where PostgreSQL was away, or has ended the session that held it.

        Raises:
            ServedElsewhereError: another server serves from the database by now, or has served from it meanwhile.
            QueueError: the database does not answer.
        """
        if self.is_sqlite:
            return
        with self._keep_lock, self.translated():
            if self._session is not None:
                try:
                    self._session.execute(sa.select(1))
                    return
                except DBAPIError:
                    self._close_session()
            # A session of its own, for as long as this process lives; schemas of one database may have a server each.
            self._session = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT", spangrad_reading=True)
            try:
                self._lock(self._session)
                self._require_newest(self._session)
            except BaseException:
                self._close_session()
                raise

    def _lock(self, session: sa.Connection) -> None:
        lock = sa.func.pg_try_advisory_lock(_SERVER_LOCK, sa.func.hashtext(sa.func.current_schema()))
        end = time.monotonic() + _UNLOCK_SECONDS
        while not session.execute(sa.select(lock)).scalar_one():
            if time.monotonic() > end:
                raise _other_server_error(self.shown)
            time.sleep(0.05)

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Close the connections, and release the lock."""
        with self._keep_lock:
            self._close_session()
        super().close()
        self._unlock()

    def _unlock(self) -> None:
        if self._file is not None:
            self._file.close()


def _only_server(url: sa.URL) -> IO[str]:
    """Lock a file next to SQLite's, so that one process serves from the database."""
    path = Path(f"{url.database or 'queue.db'}.lock")
    try:
        make_private(path.parent)
        file = path.open("w")
    except OSError as error:
        raise QueueError(f"queue.db: {path} cannot be written ({error.strerror}). Name a file that can.") from None
    if not lock_alone(file, f"queue.db: {path}", QueueError):
        file.close()
        raise _other_server_error(url.render_as_string(hide_password=True))
    return file


def _other_server_error(shown: str) -> ServedElsewhereError:
    return ServedElsewhereError(f"another `spangrad queue` serves from queue.db = {shown}. Ask that one, or name another database.")
