"""Real workers and a real server under kill -9, SIGSTOP, poison and cancellations: nothing is lost or done twice, no process is left."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.queue.client import QueueClient
from runner.queue.wire import RolloutSelector, RolloutState
from spangrad import semconv
from spangrad.processes import wait_until
from spangrad.types import AttemptFailure
from tests.support.runners import new_rollouts, queue_server, queue_settings, runner_services, until, until_ended, with_mood
from tests.support.worker_kills import WORKERS, Victims, require_no_orphan, require_once, until_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ROLLOUTS = 150
KILLS = 50
SLEEPERS = """
import asyncio

async def agent(given):
    await asyncio.sleep(600 if given == "sleep" else 0)
    return 1.0
"""


async def test_workers_killed_50_times_lose_no_rollout_and_leave_no_process(
    queue_db: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    chance = random.Random(8)
    settings = queue_settings(queue_db, queue__lease_seconds=3, max_attempts=KILLS + 2)
    with runner_services(tmp_path, queue__url=settings.queue.url, concurrency=3) as services:
        victims = Victims(services, settings, chance, services.start_worker)
        try:
            async with QueueClient.of(settings.queue, retry_seconds=300) as client:
                rollouts = with_mood("slow", new_rollouts(ROLLOUTS))
                await client.enqueue("run", rollouts)
                for _ in range(WORKERS):
                    services.start_worker()
                for number in range(KILLS):
                    # A kill comes when something more has ended, and a random part of an attempt later.
                    await until_ended(client, min(2 * (number + 1), ROLLOUTS))
                    await asyncio.sleep(chance.random() * 0.4)
                    await asyncio.to_thread(victims.kill_one)
                attempts = await require_once(client, services, [str(rollout.rollout_id) for rollout in rollouts])
                assert victims.killed.keys() == {"server", "worker", "host", "program"}
                reasons = Counter(str(reason or "succeeded") for reason in attempts.values())
                report(f"{dict(victims.killed)} killed; attempts: {dict(reasons)}")
                assert reasons.keys() <= {"succeeded", "lost", "crash", "exit_code"}
                await require_no_orphan(services)
        finally:
            victims.server.stop()


async def test_worker_that_hangs_is_replaced_and_its_late_results_are_ignored(queue_db: str, tmp_path: Path) -> None:
    settings = queue_settings(queue_db, queue__lease_seconds=3, max_attempts=2)
    with (
        runner_services(tmp_path, queue__url=settings.queue.url, concurrency=1) as services,
        queue_server(settings, tmp_path / "queue.log"),
    ):
        async with QueueClient.of(settings.queue) as client:
            await client.enqueue("run", with_mood("steady", new_rollouts(1)))
            stopped = services.start_worker()
            # Its program is at work: what comes of it is told after the worker goes on, when it is too late.
            await until_true("an attempt", lambda: bool(services.programs()))
            stopped.process.send_signal(signal.SIGSTOP)
            try:
                services.start_worker()
                (ended,) = await until_ended(client, 1)
                assert [attempt.reason for attempt in (await client.rollout("r0")).attempts] == [AttemptFailure.LOST, None]
            finally:
                stopped.process.send_signal(signal.SIGCONT)
            assert ended.attempts[-1].attempt == 1
            # It hears that its attempt is over, and goes on with others: both workers are kept busy.
            await client.enqueue("run", with_mood("slow", new_rollouts(8, "later ")))
            ended = await until_ended(client, 9)
            whole = [await client.rollout(rollout.rollout_id) for rollout in ended]
            assert len({rollout.attempts[-1].worker for rollout in whole}) == 2
            attempts = await require_once(client, services, [rollout.rollout_id for rollout in whole])
            assert Counter(attempts.values()) == {None: 9, AttemptFailure.LOST: 1}
            assert services.roots()["r0", 0][semconv.ROLLOUT_FAILURE] == "lost"
        await require_no_orphan(services)


async def test_task_that_crashes_its_host_is_dead_after_max_attempts_and_delays_no_other(queue_db: str, tmp_path: Path) -> None:
    settings = queue_settings(queue_db, max_attempts=3)
    with (
        runner_services(tmp_path, queue__url=settings.queue.url, workers=2, concurrency=2) as services,
        queue_server(settings, tmp_path / "queue.log"),
    ):
        async with QueueClient.of(settings.queue) as client:
            await client.enqueue(
                "run", [*with_mood("poison", new_rollouts(1, "poison ", priority=1)), *with_mood("slow", new_rollouts(20, "well "))]
            )
            services.start_worker()
            ended = await until_ended(client, 21)
            states = {rollout.rollout_id: rollout.state for rollout in ended}
            assert Counter(states.values()) == {RolloutState.SUCCEEDED: 20, RolloutState.DEAD: 1}
            poison = await client.rollout("poison 0")
            assert (poison.state, [attempt.reason for attempt in poison.attempts]) == (RolloutState.DEAD, [AttemptFailure.CRASH] * 3)
            whole = [await client.rollout(name) for name in states if name != poison.rollout_id]
            assert {len(rollout.attempts) for rollout in whole} == {1}, "no other rollout was tried again"
            # It was first in the queue; what ran on the other host ended meanwhile. A host is back so soon that few have the time.
            crashes = [attempt.ended_at or 0 for attempt in poison.attempts]
            assert any(min(crashes) < (rollout.attempts[0].ended_at or 0) < max(crashes) for rollout in whole)
        await require_no_orphan(services)


async def test_rollouts_cancelled_in_flight_free_every_slot(queue_db: str, tmp_path: Path) -> None:
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    settings = queue_settings(queue_db, queue__lease_seconds=20)
    with (
        runner_services(tmp_path, queue__url=settings.queue.url, concurrency=250) as services,
        queue_server(settings, tmp_path / "queue.log"),
    ):
        async with QueueClient.of(settings.queue) as client:
            for _ in range(4):
                services.start_worker(agent=("--agent", "sleepers:agent"))
            for time in (1, 2):  # the second time shows that every place of the first one is free
                await client.enqueue("run", with_mood("sleep", new_rollouts(1000, f"{time} ")))

                async def all_run() -> bool:
                    return (await client.run("run")).states.get(RolloutState.RUNNING) == 1000

                await until(all_run, 300)
                await asyncio.to_thread(
                    wait_until, lambda so_many=1000 * time: len(services.gateway.announced) == so_many, 300, "all attempts"
                )
                cancelled = await client.cancel(RolloutSelector(run_id="run"))
                assert (cancelled.queued, cancelled.running) == (0, 1000)
                await asyncio.to_thread(wait_until, lambda so_many=1000 * time: len(services.roots()) == so_many, 300, "the roots")
            await client.enqueue("run", with_mood("well", new_rollouts(40)))
            ended = await until_ended(client, 2040)
            states = Counter((rollout.rollout_id.partition(" ")[2] != "", rollout.state) for rollout in ended)
            assert states == {(True, RolloutState.CANCELLED): 2000, (False, RolloutState.SUCCEEDED): 40}
            ends = Counter((root.get(semconv.ROLLOUT_FAILURE), root[semconv.ROLLOUT_FINAL]) for root in services.roots().values())
            assert ends == {("cancelled", True): 2000, (None, True): 40}
        await require_no_orphan(services)
