"""Demands for stored tasks: the server enqueues their groups at the pace of workers and after a restart; they are read by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runner.process import task_demands
from runner.queue.wire import RolloutSelector
from spangrad.client.task_store import digest_of
from spangrad.settings import Settings, StoreSettings
from spangrad.types import SandboxRung, Task
from tests.support.runners import queue_settings, serving, until

TASKS = [Task(f"t{number}", {"n": number}, least_sandbox=SandboxRung.LANDLOCK, data_source="digits") for number in range(3)]
PATH = "/v1/runs/run/tasks/train"


@pytest.fixture
def settings(store: StoreSettings, tmp_path: Path) -> Settings:
    """A queue beside a store in which nothing is built."""
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", runner__gateway=False)
    return settings.model_copy(update={"store": store})


async def asked(settings: Settings, method: str, path: str, body: object = None) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(settings.queue.url) as session,
        session.request(method, path, data=None if body is None else json.dumps(body)) as answer,
    ):
        return answer.status, await answer.json()


async def upload(settings: Settings, tasks: list[Task], path: str = PATH) -> None:
    rows = [
        {"task_id": task.task_id, "input": task.input, "least_sandbox": task.least_sandbox, "data_source": task.data_source}
        for task in tasks
    ]
    assert (await asked(settings, "POST", "/v1/tasks", {"digest": digest_of(tasks), "first": 0, "tasks": rows}))[0] == 200
    assert (await asked(settings, "PUT", path, {"digest": digest_of(tasks), "tasks": len(tasks)}))[0] == 200


async def until_enqueued(settings: Settings, groups: int) -> None:
    async def are_enqueued() -> bool:
        return (await asked(settings, "GET", f"{PATH}/demand"))[1]["enqueued"] == groups

    await until(are_enqueued)


async def test_task_demand_is_enqueued_by_the_server_and_read_by_name(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_demands, "QUEUED_MOST", 4)
    monkeypatch.setattr(task_demands, "ROLLOUTS_MOST", 2)  # of one part: a group
    monkeypatch.setattr(task_demands, "_LOOK_SECONDS", 0.05)
    demand = {"groups": 5, "rollouts": 2, "mode": "validate"}
    async with serving(settings) as (queue, _):
        assert (await asked(settings, "PUT", f"{PATH}/demand", demand))[0] == 404
        await upload(settings, TASKS)
        status, state = await asked(settings, "PUT", f"{PATH}/demand", demand)
        assert (status, {**state, "enqueued": 0}) == (
            200,
            {"digest": digest_of(TASKS), "tasks": 3, "groups": 5, "enqueued": 0, "rollouts": 2},
        )
        await until_enqueued(settings, 2)
        leases = await queue.lease("run", "me", 1)
        assert [(one.task_id, one.mode, one.least_sandbox, one.data_source) for one in leases] == [
            ("t0", "validate", SandboxRung.LANDLOCK, "digits")
        ]
        await until_enqueued(settings, 3)
        await asyncio.sleep(0.2)
        assert (await queue.run("run")).states == {"running": 1, "queued": 5}, "no more until workers take some"
    async with serving(settings) as (queue, _):
        await queue.cancel(RolloutSelector(run_id="run"))
        await until_enqueued(settings, 5)
        ids = [rollout.task_id for rollout in (await queue.rollouts(run_id="run")).rollouts]
        assert ids == ["t0", "t0", "t1", "t1", "t2", "t2", "t0", "t0", "t1", "t1"], "in their order, none twice, none left out"
        await queue.cancel(RolloutSelector(run_id="run"))
        first = await asked(settings, "GET", f"{PATH}/trajectories?first=3&limit=1&wait=30")
        assert [(one["task_id"], one["state"], one["mode"]) for one in first[1]["trajectories"]] == [("t0", "cancelled", "validate")] * 2
        assert len((await asked(settings, "GET", f"{PATH}/trajectories?first=1"))[1]["trajectories"]) == 8


async def test_task_demand_is_a_level_until_it_is_ended(settings: Settings) -> None:
    async with serving(settings) as (queue, _):
        await upload(settings, TASKS)
        for groups, level in ((None, 3), (2, 3), (4, 4)):
            assert (await asked(settings, "PUT", f"{PATH}/demand", {"groups": groups}))[1]["groups"] == level
        await until_enqueued(settings, 4)
        status, refused = await asked(settings, "PUT", f"{PATH}/demand", {"groups": 9, "rollouts": 8})
        assert status == 400
        assert "only `groups` may change" in refused["error"]
        assert (await asked(settings, "PUT", f"{PATH}/demand", {"sampling": {"temperature": 0.5}}))[0] == 400, "there is no gateway"
        assert (await asked(settings, "GET", f"{PATH}/trajectories?limit=none"))[0] == 400
        assert (await asked(settings, "DELETE", f"{PATH}/demand"))[1]["groups"] == 4
        await upload(settings, TASKS[:1])
        assert (await asked(settings, "GET", f"{PATH}/demand"))[0] == 404, "other tasks have a demand of their own"
        assert (await queue.run("run")).states == {"queued": 4}


async def test_task_demand_whose_rollout_ids_are_too_long_is_refused(settings: Settings) -> None:
    path = f"/v1/runs/run/tasks/{'n' * 500}"
    async with serving(settings) as (queue, _):
        await upload(settings, TASKS, path)
        status, refused = await asked(settings, "PUT", f"{path}/demand", {"groups": 1})
        assert (status, await queue.runs()) == (400, [])
        assert "characters, and 512 are allowed. Shorten" in refused["error"]
        assert (await asked(settings, "GET", f"{path}/demand"))[0] == 404, "it was not recorded"
