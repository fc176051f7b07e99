"""The source of tasks that follows the demand: as many groups as are wanted, each place filled, what is too old cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.demand_source import DemandSource, missing_groups, task_at
from runner.groups import cannot_be_trained
from runner.queue.client import QueueClient
from runner.queue.wire import Failure, Rollouts, RolloutSelector, RolloutState
from spangrad.client.task_groups import queued
from spangrad.http.queue_messages import DemandRequest, DemandState
from spangrad.settings.trainer_learning import Estimator
from spangrad.types import AttemptFailure, Mode, Task
from tests.support.runners import new_rollouts, queue_settings, serving

TASKS = [Task(f"t{n}", n) for n in range(3)]


@given(st.integers(1, 20), st.integers(0, 5), st.integers())
def test_task_at_takes_every_task_once_per_lap(count: int, lap: int, seed: int) -> None:
    tasks = [Task(str(n), n) for n in range(count)]
    taken = [task_at(tasks, lap * count + n, seed) for n in range(count)]
    assert sorted(taken, key=lambda task: int(task.task_id)) == tasks


@dataclass
class Flow:
    """A queue's groups, by number, and a trainer of one branch that takes batches of two of those that are whole."""

    staleness: int
    running: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    spent: set[int] = field(default_factory=set)
    cancelled: int = 0
    begun: bool = False
    """State of the batch: true once it is taken and announced, until it is committed or lost by a crash."""

    @property
    def demand(self) -> DemandState:
        groups = len(self.spent) + 2 * (self.staleness + 1)
        filled = min(len(self.spent) + (len(self.whole) if self.begun else 0), groups)
        branch = DemandRequest(policy="policy", branch="main", groups=groups, filled=filled)
        enqueued = len(self.running | self.whole | self.spent)
        return DemandState(groups=groups, enqueued=enqueued, cancelled=self.cancelled, branches=[branch])

    def update(self, extra: int) -> int:
        """Change the groups as the source does: enqueue some, or cancel the newest that run; return how many, cancelled ones below 0."""
        demand = self.demand
        missing = missing_groups(demand, extra)
        place = demand.enqueued + demand.cancelled
        self.running |= set(range(place, place + missing))
        cancelled = sorted(self.running)[missing:] if missing < 0 else []
        self.running -= set(cancelled)
        self.cancelled += len(cancelled)
        return max(missing, 0) - len(cancelled)


EVENTS = st.lists(st.sampled_from(["end", "take", "commit", "crash", "look", "look"]), max_size=60)


@given(EVENTS, st.integers(0, 3), st.integers(0, 2), st.randoms(use_true_random=False))
def test_missing_groups_cancels_stragglers_once_and_never_exceeds_demand(
    events: list[str], extra: int, staleness: int, random: Random
) -> None:
    """Law: in whatever order groups end, batches are taken, committed or lost by a crash, and the source looks or does not."""
    flow = Flow(staleness)
    for event in events:
        match event:
            case "end" if flow.running:
                flow.running.remove(group := random.choice(sorted(flow.running)))
                flow.whole.add(group)
            case "take" if len(flow.whole) >= 2:
                flow.begun = True
            case "crash":
                flow.begun = False
            case "commit" if flow.begun:
                batch = sorted(flow.whole)[:2]
                flow.whole -= set(batch)
                flow.spent |= set(batch)
                flow.begun = False
            case _:
                pass
        if event == "look":
            before = flow.demand
            done = flow.update(extra)
            now = flow.demand
            assert now.enqueued >= now.groups, "what is wanted is there"
            assert done <= 0 or now.enqueued <= now.groups + extra
            assert done >= 0 or (extra and before.branches[0].filled == before.groups)
            assert flow.update(extra) == 0, "looked at again, nothing is done"
    # A trainer that finds whole groups goes on for ever: no level is stuck.
    for _ in range(5):
        flow.update(extra)
        steps = len(flow.spent)
        flow.whole |= flow.running
        flow.running.clear()
        batch = sorted(flow.whole)[:2]
        flow.whole -= set(batch)
        flow.spent |= set(batch)
        assert len(flow.spent) == steps + 2


async def updated(client: QueueClient, source: DemandSource) -> tuple[int, int, int]:
    """Update the source once; return the groups that are demanded, those that are enqueued, and those that the update has cancelled."""
    before = await client.demand("run")
    demanded = await source.update()
    after = await client.demand("run")
    return demanded, after.enqueued, after.cancelled - before.cancelled


