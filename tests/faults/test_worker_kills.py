"""Workers and agent hosts killed at random points: nothing lost, nothing completed twice, no orphan process."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from queues import queue_settings, serving, some
from workers import kill, world

from runner.queue.client import QueueClient
from runner.queue.wire import State
from spangrad import semconv
from spangrad.processes import wait_until

ROLLOUTS = 60
KILLS = 12
WORKERS = 2


async def until_ended(client: QueueClient, count: int) -> None:
    """Wait until so many rollouts have ended."""
    cursor = ended = 0
    while ended < count:
        page = await client.ended("run", after=cursor, limit=1000, wait_seconds=20)
        cursor, ended = page.cursor, ended + len(page.rollouts)


@pytest.mark.slow
async def test_kills_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    chance = random.Random(8)
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", queue_lease_seconds=2, max_attempts=KILLS + 2)
    with world(tmp_path, queue_url=settings.queue_url, concurrency=3) as here:
        async with serving(settings) as (client, _):
            moods = [msgspec.structs.replace(one, input=msgspec.Raw(json.dumps("slow").encode())) for one in some(ROLLOUTS)]
            await client.enqueue("run", moods)
            for _ in range(WORKERS):
                here.start_worker()
            done = 0
            for _ in range(KILLS):
                # A kill comes when something more has ended, and a random part of an attempt later.
                done = min(done + 2, ROLLOUTS)
                await until_ended(client, done)
                await asyncio.sleep(chance.random() * 0.4)
                victims = [child.process.pid for child in here.children if child.running] + here.hosts()
                kill(victim := chance.choice(victims))
                for child in here.children:
                    if child.process.pid == victim:
                        child.process.wait()  # else it may count as running, and nobody takes its place
                for _ in range(WORKERS - sum(child.running for child in here.children)):
                    here.start_worker()
            await until_ended(client, ROLLOUTS)
            ended = (await client.ended("run", limit=1000)).rollouts
            assert Counter(one.rollout_id for one in ended) == Counter(f"r{n}" for n in range(ROLLOUTS))
            assert {one.state for one in ended} == {State.SUCCEEDED}
            whole = [await client.rollout(one.rollout_id) for one in ended]
            attempts = {(rollout.rollout_id, one.attempt): one.reason for rollout in whole for one in rollout.attempts}
            assert Counter(name for (name, _), reason in attempts.items() if reason is None) == Counter(f"r{n}" for n in range(ROLLOUTS))
            assert {reason for reason in attempts.values() if reason} <= {"lost", "crash"}
            # Each attempt has its root; the newest one of each rollout has the final mark, and the reward.
            roots = here.roots()
            assert roots.keys() == attempts.keys()
            newest = {name: max(number for other, number in attempts if other == name) for name, _ in attempts}
            assert [key for key in newest.items() if not roots[key][semconv.ROLLOUT_FINAL]] == []
            for child in here.children:
                child.stop(10)
            await asyncio.to_thread(wait_until, lambda: not here.processes(), 10, "the end of the agents' programs")
            assert here.hosts() == []
