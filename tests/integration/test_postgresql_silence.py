"""A PostgreSQL server that accepts and never answers, stops amid a statement, or is cut off: bounded waits, and errors of its owner."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from pydantic import SecretStr

from runner.queue.wire import RolloutState
from spangrad import database as database_module
from spangrad.database import Database, Owner, database_url
from spangrad.errors import QueueError, SpangradError
from tests.support.runners import done, new_rollouts, queue_settings, serving
from tests.support.servers import Postgres, running_postgres
from tests.support.trainers import Cutting, FakeSource, committed, settings, wired, write_base
from trainer.ledger.store_retries import retry_transactions
from trainer.retries import Outage

OWNER = Owner("the shop", "shop.db", SpangradError, "nothing is sold twice.", lock=1, beginning="Or open a new shop.")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres() as running:
        yield running


@contextmanager
def short_limits() -> Generator[None]:
    """Have a silent server exceed our limits soon; one that answers might do so as well, where the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(database_module._CONNECTION, "connect_timeout", 2)
        patch.setattr(database_module, "_SILENT_SECONDS", 0.3)
        yield


@contextmanager
def frozen(server: Postgres) -> Generator[None]:
    """Stop all processes of a server for the length of the block: connections stay open, the kernel accepts new ones, nothing answers."""
    parent = psutil.Process(server.pid)
    parent.suspend()
    processes = [*parent.children(), parent]  # the last one to go on: meanwhile it starts none, and removes none that has ended
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        with short_limits():
            yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def opened(url: str) -> Database:
    tables = sa.MetaData()
    sa.Table("goods", tables, sa.Column("id", sa.Integer, primary_key=True))
    return Database(database_url(url, OWNER), tables, OWNER)


def test_database_whose_server_accepts_and_is_silent_fails_as_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, short_limits():
        began = time.monotonic()
        message = r"the shop postgresql\+psycopg://me:\*\*\*@127\.\S+ failed \(connection timeout.*\)\. See that the database runs"
        with pytest.raises(SpangradError, match=message):
            opened(f"postgresql://me:secret@127.0.0.1:{silent.getsockname()[1]}/x")
        assert time.monotonic() - began < 10


def test_database_whose_server_stops_within_transaction_fails_and_recovers(server: Postgres) -> None:
    with closing(opened(server.schema(f"t{uuid.uuid4().hex}"))) as database:
        message = r"the shop postgresql\S+ failed \(no answer for 0\.3 s\)\. See that the database runs"

        def sell() -> None:
            with database.transaction() as transaction:
                transaction.execute(sa.text("INSERT INTO goods VALUES (1)"))
                with frozen(server):
                    transaction.execute(sa.text("INSERT INTO goods VALUES (2)"))

        with pytest.raises(SpangradError, match=message):
            sell()
        with database.transaction() as transaction:
            assert transaction.execute(sa.text("SELECT count(*) FROM goods")).scalar() == 0


def test_statement_whose_rows_arrive_slowly_is_not_cut_off(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(server.schema(f"t{uuid.uuid4().hex}"))) as database, database.reading() as connection:
        monkeypatch.setattr(database_module, "_SILENT_SECONDS", 2.0)
        slow = "SELECT repeat('x', 9000), pg_sleep(0.1) FROM generate_series(1, 25)"
        assert len(connection.execute(sa.text(slow)).all()) == 25


def test_transaction_behind_held_lock_fails_as_its_owner(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(database_module._SESSION, "lock_timeout", "300ms")
    url = server.schema(f"t{uuid.uuid4().hex}")
    with closing(opened(url)) as database, closing(opened(url)) as other, other.transaction():
        with pytest.raises(SpangradError, match=r"failed \(canceling statement due to lock timeout"), database.transaction():
            pass
        with database.reading():
            pass


def test_connections_probe_peer_from_both_ends(server: Postgres) -> None:
    with closing(opened(server.schema(f"t{uuid.uuid4().hex}"))) as database, database.reading() as connection:
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout", "lock_timeout")
        assert [connection.execute(sa.text(f"SHOW {name}")).scalar() for name in names] == ["30", "10", "3", "60000", "10s"]
        driver = connection.connection.driver_connection
        assert driver is not None
        with socket.socket(fileno=os.dup(driver.pgconn.socket)) as own:
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert [own.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3, 60_000]


def test_limits_in_url_are_kept(server: Postgres) -> None:
    with closing(opened(f"{server.schema(f't{uuid.uuid4().hex}')}&keepalives_idle=7")) as database, database.reading() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        with socket.socket(fileno=os.dup(driver.pgconn.socket)) as own:
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7


def test_session_limits_in_options_of_url_are_kept(server: Postgres) -> None:
    url = sa.make_url(server.schema(f"t{uuid.uuid4().hex}"))
    options = f"{url.query['options']} -c lock_timeout=7s"
    with closing(opened(url.update_query_dict({"options": options}).render_as_string(False))) as database, database.reading() as connection:
        shown = [connection.execute(sa.text(f"SHOW {name}")).scalar() for name in ("lock_timeout", "tcp_keepalives_idle")]
        assert shown == ["7s", "30"]


async def test_queue_whose_postgresql_stops_answers_503_and_recovers(server: Postgres) -> None:
    async with serving(queue_settings(server.schema(f"t{uuid.uuid4().hex}")), retry_seconds=0) as (client, service):
        await client.enqueue("run", new_rollouts(2))
        (lease,) = await client.lease("run", "worker")
        with frozen(server):
            async with asyncio.timeout(20):
                with pytest.raises(QueueError, match=r"refuses POST /v1/leases/complete \(503\): the queue's database .* failed"):
                    await client.complete([done(lease)])
                assert await client.beat([lease]) == [], "heartbeats need no database"
        assert [receipt.refused for receipt in await client.complete([done(lease)])] == [None]
        assert (await client.run("run")).states == {RolloutState.QUEUED: 1, RolloutState.SUCCEEDED: 1}
        assert service.in_flight == 0


def test_trainer_whose_postgresql_stops_waits_for_it(server: Postgres, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = SecretStr(server.schema(f"t{uuid.uuid4().hex}"))
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", groups_per_batch=1, ledger_url=url)
    (tmp_path / "policies").mkdir()
    with ExitStack() as freeze:
        trainer = wired(chosen, FakeSource([*"abc"]), Cutting(lambda: freeze.enter_context(frozen(server))))
        outage = Outage("the ledger's database")
        retry_transactions(trainer.ledger, outage, trainer.shutdown)

        def thaw(seconds: float) -> None:
            if outage.is_under_way:
                freeze.close()

        trainer.shutdown.sleep = thaw  # type: ignore[method-assign]
        trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1"], 2: ["b-0", "b-1"], 3: ["c-0", "c-1"]}
    assert caplog.text.count("Trying again until the ledger's database answers") == 1
    trainer.ledger.close()
