"""A database is opened with the schema that made its tables, or refused, on SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from runner.queue.server import serve
from runner.queue.tables import QueueDatabase
from spangrad.database import Database, Owner, database_url
from spangrad.errors import LedgerError, QueueError, SpangradError
from tests.support.runners import queue_settings
from trainer.ledger.tables import LedgerDatabase

OWNER = Owner("the shop", "shop.db", SpangradError, "nothing is sold twice.", lock=1, beginning="Or open a new shop.")
QUEUE, LEDGER = "schema_of_queue_db", "schema_of_trainer_ledger_url"


def shop(*columns: sa.Column[int], index: bool = False, second: bool = False) -> sa.MetaData:
    """Return the tables of a shop."""
    tables = sa.MetaData()
    goods = sa.Table("goods", tables, sa.Column("id", sa.Integer, primary_key=True), *columns)
    if index:
        sa.Index("goods_by_id", goods.c.id)
    if second:
        sa.Table("sales", tables, sa.Column("id", sa.Integer, primary_key=True))
    return tables


def opened(url: str, tables: sa.MetaData) -> None:
    Database(database_url(url, OWNER), tables, OWNER).close()


def execute(url: str, statement: str) -> None:
    """Execute a statement, as a release with other tables would."""
    engine = sa.create_engine(database_url(url, OWNER))
    with engine.begin() as connection:
        connection.execute(sa.text(statement))
    engine.dispose()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (shop(), shop(sa.Column("price", sa.Integer))),
        (shop(sa.Column("price", sa.Integer)), shop(sa.Column("price", sa.Float))),
        (shop(), shop(index=True)),
        (shop(), shop(second=True)),
        (shop(second=True), shop()),
    ],
    ids=["column", "type", "index", "table", "older release"],
)
def test_database_with_other_tables_than_its_release_is_refused(queue_db: str, before: sa.MetaData, after: sa.MetaData) -> None:
    opened(queue_db, before)
    with pytest.raises(SpangradError) as caught:
        opened(queue_db, after)
    shown = re.escape(database_url(queue_db, OWNER).render_as_string())
    sentence = f"the shop {shown} has tables of schema (\\w{{12}}), and this spangrad's are of schema (\\w{{12}}). "
    versions = re.fullmatch(f"{sentence}Use the release of spangrad that made them. Or open a new shop.", str(caught.value))
    assert versions
    assert versions[1] != versions[2]
    opened(queue_db, before)


@pytest.mark.parametrize(
    ("database", "error", "statement", "recorded"),
    [
        (QueueDatabase, QueueError, f"DROP TABLE {QUEUE}", "unknown"),
        (QueueDatabase, QueueError, f"UPDATE {QUEUE} SET version = 'another'", "another"),
        (LedgerDatabase, LedgerError, f"DROP TABLE {LEDGER}", "unknown"),
        (LedgerDatabase, LedgerError, f"UPDATE {LEDGER} SET version = 'another'", "another"),
    ],
)
def test_queue_and_ledger_of_another_release_are_refused(
    queue_db: str, database: Callable[[str], Database], error: type[SpangradError], statement: str, recorded: str
) -> None:
    database(queue_db).close()
    database(queue_db).close()
    execute(queue_db, statement)
    for _ in range(2):
        with pytest.raises(error, match=f"has tables of schema {recorded}, and this spangrad's are of schema"):
            database(queue_db)


def test_queue_and_ledger_share_one_database(queue_db: str) -> None:
    for database in (QueueDatabase, LedgerDatabase, QueueDatabase):
        database(queue_db).close()


def test_queue_server_of_another_release_refuses_at_start(queue_db: str) -> None:
    QueueDatabase(queue_db).close()
    execute(queue_db, "DROP TABLE runs")
    execute(queue_db, f"DROP TABLE {QUEUE}")
    with pytest.raises(QueueError, match=r"the queue's database \S+ has tables of schema unknown, .* name another database by queue.db\.$"):
        serve(queue_settings(queue_db))


def test_database_whose_connections_are_all_in_use_fails_as_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(database_url(f"sqlite:///{tmp_path}/shop.db", OWNER), shop(), OWNER)
    pool = database.engine.pool
    monkeypatch.setattr(pool, "_timeout", 0.01)
    with contextlib.ExitStack() as readers:
        for _ in range(15):
            readers.enter_context(database.reading())
        with (
            pytest.raises(SpangradError, match=r"the shop sqlite:.* failed \(QueuePool limit of size 5 overflow 10 reached"),
            database.reading(),
        ):
            pass
    with database.reading():
        pass
    database.close()
