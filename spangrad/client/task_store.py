"""Tasks that the queue's server keeps for a run, by name: uploaded once, read by whoever works for it.

In: tasks, a run, a name. Out: the same tasks, on any machine. Invariant: what is kept is named by a digest of its content, so that the same
tasks uploaded twice are kept once, and an upload that broke off is finished by the next one; a name leads to all of its tasks or to none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from spangrad.client.queue_http import PATIENCE_SECONDS, QueueHttp
from spangrad.errors import QueueError
from spangrad.types import Task

if TYPE_CHECKING:
    from spangrad.settings import RunnerSettings

STORED = "queue:"
"""Before the name of stored tasks, where a source of tasks is asked for."""
_CHARACTERS = 4 * 2**20
"""JSON in one request."""
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Stored:
    """Tasks that are kept."""

    name: str
    digest: str
    """Of their content."""
    tasks: int


class TaskStore:
    """What the queue keeps for a run."""

    def __init__(self, queue: QueueHttp) -> None:
        """Of that queue."""
        self._queue = queue

    @classmethod
    def of(cls, runner: RunnerSettings) -> Self:
        """Of the queue that the settings name.

        Raises:
            QueueError: they name none.
        """
        if runner.queue_url is None:
            raise QueueError(f"{STORED}NAME is asked of the queue: set runner.queue_url.")
        return cls(QueueHttp(runner.queue_url, runner.queue_token, runner.run_id, patience_seconds=PATIENCE_SECONDS))

    def upload(self, name: str, tasks: Sequence[Task]) -> Stored:
        """Keep tasks under a name, in place of what had it before.

        Raises:
            QueueError: the queue refuses, or stays away.
        """
        digest = digest_of(tasks)
        path = f"/tasks/{quote(name, safe='')}"
        there = self._queue.ask("GET", path, missing={"digest": ""})
        if there["digest"] != digest:
            for first, part in _parts(tasks):
                rows = [{"task_id": task.task_id, "input": task.input} for task in part]
                self._queue.ask("POST", "/v1/tasks", {"digest": digest, "first": first, "tasks": rows})
            self._queue.ask("PUT", path, {"digest": digest, "tasks": len(tasks)})
        return Stored(name, digest, len(tasks))

    def read(self, name: str) -> list[Task]:
        """The tasks of that name.

        Raises:
            QueueError: there are none, or the queue stays away.
        """
        run_id = self._queue.run_id
        found = self._queue.ask("GET", f"/tasks/{quote(name, safe='')}", missing={"digest": ""})
        if not found["digest"]:
            raise QueueError(
                f"the queue at {self._queue.url} keeps no tasks {name!r} of run {run_id}. Upload them with Client.upload_data."
            )
        tasks: list[Task] = []
        while len(tasks) < found["tasks"]:
            page = self._queue.ask("GET", f"/v1/tasks/{found['digest']}?first={len(tasks)}&limit={_PAGE}")["tasks"]
            if not page:
                raise QueueError(f"the queue at {self._queue.url} has lost tasks of {name!r} of run {run_id}. Upload them again.")
            tasks += [Task(one["task_id"], one["input"]) for one in page]
        return tasks


def digest_of(tasks: Sequence[Task]) -> str:
    """SHA-256 over ids and inputs in their order; the order of an object's keys does not matter."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([task.task_id, task.input], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _parts(tasks: Sequence[Task]) -> list[tuple[int, list[Task]]]:
    """The tasks in requests of bounded size, each with the place of its first one."""
    parts: list[tuple[int, list[Task]]] = []
    size = _CHARACTERS
    for place, task in enumerate(tasks):
        length = len(json.dumps(task.input)) + len(task.task_id)
        if size + length > _CHARACTERS:
            parts.append((place, []))
            size = 0
        parts[-1][1].append(task)
        size += length
    return parts
