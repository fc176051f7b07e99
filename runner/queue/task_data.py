"""Tasks that the queue stores for its runs, so that every worker of a run finds them: uploaded in parts, then given a name.

Invariant: a row is written once, however often it is uploaded; a name refers to a digest of which every task is stored.
"""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import Meta

from runner.queue.rows import prompt_of, task_columns, task_facts
from runner.queue.service import Service
from runner.queue.tables import NAMED_TASKS, TASKS
from spangrad.database import insert_new
from spangrad.http.queue_messages import PinnedPrompt, Struct, TaskRow

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Place = Annotated[int, Meta(ge=0, lt=2**53)]


class UploadPart(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/tasks: tasks of an upload, from a place on."""

    digest: Digest
    first: Place
    tasks: list[TaskRow]


class Page(Struct, frozen=True, kw_only=True):
    """Response to GET /v1/tasks/{digest}: tasks from a place on."""

    tasks: list[TaskRow]


class NamedTasks(Struct, frozen=True, kw_only=True):
    """Body and response of PUT and GET /v1/runs/{run}/tasks/{name}: the tasks that a name of a run refers to."""

    digest: Digest
    tasks: Place
    """Number of tasks."""


class TaskData:
    """Stores tasks in the service's database."""

    def __init__(self, service: Service) -> None:
        self._read = service.read
        self._writer = service.writer

    async def keep(self, part: UploadPart) -> NamedTasks:
        """Store a part of an upload; rows that exist stay as they are."""
        rows = [{"digest": part.digest, "place": place, **task_columns(task)} for place, task in enumerate(part.tasks, part.first)]
        await self._writer.do(lambda transaction: insert_new(transaction, TASKS, rows))
        return NamedTasks(digest=part.digest, tasks=len(rows))

    async def page(self, digest: str, first: int, limit: int) -> Page:
        """Return tasks in their order, from a place on."""
        query = sa.select(TASKS).where(TASKS.c.digest == digest, TASKS.c.place >= first).order_by(TASKS.c.place).limit(limit)
        rows = await self._read(lambda connection: connection.execute(query).all())
        return Page(tasks=[task_of(row) for row in rows])

    async def name(self, run: str, name: str, kept: NamedTasks) -> int:
        """Give tasks a name in a run, in place of the previous ones, if all of them are stored.

        Returns:
            Number of tasks that are stored.
        """

        def write(transaction: sa.Connection) -> int:
            stored = transaction.execute(sa.select(sa.func.count()).where(TASKS.c.digest == kept.digest)).scalar_one()
            if stored == kept.tasks:
                transaction.execute(sa.delete(NAMED_TASKS).where(_named(run, name)))
                transaction.execute(sa.insert(NAMED_TASKS), [{"run_id": run, "name": name, "digest": kept.digest, "tasks": kept.tasks}])
            return stored

        return await self._writer.do(write)

    async def named(self, run: str, name: str) -> NamedTasks | None:
        """Return the tasks that a name of a run refers to. None: the run has no such name."""
        query = sa.select(NAMED_TASKS.c.digest, NAMED_TASKS.c.tasks).where(_named(run, name))
        row = await self._read(lambda connection: connection.execute(query).first())
        return NamedTasks(digest=row.digest, tasks=row.tasks) if row else None


def task_of(row: Any) -> TaskRow:
    """Return a task from its row."""
    return TaskRow(**task_facts(row), prompt=PinnedPrompt.of(prompt_of(row)))


def _named(run: str, name: str) -> sa.ColumnElement[bool]:
    return (NAMED_TASKS.c.run_id == run) & (NAMED_TASKS.c.name == name)
