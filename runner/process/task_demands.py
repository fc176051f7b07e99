"""Demands for stored tasks: rollouts that the server enqueues by itself, whether or not a client is alive.

In: the name of tasks that a run has stored, and how many groups of them are demanded. Out: rollouts in the queue, at the pace of the
workers. Invariant: a demand is a level, ids follow from run, name, tasks and place, and what is enqueued is recorded after it is durable;
so a server that is killed and started again omits nothing and enqueues nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from runner.ids import require_short
from runner.process.wire import ROLLOUTS_MOST, TaskDemand, TaskDemandState
from runner.queue import rows
from runner.queue.service import Service
from runner.queue.tables import TASK_DEMANDS, TASKS
from runner.queue.task_data import TaskData, task_of
from runner.queue.wire import Enqueue
from spangrad.database import insert_new
from spangrad.errors import QueueError
from spangrad.http.queue_messages import NewRollout, TaskRow

logger = logging.getLogger(__name__)

QUEUED_MOST = 4096
"""Number of queued rollouts of a run from which on no more are enqueued for its stored tasks, until workers take some."""
_LOOK_SECONDS = 1.0
"""Pause between two looks while a run has enough queued rollouts, and after a failure of the database, in seconds."""


class TaskDemands:
    """Enqueues what is demanded of stored tasks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._data = TaskData(service)
        self._changed = asyncio.Event()
        self._enqueuing = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with all demands."""
        self._driver = asyncio.create_task(self._drive(), name="demands for stored tasks")

    async def close(self) -> None:
        """Enqueue no more; demands go on when the server is started again."""
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)

    async def want(self, run_id: str, name: str, demand: TaskDemand) -> TaskDemandState | None:
        """Record a demand; fewer groups than before change nothing.

        Returns:
            State of the demand. None: the run has no tasks of that name.

        Raises:
            ValueError: the tasks are none, or are demanded in another way already; or the ids of their rollouts are too long.
        """
        stored = await self._data.named(run_id, name)
        if stored is None:
            return None
        if stored.tasks == 0:
            raise ValueError(f"tasks {name} of run {run_id} are none. Upload some.")
        groups = stored.tasks if demand.groups is None else demand.groups
        require_short([_rollout_id(run_id, name, stored.digest, groups - 1, demand.rollouts - 1)])
        options = msgspec.json.encode(msgspec.structs.replace(demand, groups=None)).decode()
        key = {"run_id": run_id, "name": name, "digest": stored.digest}
        of = sa.and_(*[TASK_DEMANDS.c[column] == value for column, value in key.items()])

        def write(transaction: sa.Connection) -> str:
            row: dict[str, object] = {**key, "tasks": stored.tasks, "demand": options, "groups": groups, "enqueued": 0}
            insert_new(transaction, TASK_DEMANDS, [row])
            kept = transaction.execute(sa.select(TASK_DEMANDS.c.demand).where(of)).scalar_one()
            if kept == options:
                transaction.execute(TASK_DEMANDS.update().where(of, TASK_DEMANDS.c.groups < groups).values(groups=groups))
            return kept

        kept = await self._service.writer.do(write)
        if kept != options:
            raise ValueError(f"tasks {name} of run {run_id} are demanded as {kept}: only `groups` may change. Give other tasks a name.")
        self._changed.set()
        return await self.state(run_id, name)

    async def end(self, run_id: str, name: str) -> TaskDemandState | None:
        """Demand no more than what is enqueued by now, which goes on; return the state as of `want`."""
        of = (TASK_DEMANDS.c.run_id == run_id, TASK_DEMANDS.c.name == name)
        async with self._enqueuing:
            ended = TASK_DEMANDS.update().where(*of).values(groups=TASK_DEMANDS.c.enqueued)
            await self._service.writer.do(lambda transaction: transaction.execute(ended))
        return await self.state(run_id, name)

    async def state(self, run_id: str, name: str) -> TaskDemandState | None:
        """Return the demand for the tasks that a name refers to now. None: there is none."""
        stored = await self._data.named(run_id, name)
        if stored is None:
            return None
        of = (TASK_DEMANDS.c.run_id == run_id, TASK_DEMANDS.c.name == name, TASK_DEMANDS.c.digest == stored.digest)
        row = await self._service.read(lambda connection: connection.execute(sa.select(TASK_DEMANDS).where(*of)).first())
        if row is None:
            return None
        rollouts = msgspec.json.decode(row.demand, type=TaskDemand).rollouts
        return TaskDemandState(digest=row.digest, tasks=row.tasks, groups=row.groups, enqueued=row.enqueued, rollouts=rollouts)

    async def _drive(self) -> None:
        while True:
            self._changed.clear()
            try:
                async with self._enqueuing:
                    enqueued, held = await self._enqueue_parts()
            except Exception as error:  # also for want of threads: no client enqueues instead
                logger.warning("%s", error, exc_info=not isinstance(error, QueueError))
                enqueued, held = False, True
            if not enqueued:
                try:
                    await asyncio.wait_for(self._changed.wait(), _LOOK_SECONDS if held else None)
                except TimeoutError:
                    continue

    async def _enqueue_parts(self) -> tuple[bool, bool]:
        """Enqueue a part of each demand; return whether any was, and whether one is held back."""
        is_open = TASK_DEMANDS.c.enqueued < TASK_DEMANDS.c.groups
        demands = await self._service.read(lambda connection: connection.execute(sa.select(TASK_DEMANDS).where(is_open)).all())
        enqueued = held = False
        for row in demands:
            if await self._service.read(partial(rows.queued, run_id=row.run_id, most=QUEUED_MOST)) == QUEUED_MOST:
                held = True
                continue
            try:
                await self._enqueue_part(row)
            except ValueError as error:  # another run or task has rollouts of these ids, which must not hold up other demands
                logger.warning("tasks %s of run %s are not enqueued: %s", row.name, row.run_id, error)
                held = True
            else:
                enqueued = True
        return enqueued, held

    async def _enqueue_part(self, row: Any) -> None:
        demand = msgspec.json.decode(row.demand, type=TaskDemand)
        groups = range(row.enqueued, min(row.groups, row.enqueued + max(1, ROLLOUTS_MOST // demand.rollouts)))
        places = {group % row.tasks for group in groups}
        query = sa.select(TASKS).where(TASKS.c.digest == row.digest, TASKS.c.place.in_(places))
        tasks = {task.place: task_of(task) for task in await self._service.read(lambda connection: connection.execute(query).all())}
        new = [rollout for group in groups for rollout in _rollouts(row, demand, group, tasks[group % row.tasks])]
        await self._service.enqueue(Enqueue(run_id=row.run_id, rollouts=new))
        of = (TASK_DEMANDS.c.run_id == row.run_id, TASK_DEMANDS.c.name == row.name, TASK_DEMANDS.c.digest == row.digest)
        done = TASK_DEMANDS.update().where(*of).values(enqueued=groups.stop)
        await self._service.writer.do(lambda transaction: transaction.execute(done))


def rollout_ids(run_id: str, name: str, state: TaskDemandState, first: int, limit: int) -> list[str]:
    """Return the ids of the rollouts of demanded groups: at most `limit` groups, from the group `first` on."""
    groups = range(first, min(first + limit, state.groups))
    return [_rollout_id(run_id, name, state.digest, group, number) for group in groups for number in range(state.rollouts)]


def _rollouts(row: Any, demand: TaskDemand, group: int, task: TaskRow) -> list[NewRollout]:
    ids = [_rollout_id(row.run_id, row.name, row.digest, group, number) for number in range(demand.rollouts)]
    return demand.group(task, f"{row.name}/{row.digest[:16]}/{group}", ids)


def _rollout_id(run_id: str, name: str, digest: str, group: int, number: int) -> str:
    return f"{run_id}/{name}/{digest[:16]}/{group}/{number}"
