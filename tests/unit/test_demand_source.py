"""The source of tasks that follows the demand: as many groups as are wanted, each place filled, what is too old cancelled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from queues import queue_settings, serving

from runner.demand_source import Answered, DemandSource, task_at
from runner.queue.wire import State, Wanted, Which
from runner.runner import queued
from spangrad.settings import Settings
from spangrad.types import Mode, Task

TASKS = [Task(f"t{n}", n) for n in range(3)]


@given(st.integers(1, 20), st.integers(0, 5), st.integers())
def test_each_lap_takes_every_task_once(count: int, lap: int, seed: int) -> None:
    tasks = [Task(str(n), n) for n in range(count)]
    taken = [task_at(tasks, lap * count + n, seed) for n in range(count)]
    assert sorted(taken, key=lambda task: int(task.task_id)) == tasks


async def test_the_level_is_met_and_places_of_late_groups_are_filled(tmp_path: Path) -> None:
    runner = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=2, greedy_rollouts=True)
    settings = Settings(runner=runner)
    served = {"policy": 0}

    async def version(policy: str) -> int | None:
        return served.get(policy)

    async with serving(runner) as (client, _):

        def source() -> DemandSource:
            return DemandSource(settings, client, TASKS, seed=1, queued=queued, served=version)

        first = source()
        assert await first.look() == Answered(0, 0, 0)
        want = Wanted(policy="policy", branch="main", groups=4, oldest_version=0)
        await client.want("run", want)
        assert await first.look() == Answered(4, 4, 0)
        # Another source goes on where the queue stands.
        assert await source().look() == Answered(4, 4, 0)
        rollouts = (await client.rollouts(run_id="run")).rollouts
        assert Counter(one.mode for one in rollouts) == {Mode.TRAIN: 8, Mode.GREEDY: 4}
        assert {one.task_id for one in rollouts[:9]} == {"t0", "t1", "t2"}
        assert len({one.group_id for one in rollouts}) == 4

        (held,) = await client.lease("run", "worker 1", 1)
        await first.look()  # sees it begin, under version 0
        served["policy"] = 2
        (later,) = [one for one in await client.lease("run", "worker 1", 3) if one.group_id != held.group_id]
        await first.look()
        await client.want("run", Wanted(policy="policy", branch="main", groups=5, oldest_version=1))
        assert await first.look() == Answered(5, 5, 1)
        states = {one.group_id: one.state for one in (await client.rollouts(run_id="run", group_id=held.group_id)).rollouts}
        assert states == {held.group_id: State.CANCELLED}
        assert {one.state for one in (await client.rollouts(run_id="run", group_id=later.group_id)).rollouts} <= {
            State.RUNNING,
            State.QUEUED,
        }
        assert len({one.group_id for one in (await client.rollouts(run_id="run")).rollouts}) == 6

        await client.cancel(Which(run_id="run", group_id=later.group_id))
        assert await first.look() == Answered(5, 5, 0)
        assert len({one.group_id for one in (await client.rollouts(run_id="run")).rollouts}) == 7
