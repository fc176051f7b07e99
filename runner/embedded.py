"""A queue of one's own: the queue's service in this process, over a file that no other process has.

In: a directory, and a run. Out: a `QueueClient` that asks the service without HTTP. Invariant: each process that runs rollouts has a file
of its own; one whose rollouts have all ended is removed, one that was left by a process that died can be opened again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from sqlalchemy import event

from runner.ids import ordered_ids
from runner.queue.client import QueueClient
from runner.queue.rows import Defaults
from runner.queue.service import Service
from runner.queue.tables import QueueDatabase
from runner.queue.wire import (
    Ask,
    Beat,
    Cancelled,
    Complete,
    Completion,
    Demand,
    Enqueue,
    Fail,
    Failure,
    Held,
    Lease,
    NewRollout,
    Release,
    Result,
    Rollout,
    Rollouts,
    State,
    Which,
)
from spangrad.errors import QueueError
from spangrad.settings import RunnerSettings

_OPEN = (State.QUEUED, State.RUNNING)


class EmbeddedQueue(QueueClient):
    """The service in this process, asked as the server would be."""

    def __init__(self, file: Path, defaults: Defaults) -> None:
        """Open a file, within a running event loop.

        Raises:
            QueueError: it is no queue, or another process has it.
        """
        super().__init__("embedded")
        self.file = file
        self._service = Service(_opened(file), defaults)
        self._watch = asyncio.create_task(self._service.watch(), name="queue watch")

    @classmethod
    def begin(cls, settings: RunnerSettings) -> Self:
        """A new one, for a run."""
        return cls(_directory(settings) / f"{next(ordered_ids())}.db", _defaults(settings))

    @classmethod
    async def left(cls, settings: RunnerSettings) -> list[tuple[Self, int]]:
        """The queues of a run that processes left when they died, oldest first, each opened, with how many rollouts have not ended."""
        found: list[tuple[Self, int]] = []
        for file in sorted(_directory(settings).glob("*.db")):
            try:
                queue = cls(file, _defaults(settings))
            except QueueError:
                continue  # its process is alive, or it was killed before there was a table
            states = {state: count for run in await queue._service.counts() for state, count in run.states.items()}
            if open_ := sum(states.get(state, 0) for state in _OPEN):
                found.append((queue, open_))
            else:
                await queue.close()
        return found

    async def close(self) -> None:
        """Close the file; remove it where all its rollouts have ended."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        runs = await self._service.counts()
        await self._service.close()
        if not any(run.states.get(state) for run in runs for state in _OPEN):
            _remove(self.file)

    async def enqueue(self, run_id: str, rollouts: Iterable[NewRollout]) -> list[str]:
        """Add rollouts."""
        return (await self._service.enqueue(Enqueue(run_id=run_id, rollouts=list(rollouts)))).rollout_ids

    async def lease(
        self, run_id: str, worker: str, count: int = 1, *, wait_seconds: float = 0, lease_seconds: float | None = None
    ) -> list[Lease]:
        """Lease at most so many rollouts."""
        ask = Ask(run_id=run_id, worker=worker, count=count, wait_seconds=wait_seconds, lease_seconds=lease_seconds)
        return (await self._service.lease(ask)).leases

    async def beat(self, leases: Sequence[Lease | Held]) -> list[Result]:
        """Say that these are held."""
        return (await self._service.beat(Beat(leases=_held(leases)))).results

    async def complete(self, completions: Sequence[Completion]) -> list[Result]:
        """Tell that attempts succeeded."""
        return (await self._service.complete(Complete(completions=list(completions)))).results

    async def fail(self, failures: Sequence[Failure]) -> list[Result]:
        """Tell that attempts failed."""
        return (await self._service.fail(Fail(failures=list(failures)))).results

    async def release(self, leases: Sequence[Lease | Held], detail: str = "") -> list[Result]:
        """Give leases back."""
        return (await self._service.release(Release(leases=_held(leases), detail=detail))).results

    async def cancel(self, which: Which) -> Cancelled:
        """Cancel rollouts."""
        return await self._service.cancel(which)

    async def rollout(self, rollout_id: str) -> Rollout:
        """One rollout, with its attempts."""
        found = await self._service.rollout(rollout_id)
        if found is None:
            raise QueueError(f"the queue has no rollout {rollout_id}.")
        return found

    async def rollouts(
        self, *, run_id: str | None = None, state: State | None = None, group_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Rollouts:
        """Rollouts in order of arrival."""
        return await self._service.listed(run_id=run_id, state=state, group_id=group_id, after=after, limit=limit)

    async def ended(self, run_id: str, *, after: int = 0, limit: int = 100, wait_seconds: float = 0) -> Rollouts:
        """A run's rollouts in the order in which they ended."""
        return await self._service.ends(run_id, after=after, limit=limit, wait_seconds=wait_seconds)

    async def demand(self, run_id: str) -> Demand:
        """What trainers want of a run."""
        return await self._service.demand(run_id)


def _directory(settings: RunnerSettings) -> Path:
    directory = settings.directory / "queues" / quote(settings.run_id, safe="").replace(".", "%2E")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _defaults(settings: RunnerSettings) -> Defaults:
    return Defaults(settings.timeout_seconds, settings.max_attempts, settings.queue_lease_seconds)


def _opened(file: Path) -> QueueDatabase:
    """The file's database, whose commits survive this process, but are not waited for until they are on the disk.

    Who embeds a queue has nobody else who counts on it: when the machine dies, so does whoever was told of the last commits.
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


def _held(leases: Sequence[Lease | Held]) -> list[Held]:
    return [Held(rollout_id=one.rollout_id, attempt=one.attempt) for one in leases]