async def test_demand_source_meets_level_and_replaces_late_groups(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=2, greedy_rollouts=True)
    served = {"policy": 0}

    async def version(policy: str) -> int | None:
        return served.get(policy)

    async with serving(settings) as (client, _):

        def source() -> DemandSource:
            return DemandSource(settings, client, TASKS, seed=1, queued=queued, served=version)

        first = source()
        assert await updated(client, first) == (0, 0, 0)
        want = DemandRequest(policy="policy", branch="main", groups=4, oldest_version=0)
        await client.want("run", want)
        assert await updated(client, first) == (4, 4, 0)
        # Another source goes on where the queue stands.
        assert await updated(client, source()) == (4, 4, 0)
        rollouts = (await client.rollouts(run_id="run")).rollouts
        assert Counter(rollout.mode for rollout in rollouts) == {Mode.TRAIN: 8, Mode.GREEDY: 4}
        assert {rollout.task_id for rollout in rollouts[:9]} == {"t0", "t1", "t2"}
        assert len({rollout.group_id for rollout in rollouts}) == 4

        (held,) = await client.lease("run", "worker 1", 1)
        await first.update()  # sees it begin, under version 0
        served["policy"] = 2
        (later,) = [lease for lease in await client.lease("run", "worker 1", 3) if lease.group_id != held.group_id]
        await first.update()
        await client.want("run", DemandRequest(policy="policy", branch="main", groups=5, oldest_version=1))
        assert await updated(client, first) == (5, 5, 1)
        states = {rollout.group_id: rollout.state for rollout in (await client.rollouts(run_id="run", group_id=held.group_id)).rollouts}
        assert states == {held.group_id: RolloutState.CANCELLED}
        assert {rollout.state for rollout in (await client.rollouts(run_id="run", group_id=later.group_id)).rollouts} <= {
            RolloutState.RUNNING,
            RolloutState.QUEUED,
        }
        assert len({rollout.group_id for rollout in (await client.rollouts(run_id="run")).rollouts}) == 6

        await client.cancel(RolloutSelector(run_id="run", group_id=later.group_id))
        assert await updated(client, first) == (5, 5, 0)
        assert len({rollout.group_id for rollout in (await client.rollouts(run_id="run")).rollouts}) == 7


@given(st.sampled_from(get_args(Estimator)), st.integers(1, 6), st.data())
def test_cannot_be_trained_agrees_with_every_outcome_of_the_rest(estimator: Estimator, size: int, data: st.DataObject) -> None:
    dead, greedy_is_dead = data.draw(st.integers(0, size)), data.draw(st.booleans()) and estimator == "remax"
    least = 1 if estimator in {"gae", "reinforce_plus_plus", "remax"} else 2
    trains = any(sum(outcome) >= least and not greedy_is_dead for outcome in product((True, False), repeat=size - dead))
    assert cannot_be_trained(estimator, size, {Mode.TRAIN: dead, Mode.GREEDY: int(greedy_is_dead)}) == (not trains)


async def test_demand_source_group_with_too_many_dead_rollouts_is_replaced_early(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=3, max_attempts=1)

    async def version(_: str) -> int | None:
        return None

    async with serving(settings) as (client, _):
        source = DemandSource(settings, client, TASKS, seed=1, queued=queued, served=version)
        await client.want("run", DemandRequest(policy="policy", branch="main", groups=1))
        assert await updated(client, source) == (1, 1, 0)
        leases = await client.lease("run", "worker", 3)
        group = leases[0].group_id
        updates = list[tuple[int, int, int]]()
        for lease in leases[:2]:
            await client.fail([Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=AttemptFailure.CRASH)])
            updates.append(await updated(client, source))
        assert updates == [(1, 1, 0), (1, 1, 1)]
        rollouts = (await client.rollouts(run_id="run")).rollouts
        assert Counter(rollout.state for rollout in rollouts if rollout.group_id == group) == {
            RolloutState.DEAD: 2,
            RolloutState.CANCELLED: 1,
        }
        assert Counter(rollout.state for rollout in rollouts if rollout.group_id != group) == {RolloutState.QUEUED: 3}
        assert await updated(client, source) == (1, 1, 0), "looked at again, nothing is done"


