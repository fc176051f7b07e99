"""Tasks that the queue keeps: the same upload is kept once, one that broke off is finished, a name leads to all of its tasks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from runner.queue.tables import TASKS
from spangrad.client import task_store
from spangrad.client.queue_http import QueueHttp
from spangrad.client.task_store import TaskStore, digest_of
from spangrad.errors import QueueError
from spangrad.settings import QueueSettings
from spangrad.types import PromptVersion, SandboxRung, Task
from tests.support.runners import queue_settings, serving

FIRST = [Task(f"t{n}", {"question": "é" * n, "n": n}) for n in range(2500)]
OTHER = [Task("t0", None, PromptVersion("solver", 2), SandboxRung.BUBBLEWRAP, "digits")]


async def test_task_store_upload_keeps_tasks_once_and_reads_them_whole(queue_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = queue_settings(queue_db, run_id="run/1")
    monkeypatch.setattr(task_store, "_CHARACTERS", 50_000)  # many parts
    async with serving(settings) as (_, service):

        def rows() -> int:
            with service.database.reading() as connection:
                return connection.execute(sa.select(sa.func.count()).select_from(TASKS)).scalar_one()

        def work() -> None:
            queue = QueueHttp(settings.queue.url or "", None, "run/1", retry_seconds=5)
            store = TaskStore.of(settings)
            with pytest.raises(QueueError, match="keeps no tasks 'train' of run run/1"):
                store.read("train")
            # A part has arrived, then the uploader died: nobody finds it under a name, and the next upload adds the rest.
            part = {"digest": digest_of(FIRST), "first": 0, "tasks": [{"task_id": task.task_id, "input": task.input} for task in FIRST[:7]]}
            queue.ask("POST", "/v1/tasks", part)
            with pytest.raises(QueueError, match=r"\(409\): of 2500 tasks 7 are there. Upload them all"):
                queue.ask("PUT", "/tasks/train", {"digest": digest_of(FIRST), "tasks": 2500})
            assert [store.upload(name, FIRST) for name in ("train", "train", "again")] == [digest_of(FIRST)] * 3
            assert rows() == 2500
            assert store.read("train") == store.read("again") == FIRST
            store.upload("train", OTHER)
            assert (store.read("train"), store.read("again"), rows()) == (OTHER, FIRST, 2501)

        await asyncio.to_thread(work)


def test_task_store_upload_sends_requests_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_store, "_CHARACTERS", 10_000)
    sizes: list[int] = []

    class Recorder(QueueHttp):
        def ask(self, method: str, path: str, body: Any = None, *, missing: Any = None) -> Any:
            sizes.append(len(json.dumps(body)))
            return missing

    TaskStore(Recorder("http://127.0.0.1:9", None, "run")).upload("train", [Task(f"t{n}", n, data_source="s" * 400) for n in range(100)])
    assert max(sizes) < 11_000


def test_digest_of_tasks_depends_on_their_fields_and_order() -> None:
    first, second = Task("a", {"x": 1, "y": 2}), Task("b", 1)
    assert digest_of([first, second]) == digest_of([Task("a", {"y": 2, "x": 1}), second])
    pinned = Task("a", first.input, PromptVersion("solver", 2))
    different = ([first, second], [second, first], [first], [Task("a", 1), second], [Task("c", first.input), second], [pinned, second])
    assert len({digest_of(tasks) for tasks in different}) == len(different)


async def test_task_store_without_queue_raises(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    with pytest.raises(QueueError, match="is asked of the queue"):
        TaskStore.of(settings.model_copy(update={"queue": QueueSettings()}))
    with pytest.raises(QueueError, match=r"the queue at http.* does not answer"):
        QueueHttp(settings.queue.url or "", None, "run", retry_seconds=0).demand()
