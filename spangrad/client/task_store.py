"""Store of tasks in the queue's server, by name: uploaded once for a run, read by all of its workers.

In: tasks, a run, a name. Out: the same tasks, on any machine. Invariant: stored tasks are named by a digest of their content, so that the
same tasks uploaded twice are stored once, and an interrupted upload is finished by the next one; a name leads to all of its tasks or none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

import msgspec

from spangrad.client.queue_http import QueueHttp
from spangrad.errors import QueueError
from spangrad.types import Task

if TYPE_CHECKING:
    from spangrad.settings import Settings

STORED = "queue:"
"""Prefix of the name of stored tasks, as a source of tasks."""
_CHARACTERS = 4 * 2**20
"""Size limit of the JSON in one request, in characters."""
_PAGE = 1000


class TaskStore:
    """Tasks that the queue stores for a run."""

    def __init__(self, queue: QueueHttp) -> None:
        self._queue = queue

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the store of the queue that the settings name.

        Raises:
            QueueError: the settings name no queue.
        """
        queue = settings.queue
        if queue.url is None:
            raise QueueError(f"{STORED}NAME is asked of the queue: set queue.url.")
        return cls(QueueHttp(queue.url, queue.token, settings.runner.run_id))

    def upload(self, name: str, tasks: Sequence[Task]) -> str:
        """Store tasks under a name, in place of its former ones; return their digest.

        Raises:
            QueueError: the queue refuses, or stays unreachable.
        """
        digest = digest_of(tasks)
        path = f"/tasks/{quote(name, safe='')}"
        stored = self._queue.ask("GET", path, missing={"digest": ""})
        if stored["digest"] != digest:
            for first, part in _parts(tasks):
                rows = [_row(task) for task in part]
                self._queue.ask("POST", "/v1/tasks", {"digest": digest, "first": first, "tasks": rows})
            self._queue.ask("PUT", path, {"digest": digest, "tasks": len(tasks)})
        return digest

    def read(self, name: str) -> list[Task]:
        """Return the tasks of that name.

        Raises:
            QueueError: there are none, or the queue stays unreachable.
        """
        run_id = self._queue.run_id
        stored = self._queue.ask("GET", f"/tasks/{quote(name, safe='')}", missing={"digest": ""})
        if not stored["digest"]:
            raise QueueError(
                f"the queue at {self._queue.url} keeps no tasks {name!r} of run {run_id}. Upload them with Client.upload_data."
            )
        tasks: list[Task] = []
        while len(tasks) < stored["tasks"]:
            page = self._queue.ask("GET", f"/v1/tasks/{stored['digest']}?first={len(tasks)}&limit={_PAGE}")["tasks"]
            if not page:
                raise QueueError(f"the queue at {self._queue.url} has lost tasks of {name!r} of run {run_id}. Upload them again.")
            tasks += msgspec.convert(page, list[Task])
        return tasks


def digest_of(tasks: Sequence[Task]) -> str:
    """Return the SHA-256 over the tasks in their order, in hex; the order of an object's keys does not matter."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(_row(task), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _row(task: Task) -> dict[str, object]:
    fields = {name: getattr(task, name) for name in ("task_id", "input", "least_sandbox", "data_source")}
    return {**fields, "prompt": task.prompt and asdict(task.prompt)}


def _parts(tasks: Sequence[Task]) -> list[tuple[int, list[Task]]]:
    """Divide the tasks into requests of bounded size, each with the index of its first one."""
    parts: list[tuple[int, list[Task]]] = []
    size = _CHARACTERS
    for index, task in enumerate(tasks):
        length = len(json.dumps(_row(task)))
        if size + length > _CHARACTERS:
            parts.append((index, []))
            size = 0
        parts[-1][1].append(task)
        size += length
    return parts
