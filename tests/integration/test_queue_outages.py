"""The queue while its database is away, and when it is back."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from runner.process.task_demands import TaskDemands
from runner.queue import purge, rows, running_attempts
from runner.queue import service as service_module
from runner.queue.rows import Running
from runner.queue.service import Service
from runner.queue.wire import LeaseRequest, Purge, Purged, RolloutState
from spangrad.database import Database
from spangrad.errors import QueueError
from spangrad.leases import this_boot
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


async def test_leases_expire_after_sweep_that_found_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def is_dead(holder: str) -> bool:
        if failures:
            raise failures.pop()
        return False

    monkeypatch.setattr(service_module, "_SWEEPS_PER_RENEWAL", 1)
    monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(running_attempts, "is_dead", is_dead)
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=1, runner__max_attempts=1)) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        await client.lease("run", "worker")

        async def is_lost() -> bool:
            return (await client.run("run")).states == {RolloutState.DEAD: 1}

        await until(is_lost)
        assert not failures


async def test_first_lease_without_descriptors_is_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    this_boot.cache_clear()
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, service):
        await client.enqueue("run", new_rollouts(1))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", refuse)
            leases = await service.lease(LeaseRequest(run_id="run", worker="worker", count=1))
        assert [lease.rollout_id for lease in leases.leases] == ["r0"]


async def test_running_attempts_are_read_again_after_read_without_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: Database) -> Any:
        raise QueueError("the database is away.")

    failures = [RuntimeError("can't start new thread")]
    rebuild = Service._rebuild

    async def rebuilt(service: Service) -> None:
        if failures:
            raise failures.pop()
        await rebuild(service)

    monkeypatch.setattr(service_module, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(Service, "_rebuild", rebuilt)
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, service):
        await client.enqueue("run", new_rollouts(1))
        (lease,) = await client.lease("run", "worker")
        service._running.remove((lease.rollout_id, lease.attempt))
        with monkeypatch.context() as patch:
            patch.setattr(Database, "transaction", away)
            with pytest.raises(QueueError):
                await service.lease(LeaseRequest(run_id="run", worker="worker", count=1))
        await until(lambda: is_true(service.in_flight == 1))
        assert not failures


async def test_purge_periodically_repeats_purge_that_got_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    purges: list[Purge] = []

    async def work(request: Purge) -> Purged:
        purges.append(request)
        if len(purges) == 1:
            raise RuntimeError("can't start new thread")
        return Purged(rollouts=0, more=False)

    monkeypatch.setattr(purge, "_PURGE_SECONDS", 0.01)
    purging = asyncio.create_task(purge.purge_periodically(work, 60.0))
    await until(lambda: is_true(len(purges) > 1))
    purging.cancel()


async def test_task_demands_repeat_part_that_got_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 0

    async def enqueue_parts(_: TaskDemands) -> tuple[bool, bool]:
        nonlocal parts
        parts += 1
        if parts == 1:
            raise RuntimeError("can't start new thread")
        return False, False

    monkeypatch.setattr(TaskDemands, "_enqueue_parts", enqueue_parts)
    monkeypatch.setattr("runner.process.task_demands._LOOK_SECONDS", 0.05)
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")):
        await until(lambda: is_true(parts > 1))
