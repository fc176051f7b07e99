"""Embedded queue: the queue's service in this process, over a file that no other process opens.

In: a directory, and a run. Out: a `QueueClient` that calls the service without HTTP. Invariant: each process that runs rollouts has a file
of its own; it is removed when all its rollouts have ended, and one that a dead process left can be opened again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from sqlalchemy import event

from runner.ids import file_name, ordered_ids
from runner.queue import rows
from runner.queue.client import QueueClient
from runner.queue.rows import Defaults
from runner.queue.service import Service
from runner.queue.stopped_attempts import GatewayOrders
from runner.queue.tables import QueueDatabase, ServedElsewhereError
from runner.queue.wire import QueuedRollout, Rollouts, RolloutState, RunCounts
from spangrad.errors import QueueError
from spangrad.http.queue_messages import DemandState
from spangrad.processes import make_private
from spangrad.settings import RunnerSettings, Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")
_OPEN = (RolloutState.QUEUED, RolloutState.RUNNING)


class EmbeddedQueue(QueueClient):
    """Client of a queue service in this process; answers as the server would."""

    def __init__(self, file: Path, defaults: Defaults, orders: GatewayOrders | None = None) -> None:
        """Open a queue's database, within a running event loop.

        Raises:
            QueueError: the file is not a queue's database, or another process has it open.
        """
        super().__init__("embedded")
        self.file = file
        self._service = Service(_opened(file), defaults, orders)
        self._tasks = [asyncio.create_task(self._service.watch(), name="queue watch")]
        if orders:
            self._tasks.append(asyncio.create_task(orders.run(), name="orders to the gateway"))

    @classmethod
    def begin(cls, settings: Settings) -> Self:
        """Create the queue of a new run."""
        return cls(_directory(settings.runner) / f"{next(ordered_ids())}.db", Defaults.of(settings), GatewayOrders.of(settings))

    @classmethod
    async def left(cls, settings: Settings) -> list[tuple[Self, int]]:
        """Open the queues of a run that dead processes left, oldest first; return each with its number of rollouts that have not ended."""
        queues: list[tuple[Self, int]] = []
        for file in sorted(_directory(settings.runner).glob("*.db")):
            try:
                queue = cls(file, Defaults.of(settings), GatewayOrders.of(settings))
            except ServedElsewhereError:
                continue  # its process is alive
            except QueueError as error:
                logger.warning("what %s has of run %s is left out: %s", file, settings.runner.run_id, error)
                continue
            if unfinished := await queue._unfinished():
                queues.append((queue, unfinished))
            else:
                await queue.close()
        return queues

    async def close(self) -> None:
        """Close the file; remove it where all its rollouts have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        unfinished = await self._unfinished()
        await self._service.close()
        if not unfinished:
            _remove(self.file)

    async def _unfinished(self) -> int:
        return sum(run.states.get(state, 0) for run in await self._service.counts() for state in _OPEN)

    async def _change(self, path: str, kind: type[T], body: msgspec.Struct) -> T:
        _, work = self._service.changes[path]
        answer = await work(body)
        assert isinstance(answer, kind)
        return answer

    async def run(self, run_id: str) -> RunCounts:
        """Return the number of rollouts of one run, by state."""
        return await self._service.run(run_id)

    async def rollout(self, rollout_id: str) -> QueuedRollout:
        """Return one rollout, with its attempts."""
        rollout = await self._service.read(partial(rows.rollout, rollout_id=rollout_id))
        if rollout is None:
            raise QueueError(f"the queue has no rollout {rollout_id}.")
        return rollout

    async def rollouts(
        self, *, run_id: str | None = None, state: RolloutState | None = None, group_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Rollouts:
        """Return rollouts in order of arrival."""
        return await self._service.read(partial(rows.listed, run_id=run_id, state=state, group_id=group_id, after=after, limit=limit))

    async def ended(self, run_id: str, *, after: int = 0, limit: int = 100, wait_seconds: float = 0) -> Rollouts:
        """Return a run's rollouts in the order in which they ended."""
        return await self._service.ends(run_id, after=after, limit=limit, wait_seconds=wait_seconds)

    async def demand(self, run_id: str, *, above: int = 0, wait_seconds: float = 0) -> DemandState:
        """Return the trainers' demand for a run; if it is for no more than `above` groups, wait for more as long as requested."""
        return await self._service.demand(run_id, above=above, wait_seconds=wait_seconds)


def _directory(settings: RunnerSettings) -> Path:
    make_private(settings.directory)
    directory = settings.directory / "queues" / file_name(settings.run_id)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _opened(file: Path) -> QueueDatabase:
    """Open the file's database without a disk sync per commit: commits survive the end of this process, but not of the machine.

    That is enough, since only this process uses an embedded queue: when the machine dies, the only reader of the last commits dies as well.
    """
    database = QueueDatabase(f"sqlite:///{file}")
    event.listen(database.engine, "connect", _relax)
    database.engine.dispose()  # the connection that made the tables was opened before
    return database


def _relax(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")


def _remove(file: Path) -> None:
    for suffix in ("", "-wal", "-shm", ".lock"):
        Path(f"{file}{suffix}").unlink(missing_ok=True)
