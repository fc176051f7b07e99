"""Clients of the rollout service that are copied beside a trainer: plain Python against a real queue."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runner.queue.wire import RolloutSelector
from spangrad.processes import free_ports
from spangrad.settings import Settings, StoreSettings
from tests.support.runners import queue_settings, serving, until
from tests.support.servers import raw_server

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
TASKS = [{"task_id": "lima", "input": 1, "rollouts": 2}, {"task_id": "rome", "input": 2}]


@pytest.fixture(scope="module")
def client() -> ModuleType:
    """The file, imported by its path as a copy would be."""
    spec = importlib.util.spec_from_file_location("rollout_service", CLIENTS / "rollout_service.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings(store: StoreSettings, tmp_path: Path) -> Settings:
    return queue_settings(f"sqlite:///{tmp_path}/q.db").model_copy(update={"store": store})


def test_rollout_service_imports_the_standard_library_alone() -> None:
    lines = (CLIENTS / "rollout_service.py").read_text().splitlines()
    modules = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert modules <= set(sys.stdlib_module_names)


async def test_rollout_service_yields_each_trajectory_once_over_a_restart(
    client: ModuleType, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PAUSES", (0.05, 0.1))
    service = client.RolloutService(settings.queue.url)
    trajectories: list[dict[str, Any]] = []

    def collect() -> None:
        trajectories.extend(service.process("run", "first", TASKS, mode="validate", limits={"max_calls": 3}))

    async with serving(settings) as (queue, _):
        collecting = asyncio.create_task(asyncio.to_thread(collect))
        await until(lambda: has_runs(queue))
        await queue.cancel(RolloutSelector(run_id="run", group_id="first/1"))
        await asyncio.sleep(0.3)
    async with serving(settings) as (queue, _):  # started again meanwhile
        await queue.cancel(RolloutSelector(run_id="run"))
        await asyncio.wait_for(collecting, 30)
        assert (await queue.run("run")).states == {"cancelled": 3}
    assert sorted(each["rollout_id"] for each in trajectories) == ["run/first/0/0", "run/first/0/1", "run/first/1/0"]
    assert {each["mode"] for each in trajectories} == {"validate"}


def test_rollout_service_that_answers_between_cuts_is_not_away(client: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSES", (0.3, 0.3))
    lines = [json.dumps({"rollout_id": f"r{number}"}).encode() + b"\n" for number in range(6)]
    cut = b"HTTP/1.1 200 OK\r\n\r\n"
    with raw_server([*(cut + line for line in lines), cut + b'{"pending": []}\n']) as url:
        trajectories = client.RolloutService(url, retry_seconds=1.0).process("run", "first", TASKS)
        assert [each["rollout_id"] for each in trajectories] == [f"r{number}" for number in range(6)]


def test_rollout_service_retries_a_refusal_whose_body_breaks_off(client: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSES", (0.01, 0.01))
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 99\r\n\r\nhalf"
    with raw_server([busy, b'HTTP/1.1 200 OK\r\n\r\n{"rollout_id": "r"}\n{"pending": []}\n']) as url:
        assert list(client.RolloutService(url).process("run", "first", TASKS)) == [{"rollout_id": "r"}]


async def has_runs(queue: Any) -> bool:
    return bool(await queue.runs())


async def test_rollout_service_ends_after_its_seconds(client: ModuleType, settings: Settings) -> None:
    service = client.RolloutService(settings.queue.url)
    async with serving(settings):
        assert await asyncio.to_thread(lambda: list(service.process("run", "first", TASKS, seconds=0.2))) == []


async def test_rollout_service_refusal_and_absence_are_errors(client: ModuleType, settings: Settings) -> None:
    service = client.RolloutService(settings.queue.url)
    async with serving(settings):
        with pytest.raises(client.RolloutServiceError, match=r"refuses the request \(HTTP 400: .*unknown field"):
            await asyncio.to_thread(lambda: list(service.process("run", "first", TASKS, nonsense=1)))
    away = client.RolloutService(f"http://127.0.0.1:{free_ports(1)[0]}", retry_seconds=0)
    with pytest.raises(client.RolloutServiceError, match=r"does not answer .* The rollouts go on: send the request again"):
        await asyncio.to_thread(lambda: list(away.process("run", "first", TASKS)))
