"""The queue while its database is away, and when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from runner.queue import rows
from runner.queue import service as service_module
from runner.queue.rows import Running
from runner.queue.wire import LeaseRequest, RolloutState
from spangrad.database import Database
from spangrad.errors import QueueError
from tests.support.runners import done, is_locked, is_true, new_rollouts, queue_settings, serving, until
from tests.support.servers import running_postgres


async def test_queue_without_database_answers_503_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db"), retry_seconds=0) as (client, service):
        await client.enqueue("run", new_rollouts(2))
        (lease,) = await client.lease("run", "worker")

        def away(_: Database) -> Any:
            raise QueueError("the database is away.")

        with monkeypatch.context() as patch:
            patch.setattr(Database, "transaction", away)
            with pytest.raises(QueueError, match=r"refuses POST /v1/leases/complete \(503\): the database is away\."):
                await client.complete([done(lease)])
        assert (await client.complete([done(lease)]))[0].refused is None
        assert service.in_flight == 0


@pytest.mark.slow
async def test_queue_with_restarted_postgresql_loses_no_rollout() -> None:
    with running_postgres() as postgres:
        settings = queue_settings(postgres.schema("queue"))
        async with serving(settings, retry_seconds=0) as (client, service):
            await client.enqueue("run", new_rollouts(4))
            first, second = await client.lease("run", "worker", 2)
            await client.complete([done(first)])
            postgres.crash()
            with pytest.raises(QueueError, match=r"refuses POST /v1/leases/complete \(503\): the queue's database .* failed"):
                await client.complete([done(second)])
            assert await client.beat([second]) == [], "heartbeats need no database"
            await asyncio.to_thread(postgres.start)
            assert [receipt.refused for receipt in await client.complete([done(first), done(second)])] == [None, None]
            await until(lambda: is_locked(settings.queue.db.get_secret_value()))
            assert (await client.run("run")).states == {RolloutState.QUEUED: 2, RolloutState.SUCCEEDED: 2}
            assert service.in_flight == 0


async def test_failed_writes_have_running_attempts_read_once_or_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, outages, read = 0, 0, rows.running

    def counted(connection: sa.Connection) -> list[Running]:
        nonlocal reads
        reads += 1
        return read(connection)

    def away(_: Database) -> Any:
        nonlocal outages
        outages += 1
        raise QueueError("the database is away.")

    def rebuilding() -> int:
        names = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
        return names.count("_rebuild_when_possible")

    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, service):
        await client.enqueue("run", new_rollouts(1))
        await client.lease("run", "worker")
        monkeypatch.setattr(rows, "running", counted)
        monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.05)
        ask = LeaseRequest(run_id="run", worker="worker", count=1)
        with monkeypatch.context() as patch:
            patch.setattr(Database, "transaction", away)
            for _ in range(50):
                with pytest.raises(QueueError):
                    await service.lease(ask)
            assert rebuilding() == 1
            failed = outages
            await until(lambda: is_true(outages >= failed + 2))  # reads that failed as well are repeated
        await until(lambda: is_true(not rebuilding()))
        assert 1 <= reads <= 2
        assert service.in_flight == 1
