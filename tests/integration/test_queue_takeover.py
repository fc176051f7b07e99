"""A PostgreSQL database has one server also when the session that holds its lock was ended: the server takes the lock again, or ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from runner.queue import tables
from runner.queue.tables import QueueDatabase
from spangrad.errors import QueueError
from tests.support.runners import queue_process, queue_settings, refuses, serving, until


@pytest.fixture
def url(postgres: Callable[[str], str]) -> str:
    return postgres(f"t{uuid.uuid4().hex}")


def end_the_locks_session(url: str) -> None:
    """End the session that holds the queue's server lock, as an administrator, a proxy or a failover does."""
    condition = "classid = %s AND objid::bigint = (hashtext(current_schema())::bigint & 4294967295)"
    with psycopg.connect(url, autocommit=True) as connection:
        ended = connection.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND {condition}", [tables._SERVER_LOCK]
        )
        assert ended.fetchall() == [(True,)]


async def test_queue_server_that_lost_database_lock_takes_it_again(url: str) -> None:
    async with serving(queue_settings(url)) as (client, service):
        for _ in range(2):
            end_the_locks_session(url)
            await until(lambda: refuses(url))
        assert await client.runs() == []
        assert not service.taken.done()


def test_queue_server_whose_database_lock_is_taken_ends(url: str, tmp_path: Path) -> None:
    server = queue_process(queue_settings(url), tmp_path / "log")
    try:
        end_the_locks_session(url)
        other = taken(url)
        try:
            assert server.process.wait(30) == 1
        finally:
            other.close()
        assert "another `spangrad queue` serves from queue.db" in (tmp_path / "log").read_text()
    finally:
        server.stop()


def taken(url: str) -> QueueDatabase:
    """The database, as another server has it: the one that had it may have been quicker, and is then ended again."""
    end = time.monotonic() + 20
    while True:
        try:
            return QueueDatabase(url)
        except QueueError:
            assert time.monotonic() < end
            end_the_locks_session(url)
