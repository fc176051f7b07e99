"""Task source of a run: enqueues groups until the trainers' demand is met, and cancels groups that are stale or no longer needed.

In: tasks, and the demand that the queue holds. Out: groups in the queue. Invariant: the demand is a level, and each update reads from the
queue what is enqueued, so a source that is killed and started again enqueues nothing twice and omits nothing; so do several sources of a
run, each of whose requests counts only if no other has enqueued groups since it read.

While the gateway serves a version that is too old to be trained, nothing is enqueued: a new group would be stale when it began.

A group that the trainer skips raises the level, and a cancelled group lowers what counts as enqueued; in both cases the next task takes its
place. A group of which too many rollouts are dead to train the others is cancelled while these run. With runner.extra_groups, more groups
run than are demanded; those still running when the trainer has all that it demanded are cancelled, and the extra ones are replaced only
when the level rises again.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache

from runner.groups import cannot_be_trained, rollouts_of
from runner.queue.client import ENQUEUE_MOST, QueueClient
from runner.queue.wire import QueuedRollout, RolloutSelector, RolloutState
from spangrad.greedy_baseline import wants_greedy
from spangrad.http.queue_messages import DemandState, NewRollout
from spangrad.settings import Settings
from spangrad.types import Mode, Rollout, Task

_logger = logging.getLogger(__name__)

_GROUPS_AT_ONCE = 64
"""Enqueued in one request."""
_PAGE = 1000
_COUNTED = frozenset({Mode.TRAIN, Mode.GREEDY})
"""Modes of rollouts that count for the demand."""

Queued = Callable[[Rollout, Settings], NewRollout]
"""Function that converts a rollout to the queue's form."""
Served = Callable[[str], Awaitable[int | None]]
"""Function that gives the newest version of a policy that is served, or None: no version is served, or the version is unknown."""


def task_at(tasks: Sequence[Task], number: int, seed: int) -> Task:
    """Return the task of the run's group `number` (from 0): all tasks in a shuffled order, then all of them in another order."""
    epoch, index = divmod(number, len(tasks))
    return tasks[_order(len(tasks), seed, epoch)[index]]


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def missing_groups(demand: DemandState, extra: int) -> int:
    """Return the number of groups to enqueue, or, below 0, of how many of the newest that have not ended to cancel.

    Repeated updates converge, since cancelled groups are replaced only when the demand rises.

    Args:
        demand: with the number of groups enqueued.
        extra: groups in flight beyond the demanded ones, until the trainer has as many as it demands.
    """
    missing = demand.groups - demand.enqueued
    if all(branch.filled >= branch.groups for branch in demand.branches if branch.groups == demand.groups):
        return missing if extra else max(missing, 0)
    return max(missing + extra, 0)


def _oldest_versions(demand: DemandState) -> dict[str, int]:
    """Return the oldest version of each policy that a branch can still train; of policies for which a branch reports it."""
    oldest: dict[str, int] = {}
    for branch in demand.branches:
        if branch.oldest_version is not None:
            oldest[branch.policy] = min(branch.oldest_version, oldest.get(branch.policy, branch.oldest_version))
    return oldest


def _is_stale(versions: Mapping[str, int], oldest: Mapping[str, int]) -> bool:
    """Return whether a group that began with these versions of policies is too old for each trained one; False if none is trained."""
    return bool(oldest) and all(policy in versions and versions[policy] < oldest[policy] for policy in oldest)


