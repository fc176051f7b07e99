"""One slow rollout holds no batch: with a group more than is wanted, real workers fill the batches, and the slow group is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from runner.demand_source import DemandSource, task_at
from runner.queue.wire import RolloutState
from spangrad import semconv
from spangrad.client.queue_http import QueueHttp
from spangrad.client.task_groups import queued
from spangrad.processes import wait_until
from spangrad.settings import QueueSettings
from spangrad.types import Task
from tests.support.runners import queue_settings, runner_services, serving
from tests.support.trainers import FakeSource, committed, settings, wired, write_base
from trainer.data.source import Group

SLOW = "hang"
TASKS = [Task(SLOW, SLOW), *[Task(f"t{n}", "well") for n in range(3)]]
SEED = next(seed for seed in range(100) if task_at(TASKS, 1, seed).task_id == SLOW)
STEPS = 2


class Whole(FakeSource):
    """Groups of the queue whose rollouts have all succeeded, in the order of arrival."""

    def __init__(self, queue: QueueSettings) -> None:
        super().__init__([])
        self.queue = queue
        self.facts: dict[str, object] = {}

    def ready(self) -> list[Group]:
        rollouts = QueueHttp(str(self.queue.url), self.queue.token, "run").ask("GET", "/v1/rollouts?run=run&limit=1000")["rollouts"]
        states: defaultdict[str, set[str]] = defaultdict(set)
        for rollout in rollouts:
            states[rollout["group_id"]].add(rollout["state"])
        self.names = [name for name, its in states.items() if its == {RolloutState.SUCCEEDED}]
        self.changes = dict.fromkeys(self.names, self.facts)
        return super().ready()


async def test_extra_groups_cancel_slow_rollout_without_delaying_batch(tmp_path: Path) -> None:
    configured = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=2, extra_groups=1)
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", max_staleness=0, max_steps=STEPS)
    chosen = chosen.model_copy(update={"runner": configured.runner, "queue": configured.queue})
    assert chosen.trainer.sampling.groups_per_batch == 2
    with runner_services(tmp_path, queue__url=configured.queue.url, concurrency=3) as services:
        async with serving(configured) as (client, _):

            async def served(_: str) -> None:
                return None

            source = DemandSource(chosen, client, TASKS, seed=SEED, queued=queued, served=served)

            async def follow() -> None:
                while True:
                    await source.update()
                    await asyncio.sleep(0.05)

            whole = Whole(configured.queue)
            trainer = wired(chosen, whole)
            frontier = trainer.ledger.frontier()
            assert frontier
            whole.version = lambda: trainer.ledger.committed_versions()[-1]
            whole.facts = {"TokenizerHash": frontier.tokenizer_hash}
            services.start_worker()
            services.start_worker()
            following = asyncio.create_task(follow())
            async with asyncio.timeout(240):  # an attempt may take 300 s
                await asyncio.to_thread(trainer.run, follow=True)
                await asyncio.to_thread(services.sink.wait_for, lambda: _failures(services.roots()).count((SLOW, "cancelled")) == 2)
            await asyncio.to_thread(wait_until, lambda: not services.processes(), 60, "the end of the agents' programs")
            following.cancel()
            rollouts = (await client.rollouts(run_id="run", limit=1000)).rollouts
            demand = await client.demand("run")
    assert len(committed(trainer)) == STEPS + 1
    assert (demand.groups, demand.branches[0].filled) == (2 * STEPS, 2 * STEPS)
    cancelled = {rollout.group_id: rollout.task_id for rollout in rollouts if rollout.state is RolloutState.CANCELLED}
    # The group that came in its place is one too many in the end: it may have ended by then, or not.
    assert Counter(task == SLOW for task in cancelled.values()) in ({True: 1}, {True: 1, False: 1})
    assert demand.cancelled == len(cancelled)
    assert Counter((rollout.task_id == SLOW, rollout.state) for rollout in rollouts)[True, RolloutState.CANCELLED] == 2
    assert {rollout.state for rollout in rollouts if rollout.group_id not in cancelled} == {RolloutState.SUCCEEDED}
    failures = Counter(_failures(services.roots()))
    assert failures.pop((SLOW, "cancelled")) == 2
    assert {*failures} <= {(task, "cancelled") for task in cancelled.values()}


def _failures(roots: Mapping[tuple[str, int], Mapping[str, object]]) -> list[tuple[object, object]]:
    failed = [root for root in roots.values() if semconv.ROLLOUT_FAILURE in root]
    return [(root[semconv.TASK_ID], root[semconv.ROLLOUT_FAILURE]) for root in failed]