async def test_demand_source_judges_a_group_of_another_source_by_its_own_size(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=2)

    async def version(_: str) -> int | None:
        return None

    async with serving(settings) as (client, _):
        source = DemandSource(settings, client, TASKS, seed=1, queued=queued, served=version)
        await client.enqueue("run", new_rollouts(4, group_size=4, max_attempts=1))
        await client.want("run", DemandRequest(policy="policy", branch="main", groups=1))
        updates = [await updated(client, source)]
        for lease in (await client.lease("run", "worker", 4))[:3]:
            await client.fail([Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=AttemptFailure.CRASH)])
            updates.append(await updated(client, source))
        assert [cancelled for _, _, cancelled in updates] == [0, 0, 0, 1]


async def test_demand_source_enqueues_nothing_that_would_be_stale_when_it_began(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runner.demand_source")
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=2)
    served: dict[str, int] = {}

    async def version(policy: str) -> int | None:
        return served.get(policy)

    async with serving(settings) as (client, _):
        source = DemandSource(settings, client, TASKS, seed=1, queued=queued, served=version)
        await client.want("run", DemandRequest(policy="policy", branch="main", groups=2, oldest_version=2))
        assert await updated(client, source) == (2, 2, 0), "the served version is unknown"
        await client.lease("run", "worker 1", 1)
        served["policy"] = 1
        assert await updated(client, source) == (2, 1, 1), "the group that runs is stale, and another would be as well"
        assert await updated(client, source) == (2, 1, 0)
        assert caplog.text.count("until the gateway serves") == 1
        served["policy"] = 2
        assert await updated(client, source) == (2, 2, 0)
        # Where two policies are trained, a group that is too old for both is not begun.
        await client.want("run", DemandRequest(policy="other", branch="main", groups=3, oldest_version=5))
        served |= {"policy": 1, "other": 4}
        assert (await updated(client, source))[1] == 2
        served["other"] = 5
        assert (await updated(client, source))[1] == 3


@pytest.mark.parametrize("groups", [0, 9])
async def test_demand_source_without_a_demand_enqueues_and_cancels_nothing(tmp_path: Path, groups: int) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=2, extra_groups=2)

    async def version(_: str) -> int | None:
        return None

    async with serving(settings) as (client, _):
        source = DemandSource(settings, client, TASKS, seed=1, queued=queued, served=version)
        await client.enqueue("run", new_rollouts(2 * groups, group_size=2, max_attempts=1))
        for lease in await client.lease("run", "worker", 1):
            await client.fail([Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=AttemptFailure.CRASH)])
        assert await updated(client, source) == (0, groups, 0), "the groups are not for a trainer"


async def test_demand_source_that_starts_reads_open_groups_but_no_earlier_endings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=3, max_attempts=1)
    read: list[int] = []

    async def version(_: str) -> int | None:
        return None

    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(40, mode=Mode.VALIDATE))
        await client.cancel(RolloutSelector(run_id="run"))
        await client.want("run", DemandRequest(policy="policy", branch="main", groups=2))
        sources = [DemandSource(settings, client, TASKS, seed=1, queued=queued, served=version) for _ in range(2)]
        assert await updated(client, sources[0]) == (2, 2, 0)
        for lease in (await client.lease("run", "worker", 3))[:2]:
            await client.fail([Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=AttemptFailure.CRASH)])
        ended = client.ended

        async def counted(run_id: str, *, after: int = 0, limit: int = 100, wait_seconds: float = 0) -> Rollouts:
            page = await ended(run_id, after=after, limit=limit, wait_seconds=wait_seconds)
            read.append(len(page.rollouts))
            return page

        monkeypatch.setattr(client, "ended", counted)
        assert await updated(client, sources[1]) == (2, 2, 1), "of the group whose rollouts died before it began"
        assert await updated(client, sources[1]) == (2, 2, 0)
        assert sum(read) == 1, "the rollout that it cancelled itself"


async def test_demand_sources_of_one_run_enqueue_each_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", run_id="run", group_size=2)

    async def version(_: str) -> int | None:
        return None

    async with serving(settings) as (client, _):
        await client.want("run", DemandRequest(policy="policy", branch="main", groups=3))
        sources = [DemandSource(settings, client, TASKS, seed=seed, queued=queued, served=version) for seed in range(2)]
        read = client.demand
        both_have_read = asyncio.Barrier(2)

        async def read_together(run_id: str) -> DemandState:
            state = await read(run_id)
            await both_have_read.wait()
            return state

        monkeypatch.setattr(client, "demand", read_together)
        for _ in range(2):
            assert await asyncio.gather(*(source.update() for source in sources)) == [3, 3], "groups are demanded"
            assert len((await client.rollouts(run_id="run")).rollouts) == 6
