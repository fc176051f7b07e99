"""Answers what trainers want of a run: enqueues groups until as many are there, and cancels those that come too late or are not needed.

In: tasks, and the demand that the queue holds. Out: groups in the queue. Invariant: the demand is a level: what is enqueued is told by the
queue each time, so a source that is killed and started again enqueues nothing twice and leaves nothing out. One source a run.

A group that the trainer skips raises the level, and one that is cancelled lowers what counts as enqueued; either way its place is
filled by the next task. With runner.extra_groups more run than are wanted, and those that are still at it when the trainer has what it
wants are cancelled: the extra ones come back with the next level, not before.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from runner.groups import rollouts_of
from runner.queue.client import QueueClient
from runner.queue.wire import Demand, NewRollout, State, Which
from runner.queue.wire import Rollout as Standing
from spangrad.greedy_baseline import wants_greedy
from spangrad.settings import Settings
from spangrad.types import Mode, Rollout, Task

_logger = logging.getLogger(__name__)

_GROUPS_AT_ONCE = 64
"""Enqueued in one request."""
_PAGE = 1000

Queued = Callable[[Rollout, Settings], NewRollout]
Served = Callable[[str], Awaitable[int | None]]
"""The version of a policy that is served. None: none is, or nobody can say."""


def task_at(tasks: Sequence[Task], place: int, seed: int) -> Task:
    """The task of the run's n-th group: all tasks in an order of the seed's, then all of them in another one."""
    lap, index = divmod(place, len(tasks))
    return tasks[_order(len(tasks), seed, lap)[index]]


@lru_cache(maxsize=2)
def _order(count: int, seed: int, lap: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"{seed}/{lap}").shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class Answered:
    """What one look at the demand has led to."""

    wanted: int
    """Groups, in all."""
    enqueued: int
    """Groups, by now."""
    cancelled: int
    """Groups that had become too old, or were not needed any more."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What lies between what is wanted and what is there."""

    enqueue: int
    """Groups to be enqueued."""
    cancel: int
    """Groups to be cancelled at most: of those that have not ended, the newest."""


def difference(demand: Demand, extra: int) -> Difference:
    """What is to be done about a demand; done again and again it comes to rest, for what was cancelled comes back only when more is wanted.

    Args:
        demand: with what is enqueued.
        extra: groups in flight beyond those that are wanted, until the trainer has as many as it wants.
    """
    beyond = demand.enqueued - demand.groups
    if all(one.filled >= one.groups for one in demand.branches if one.groups == demand.groups):
        return Difference(max(-beyond, 0), max(beyond, 0) if extra else 0)
    return Difference(max(extra - beyond, 0), 0)


class DemandSource:
    """The task source of one run."""

    def __init__(self, settings: Settings, queue: QueueClient, tasks: Sequence[Task], *, seed: int, queued: Queued, served: Served) -> None:
        """Look at nothing yet.

        Args:
            settings: the run, the group's size.
            queue: that holds the demand.
            tasks: taken in an order of the seed's, again and again.
            seed: of that order.
            queued: makes a rollout what the queue takes.
            served: tells which version of a policy is served.
        """
        self._settings = settings
        self._queue = queue
        self._tasks = tasks
        self._seed = seed
        self._queued = queued
        self._served = served
        self._greedy = wants_greedy(settings, Mode.TRAIN)
        self._begun: dict[tuple[str, int], dict[str, int]] = {}
        """Attempts that run: the version of each policy that was served when they were seen first."""

    async def look(self) -> Answered:
        """Compare once, and mend the difference.

        Raises:
            QueueError: the queue stays away.
        """
        run = self._settings.runner.run_id
        demand = await self._queue.demand(run)
        cancelled = await self._cancel_old(demand)
        if cancelled:
            demand = await self._queue.demand(run)
        found = difference(demand, self._settings.runner.extra_groups)
        if found.cancel:
            stragglers = await self._cancel_stragglers(found.cancel)
            return Answered(demand.groups, demand.enqueued - stragglers, cancelled + stragglers)
        place, enqueued = demand.enqueued + demand.cancelled, 0
        while enqueued < found.enqueue:
            count = min(found.enqueue - enqueued, _GROUPS_AT_ONCE)
            tasks = [task_at(self._tasks, place + enqueued + n, self._seed) for n in range(count)]
            rollouts = rollouts_of(tasks, run, Mode.TRAIN, self._settings.runner.group_size, greedy=self._greedy)
            await self._queue.enqueue(run, [self._queued(one, self._settings) for one in rollouts])
            enqueued += count
            _logger.info("enqueued %d groups: %d by now, %d are wanted", count, demand.enqueued + enqueued, demand.groups)
        return Answered(demand.groups, demand.enqueued + enqueued, cancelled)

    async def _cancel_stragglers(self, most: int) -> int:
        """Cancel groups that have not ended, at most so many: those that wait before those that run, the newest first; how many."""
        opened: dict[str, None] = {}
        for state in (State.RUNNING, State.QUEUED):
            async for one in self._rollouts(state):
                opened[one.group_id] = None
        stragglers = list(opened)[-most:]
        for group in stragglers:
            await self._queue.cancel(Which(run_id=self._settings.runner.run_id, group_id=group))
        if stragglers:
            _logger.info("cancelled %d groups that were still at work when the trainer had what it wants", len(stragglers))
        return len(stragglers)

    async def _rollouts(self, state: State) -> AsyncGenerator[Standing]:
        """The run's rollouts in a state that answer the demand."""
        after = 0
        while (page := await self._queue.rollouts(run_id=self._settings.runner.run_id, state=state, after=after, limit=_PAGE)).rollouts:
            after = page.cursor
            for one in page.rollouts:
                if one.mode in {Mode.TRAIN, Mode.GREEDY}:
                    yield one

    async def _cancel_old(self, demand: Demand) -> int:
        """Cancel the groups of attempts that began before the oldest version that a branch can still train; how many."""
        oldest: dict[str, int] = {}
        for branch in demand.branches:
            if branch.oldest_version is not None:
                oldest[branch.policy] = min(branch.oldest_version, oldest.get(branch.policy, branch.oldest_version))
        if not oldest:
            return 0
        serving = {policy: version for policy in oldest if (version := await self._served(policy)) is not None}
        begun: dict[tuple[str, int], dict[str, int]] = {}
        late: set[str] = set()
        async for one in self._rollouts(State.RUNNING):
            key = (one.rollout_id, one.attempts[-1].attempt)
            versions = begun[key] = self._begun.get(key, serving)
            # Where several policies are trained, a group is late when no policy has a use for it.
            if all(policy in versions and versions[policy] < oldest[policy] for policy in oldest):
                late.add(one.group_id)
        self._begun = begun
        for group in late:
            await self._queue.cancel(Which(run_id=self._settings.runner.run_id, group_id=group))
        if late:
            _logger.info("cancelled %d groups that began before the oldest version that can be trained: %s", len(late), oldest)
        return len(late)
