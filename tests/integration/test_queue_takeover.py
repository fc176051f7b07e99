"""A PostgreSQL database has one server also when the session that holds its lock was ended: the server takes the lock again, or ends."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from runner.queue.rows import Defaults
from runner.queue.service import Service
from runner.queue.tables import QueueDatabase, ServedElsewhereError
from runner.queue.wire import Enqueue, LeaseRequest
from spangrad.errors import QueueError
from tests.support.runners import is_locked, lock_holders, new_rollouts, queue_process, queue_settings, serving, until


@pytest.fixture
def url(postgres: Callable[[str], str]) -> str:
    return postgres(f"t{uuid.uuid4().hex}")


def end_the_locks_session(url: str) -> int:
    """End the session that holds the queue's server lock, as an administrator, a proxy or a failover does; return its process id."""
    ((pid, ended),) = lock_holders(url, "pid, pg_terminate_backend(pid)")
    assert ended
    return int(pid)


async def test_queue_server_that_lost_database_lock_takes_it_again(url: str) -> None:
    async with serving(queue_settings(url)) as (client, service):
        for _ in range(2):
            ended = end_the_locks_session(url)
            await until(partial(is_locked, url, ended))
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


async def test_queue_server_writes_nothing_once_another_has_begun_to_serve(url: str) -> None:
    def server() -> Service:
        return Service(QueueDatabase(url), Defaults(lambda _: 300, max_attempts=2, lease_seconds=30))

    ask = LeaseRequest(run_id="run", worker="worker", count=1)
    first = server()
    await first.enqueue(Enqueue(run_id="run", rollouts=new_rollouts(2)))
    end_the_locks_session(url)
    second = server()
    with pytest.raises(ServedElsewhereError):
        await first.lease(ask)
    assert [lease.rollout_id for lease in (await second.lease(ask)).leases] == ["r0"]
    await second.close()
    with pytest.raises(ServedElsewhereError):
        await asyncio.to_thread(first.database.keep)  # the lock is free; what the first holds in memory is outdated
    with pytest.raises(ServedElsewhereError):
        await first.lease(ask)
    with pytest.raises(ServedElsewhereError):
        await first.taken
    await first.close()


def taken(url: str) -> QueueDatabase:
    """The database, as another server has it: the one that had it may have been quicker, and is then ended again."""
    end = time.monotonic() + 60
    while True:
        try:
            return QueueDatabase(url)
        except QueueError:
            assert time.monotonic() < end
            end_the_locks_session(url)
