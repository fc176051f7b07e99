"""Waits for trajectories, without a store: their ends, the size of reads, and a store that does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runner.process import processing
from runner.process.processing import BuildNotifier, Processing
from runner.process.trajectories import BuiltTrajectory
from runner.queue.wire import RolloutSelector
from spangrad.settings import Settings
from tests.support.runners import done, failed, new_rollouts, queue_settings, serving


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return queue_settings(f"sqlite:///{tmp_path}/q.db", runner__gateway=False)


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, BuiltTrajectory]:
    """Return the builds of a store of which no arrivals are heard."""
    builds: dict[str, BuiltTrajectory] = {}
    monkeypatch.setattr(processing, "_LOOK_SECONDS", 30.0)
    monkeypatch.setattr(BuildNotifier, "next", lambda notifier: notifier._arrived)
    monkeypatch.setattr(Processing, "_read", lambda *_: builds)
    return builds


async def test_trajectories_last_rollout_that_never_began_is_yielded_at_its_end(settings: Settings) -> None:
    async with serving(settings) as (client, service):
        await client.enqueue("run", new_rollouts(3))
        trajectories = Processing(service, settings).trajectories("run", ["r0", "r1", "r2"], 60.0, lambda: False)
        await client.cancel(RolloutSelector(rollout_ids=["r0", "r1"]))
        assert [(await anext(trajectories)).rollout_id for _ in range(2)] == ["r0", "r1"]
        last = asyncio.ensure_future(anext(trajectories))
        await asyncio.sleep(0.2)
        await client.cancel(RolloutSelector(run_id="run"))
        assert (await asyncio.wait_for(last, 20)).rollout_id == "r2"


async def test_process_request_that_waits_for_builds_is_answered_when_the_server_stops(settings: Settings) -> None:
    request: dict[str, Any] = {"run_id": "run", "key": "k", "tasks": [{"task_id": "t", "input": 1}], "wait_seconds": 60}
    async with aiohttp.ClientSession(settings.queue.url) as session:
        async with serving(settings) as (client, _):
            waiting = asyncio.create_task(session.post("/v1/process", json=request))
            leases = await client.lease("run", "worker", wait_seconds=30)
            await client.complete([done(lease) for lease in leases])
            await asyncio.sleep(0.2)
        async with await asyncio.wait_for(waiting, 20) as answer:
            assert (answer.status, await answer.json()) == (200, {"trajectories": [], "pending": ["run/k/0/0"]})


async def test_queue_is_read_while_the_store_does_not_answer(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def read(_: Processing, _run: str, _rollouts: Sequence[str]) -> dict[str, BuiltTrajectory]:
        answered.wait(60)
        return {}

    monkeypatch.setattr(Processing, "_read", read)
    async with serving(settings) as (client, service):
        await client.enqueue("run", new_rollouts(1))
        await client.cancel(RolloutSelector(run_id="run"))
        reading = Processing(service, settings)
        waiting = [asyncio.ensure_future(anext(reading.trajectories("run", ["r0"], 60.0, lambda: False))) for _ in range(40)]
        try:
            await asyncio.sleep(0.5)
            assert [run.run_id for run in await asyncio.wait_for(client.runs(), 20)] == ["run"]
        finally:
            answered.set()
            await asyncio.gather(*waiting)


async def test_trajectories_of_many_rollouts_are_read_few_at_a_time(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def note(_: Processing, _run: str, rollouts: Sequence[str]) -> dict[str, BuiltTrajectory]:
        read.append(len(rollouts))
        return {rollout: BuiltTrajectory(0, 1.0, {}) for rollout in rollouts}

    monkeypatch.setattr(Processing, "_read", note)
    names = [f"r{number}" for number in range(150)]
    async with serving(settings) as (client, service):
        await client.enqueue("run", new_rollouts(len(names)))
        await client.cancel(RolloutSelector(run_id="run"))
        trajectories = Processing(service, settings).trajectories("run", names, 60.0, lambda: False)
        assert sorted([each.rollout_id async for each in trajectories]) == sorted(names)
    assert (max(read), sum(read)) == (64, 150)


async def test_trajectories_build_of_attempts_before_a_retry_is_not_the_rollouts(
    settings: Settings, built: dict[str, BuiltTrajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(settings) as (client, service):
        await client.enqueue("run", new_rollouts(1, max_attempts=1))
        await client.fail([failed(lease) for lease in await client.lease("run", "worker")])
        await client.retry(RolloutSelector(run_id="run"))
        await client.complete([done(lease) for lease in await client.lease("run", "worker")])
        reading = Processing(service, settings)
        built["r0"] = BuiltTrajectory(0, 1.0, {})
        assert [each async for each in reading.trajectories("run", ["r0"], 0.0, lambda: False)] == []
        built["r0"] = BuiltTrajectory(1, 2.0, {})
        (trajectory,) = [each async for each in reading.trajectories("run", ["r0"], 0.0, lambda: False)]
        assert (trajectory.state, trajectory.attempts, trajectory.seconds) == ("succeeded", 2, 2.0)