class DemandSource:
    """Task source of one run; takes its tasks again and again, in an order that depends on the seed."""

    def __init__(self, settings: Settings, queue: QueueClient, tasks: Sequence[Task], *, seed: int, queued: Queued, served: Served) -> None:
        self._settings = settings
        self._queue = queue
        self._tasks = tasks
        self._seed = seed
        self._queued = queued
        self._served = served
        self._greedy = wants_greedy(settings, Mode.TRAIN)
        self._begun: dict[tuple[str, int], Mapping[str, int]] = {}
        """Attempts that run, each with the versions of all policies that were served when it was first seen."""
        self._awaited: Mapping[str, int] = {}
        """Versions of policies that groups waited for at the last update, until they are served."""
        self._ended: int | None = None
        """Position in the order in which rollouts ended, until which they were looked at. None: no look was taken."""

    async def update(self) -> int:
        """Compare demand and queue once; enqueue or cancel groups accordingly.

        Returns:
            Number of groups that the trainers demand, since the run's beginning.

        Raises:
            QueueError: the queue does not answer.
        """
        run = self._settings.runner.run_id
        demand = await self._queue.demand(run)
        if not demand.branches:  # the groups that are enqueued are not for a trainer
            return demand.groups
        oldest = _oldest_versions(demand)
        serving = {policy: version for policy in oldest if (version := await self._served(policy)) is not None}
        if await self._cancel_old(oldest, serving) + await self._cancel_untrainable():
            demand = await self._queue.demand(run)
        missing = missing_groups(demand, self._settings.runner.extra_groups)
        if missing < 0:
            await self._cancel_stragglers(-missing)
        elif missing and self._await_versions(oldest, serving):
            return demand.groups
        position, enqueued = demand.enqueued + demand.cancelled, 0
        while enqueued < missing:
            count = min(missing - enqueued, _GROUPS_AT_ONCE, max(1, ENQUEUE_MOST // (self._settings.runner.group_size + 1)))
            tasks = [task_at(self._tasks, position + enqueued + n, self._seed) for n in range(count)]
            rollouts = rollouts_of(tasks, run, Mode.TRAIN, self._settings.runner.group_size, greedy=self._greedy)
            queued = [self._queued(rollout, self._settings) for rollout in rollouts]
            if not await self._queue.enqueue(run, queued, after_groups=position + enqueued):
                break  # another source of the run was faster: the next update reads what it has enqueued
            enqueued += count
            _logger.info("enqueued %d groups: %d by now, %d are wanted", count, demand.enqueued + enqueued, demand.groups)
        return demand.groups

    def _await_versions(self, oldest: Mapping[str, int], serving: Mapping[str, int]) -> bool:
        """Return whether a group that began now would be stale; log once which versions it waits for."""
        awaited = dict(oldest) if _is_stale(serving, oldest) else {}
        if awaited and awaited != self._awaited:
            _logger.info(
                "enqueuing no groups until the gateway serves the oldest versions that can be trained: %s; now %s", oldest, serving
            )
        self._awaited = awaited
        return bool(awaited)

    async def _cancel_stragglers(self, limit: int) -> None:
        """Cancel at most `limit` groups that have not ended, queued before running, newest first."""
        stragglers = (await self._open_groups())[-limit:]
        await self._cancel(stragglers, "that still ran when the trainer's demand was met")

    async def _cancel(self, groups: Collection[str], reason: str) -> int:
        """Cancel groups, for a reason that continues the sentence of the log; return how many."""
        for group in groups:
            await self._queue.cancel(RolloutSelector(run_id=self._settings.runner.run_id, group_id=group))
        if groups:
            _logger.info("cancelled %d groups %s", len(groups), reason)
        return len(groups)

    async def _open_groups(self) -> list[str]:
        """Return the groups that have not ended, those with running rollouts first."""
        opened: dict[str, None] = {}
        for state in (RolloutState.RUNNING, RolloutState.QUEUED):
            async for rollout in self._rollouts(state):
                opened[rollout.group_id] = None
        return list(opened)

    async def _rollouts(self, state: RolloutState | None = None, group_id: str | None = None) -> AsyncGenerator[QueuedRollout]:
        """Yield the run's rollouts, in a state or of a group, that count for the demand: those of mode train and greedy."""
        after, run = 0, self._settings.runner.run_id
        while (page := await self._queue.rollouts(run_id=run, state=state, group_id=group_id, after=after, limit=_PAGE)).rollouts:
            after = page.cursor
            for rollout in page.rollouts:
                if rollout.mode in _COUNTED:
                    yield rollout

    async def _cancel_old(self, oldest: Mapping[str, int], serving: Mapping[str, int]) -> int:
        """Cancel the groups of attempts that began before the oldest version that a branch can still train; return how many."""
        if not oldest:
            return 0
        begun: dict[tuple[str, int], Mapping[str, int]] = {}
        stale_groups: set[str] = set()
        async for rollout in self._rollouts(RolloutState.RUNNING):
            key = (rollout.rollout_id, rollout.attempts[-1].attempt)
            versions = begun[key] = self._begun.get(key, serving)
            if _is_stale(versions, oldest):
                stale_groups.add(rollout.group_id)
        self._begun = begun
        return await self._cancel(stale_groups, f"that began before the oldest version that can be trained: {oldest}")

    async def _cancel_untrainable(self) -> int:
        """Cancel what still runs or waits of groups in which too many rollouts have died since the last look; return of how many groups."""
        run, estimator = self._settings.runner.run_id, self._settings.trainer.credit.estimator
        cancelled = 0
        groups, cursor = await self._groups_to_check()
        for group in groups:
            rollouts = [rollout async for rollout in self._rollouts(group_id=group)]
            dead = Counter(rollout.mode for rollout in rollouts if rollout.state is RolloutState.DEAD)
            size = max((rollout.group_size for rollout in rollouts), default=0)  # another source's groups may have another one
            if dead and cannot_be_trained(estimator, size, dead):
                stopped = await self._queue.cancel(RolloutSelector(run_id=run, group_id=group))
                cancelled += stopped.queued + stopped.running > 0
        self._ended = cursor
        if cancelled:
            _logger.info("cancelled %d groups with too many dead rollouts to train the others", cancelled)
        return cancelled

    async def _groups_to_check(self) -> tuple[Collection[str], int]:
        """Return the groups in which rollouts have died since the last look, and the position up to which that is known.

        At the first look they are all groups that have not ended, if any rollout has died: there is nothing to cancel of others.
        """
        run = self._settings.runner.run_id
        if self._ended is None:
            counts = await self._queue.run(run)
            return await self._open_groups() if RolloutState.DEAD in counts.states else [], counts.cursor
        groups, cursor = set[str](), self._ended
        while (page := await self._queue.ended(run, after=cursor, limit=_PAGE)).rollouts:
            cursor = page.cursor
            groups |= {rollout.group_id for rollout in page.rollouts if rollout.state is RolloutState.DEAD and rollout.mode in _COUNTED}
        return groups, cursor
