"""The queue under kill -9: of the server, of workers, of both; nothing that was acknowledged is lost, nothing is completed twice."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from runner.queue.client import QueueClient
from runner.queue.tables import ATTEMPTS, ROLLOUTS, QueueDatabase
from runner.queue.wire import RolloutSelector, RolloutState
from spangrad.http.queue_messages import NewRollout, new_rollout
from spangrad.processes import Child, dying_with_parent
from spangrad.settings import Settings
from tests.support.runners import is_true, new_rollouts, queue_process, queue_settings, until

ROOT = Path(__file__).parents[2]


class Workers:
    """Processes that lease and complete, with what each was acknowledged."""

    def __init__(self, url: str, directory: Path, count: int) -> None:
        self._url, self._directory = url, directory
        self._started = 0
        self._running = [self._start() for _ in range(count)]

    def kill_one(self, chance: random.Random) -> None:
        """And start another."""
        place = chance.randrange(len(self._running))
        self._running[place].kill()
        self._running[place].wait()
        self._running[place] = self._start()

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def acknowledged(self) -> Counter[tuple[str, int]]:
        lines = [line.split() for file in self._directory.glob("worker-*") for line in file.read_text().splitlines()]
        return Counter((name, int(attempt)) for name, attempt in lines)

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        file = self._directory / f"worker-{self._started}"
        file.touch()
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-m", "tests.programs.queue_worker", self._url, str(file)]
        return subprocess.Popen(dying_with_parent(command, environment), env=environment)


def poison(count: int, prefix: str) -> list[NewRollout]:
    return [new_rollout("poison", "poison", f"{prefix} poison", rollout_id=f"{prefix}{i}", max_attempts=3) for i in range(count)]


async def survive(settings: Settings, directory: Path, kills: int, seed: int) -> None:
    """Enqueue and cancel while server and workers are killed at random; then see that everything came to its end, once."""
    chance = random.Random(seed)
    server: Child = queue_process(settings, directory / "queue.log")
    workers = Workers(settings.queue.url, directory, 3)
    enqueued: set[str] = set()
    cancelled: set[str] = set()
    killing = True

    async def enqueue(client: QueueClient) -> None:
        for number in range(100_000):
            if not killing:
                return
            new = [
                *new_rollouts(8, f"{number}-", max_attempts=1000),
                *poison(1, f"p{number}-"),
                *new_rollouts(2, f"c{number}-", max_attempts=1000),
            ]
            enqueued.update(await client.enqueue("run", new))
            unwanted = [f"c{number}-0", f"c{number}-1"]
            await client.cancel(RolloutSelector(rollout_ids=unwanted))
            cancelled.update(unwanted)
            await asyncio.sleep(chance.random() * 0.05)

    try:
        async with QueueClient.of(settings.queue, retry_seconds=120) as client:
            enqueuing = asyncio.create_task(enqueue(client))
            for kill in range(kills):
                await asyncio.sleep(chance.random() * 0.6)
                await until(lambda so_many=11 * (kill + 1): is_true(len(enqueued) >= so_many), 60)  # a load to speak of
                if chance.random() < 0.3:
                    workers.kill_one(chance)
                server.process.kill()
                server.process.wait()
                server = queue_process(settings, directory / "queue.log")
            killing = False
            await enqueuing
            end = time.monotonic() + 120
            while {RolloutState.QUEUED, RolloutState.RUNNING} & set(states := (await client.run("run")).states):
                assert time.monotonic() < end, f"not everything came to an end: {states}"
                await asyncio.sleep(0.2)
    finally:
        workers.stop()
        server.stop()
    require_truth(settings, enqueued, cancelled, workers.acknowledged(), kills)


def require_truth(settings: Settings, enqueued: set[str], cancelled: set[str], acknowledged: Counter[tuple[str, int]], kills: int) -> None:
    """Assert that the queue's rows agree with everything that was acknowledged."""
    database = QueueDatabase(settings.queue.db.get_secret_value())
    with database.reading() as connection:
        states = {row.rollout_id: RolloutState(row.state) for row in connection.execute(sa.select(ROLLOUTS))}
        good = connection.execute(sa.select(ATTEMPTS.c.rollout_id, ATTEMPTS.c.attempt).where(ATTEMPTS.c.reason.is_(None))).all()
        reasons = Counter(connection.execute(sa.select(ATTEMPTS.c.reason)).scalars())
    database.close()
    assert enqueued <= set(states), "an acknowledged rollout is lost"
    assert len(enqueued) > 10 * kills, "there was no load to speak of"
    succeeded = {name for name, state in states.items() if state is RolloutState.SUCCEEDED}
    assert Counter(name for name, _ in good) == Counter(succeeded), "something was completed twice, or not at all"
    assert set(acknowledged) <= {(row.rollout_id, row.attempt) for row in good}, "an acknowledged completion is lost"
    assert max(acknowledged.values()) == 1
    assert {name for name in enqueued if states[name] is RolloutState.DEAD} >= {name for name in enqueued if name.startswith("p")}
    assert {states[name] for name in cancelled} <= {RolloutState.CANCELLED, RolloutState.SUCCEEDED}, "what was done before stays done"
    assert {name for name in enqueued - cancelled if not name.startswith(("p", "c"))} <= succeeded
    print(f"{len(enqueued)} enqueued, {len(succeeded)} succeeded, {dict(reasons)}")


def crash_settings(db: str) -> Settings:
    return queue_settings(db, queue__lease_seconds=2.0)


async def test_queue_killed_3_times_loses_no_rollout(tmp_path: Path) -> None:
    await survive(crash_settings(f"sqlite:///{tmp_path}/queue.db"), tmp_path, kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_queue_killed_50_times_loses_no_rollout(queue_db: str, tmp_path: Path) -> None:
    await survive(crash_settings(queue_db), tmp_path, kills=50, seed=2)


def test_queue_server_sigterm_answers_waiting_requests_and_keeps_acknowledged_work(tmp_path: Path) -> None:
    """The queue answers a waiting lease request at once at SIGTERM, and every acknowledged rollout is in its database."""
    settings = crash_settings(f"sqlite:///{tmp_path}/queue.db")
    server = queue_process(settings, tmp_path / "queue.log")

    async def stop() -> None:
        async with QueueClient.of(settings.queue) as client:
            waiting = asyncio.create_task(client.lease("nothing comes", "worker", wait_seconds=60))
            adding = [asyncio.create_task(client.enqueue("run", new_rollouts(50, f"{i}-"))) for i in range(20)]
            await adding[0]
            began = time.monotonic()
            server.process.terminate()
            assert await waiting == []
            assert await asyncio.to_thread(server.process.wait, 30) == 0
            assert time.monotonic() - began < 50, "it waited for the request's time to end"
            for task in adding:
                task.cancel()
            done = [task.result() for task in adding if task.done() and not task.cancelled()]
        database = QueueDatabase(settings.queue.db.get_secret_value())
        with database.reading() as connection:
            there = set(connection.execute(sa.select(ROLLOUTS.c.rollout_id)).scalars())
        database.close()
        assert {name for names in done for name in names} <= there

    try:
        asyncio.run(stop())
    finally:
        server.stop()
