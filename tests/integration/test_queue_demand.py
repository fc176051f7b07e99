"""The trainer's demand at the real queue: a source that enqueues as many groups as are wanted keeps the trainer fed, and no more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runner.queue.client import QueueClient
from runner.runner import Runner
from spangrad.http.queue_messages import DemandRequest, DemandState
from spangrad.settings import QueueSettings
from spangrad.types import Task
from tests.support.runners import new_rollouts, queue_server, queue_settings, runner_services, serving, until
from tests.support.trainers import FakeSource, committed, settings, wired, write_base
from trainer.ledger.skips import SkipReason


async def demand_of_run(queue: QueueSettings) -> DemandState:
    async with QueueClient.of(queue) as client:
        return await client.demand("run")


class Answered(FakeSource):
    """A task source of the run: enqueues groups until as many are as are wanted; its rollouts are run at once."""

    def __init__(self, queue: QueueSettings) -> None:
        super().__init__([])
        self.queue = queue
        self.equal: dict[str, Any] = {}
        self.levels: list[int] = []

    def ready(self) -> Any:
        there = asyncio.run(demand_of_run(self.queue))
        self.levels.append(there.groups)
        new = [f"g{number:02}" for number in range(there.enqueued, there.groups)]
        asyncio.run(self.enqueue(new))
        for name in new:
            self.names.append(name)
            self.changes[name] = self.equal | ({"Rewards.Value": [1.0]} if int(name[1:]) % 3 == 2 else {})
        return super().ready()

    async def enqueue(self, groups: list[str]) -> None:
        async with QueueClient.of(self.queue) as client:
            for name in groups:
                await client.enqueue("run", new_rollouts(2, name, group_size=2))


def test_demand_source_enqueues_as_many_groups_as_trainer_demands(tmp_path: Path) -> None:
    services = queue_settings(f"sqlite:///{tmp_path / 'queue.db'}")
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", skip_equal_groups=True, max_staleness=0, max_steps=3)
    chosen = chosen.model_copy(update={"runner": services.runner, "queue": services.queue})
    with queue_server(services, tmp_path / "log"):
        source = Answered(services.queue)
        trainer = wired(chosen, source)
        frontier = trainer.ledger.frontier()
        assert frontier
        source.version = lambda: trainer.ledger.committed_versions()[-1]
        source.equal = {"TokenizerHash": frontier.tokenizer_hash}
        trainer.run(follow=True)
        skipped = trainer.ledger.skips.reasons()
        assert set(skipped.values()) == {SkipReason.EQUAL}
        assert len(committed(trainer)) == 4
        assert source.levels == sorted(source.levels)
        there = asyncio.run(demand_of_run(services.queue))
        assert (there.groups, there.enqueued) == (6 + len(skipped), 6 + len(skipped))


async def test_runner_demand_that_rises_is_met_before_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.runner._DEMAND_SECONDS", 60.0)
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    with runner_services(tmp_path, queue__url=settings.queue.url) as services:
        async with serving(settings) as (client, _), Runner(services.settings, services.agent) as runner, asyncio.timeout(30):
            ending = asyncio.Event()
            following = asyncio.create_task(runner.follow([Task("t", "well")], ending, seed=0))
            for level in (1, 3):
                await client.want("run", DemandRequest(policy="policy", branch="main", groups=level))

                async def is_met(level: int = level) -> bool:
                    return (await client.demand("run")).enqueued == level

                await until(is_met)
            ending.set()
            await following


async def test_enqueue_after_groups_is_repeated_but_not_late(queue_db: str) -> None:
    async with serving(queue_settings(queue_db)) as (client, _):
        first, second = new_rollouts(2, group_size=2), new_rollouts(2, "late", group_size=2)
        for _ in range(2):
            assert await client.enqueue("run", first, after_groups=0) == ["r0", "r1"], "an answer that was lost is asked for again"
        assert await client.enqueue("run", second, after_groups=0) == []
        assert await client.enqueue("run", second, after_groups=(await client.demand("run")).enqueued) == ["late0", "late1"]
