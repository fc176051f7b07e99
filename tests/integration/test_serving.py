"""A worker that serves a queue: what it waits for, what it goes on with afterwards, and whose time its agents have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands.training import worker
from runner.workers import serving as runner_serving
from runner.workers.agents import CallableAgent
from spangrad.errors import GatewayError, StoreError
from spangrad.http import service
from spangrad.settings import QueueSettings, RunnerSettings, Settings
from tests.support.runners import new_rollouts, queue_settings, runner_services, serving, until_ended, with_mood


async def test_worker_that_has_begun_waits_for_absent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [GatewayError("the gateway is away."), StoreError("the store is away."), StoreError("the store is still away."), None]
    begins = 0

    async def serve(settings: Settings, agent: Any, ending: asyncio.Event, ready: Callable[[], object]) -> None:
        nonlocal begins
        ready()
        begins += 1
        if (error := errors.pop(0)) is not None:
            raise error
        ending.set()

    monkeypatch.setattr(runner_serving, "serve", serve)
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0)
    monkeypatch.setattr(worker, "on_signals", lambda report: None)
    await worker._work(Settings(), CallableAgent("mine:agent"))
    assert begins == 4


async def test_worker_whose_store_never_answered_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(settings: Settings, agent: Any, ending: asyncio.Event, ready: Callable[[], object]) -> None:
        raise StoreError("the store is away.")

    monkeypatch.setattr(runner_serving, "serve", serve)
    monkeypatch.setattr(worker, "on_signals", lambda report: None)
    with pytest.raises(StoreError, match="the store is away"):
        await worker._work(Settings(), CallableAgent("mine:agent"))


async def test_worker_without_queue_warns_and_ends_on_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, warned, sentences = asyncio.Event(), asyncio.Event(), list[str]()

    def warning(text: str, *given: object) -> None:
        sentences.append(text % given)
        warned.set()

    async def open_handlers(settings: Settings, agent: Any, stack: Any, queue: Callable[[], Any]) -> Any:
        return await queue()

    monkeypatch.setattr(runner_serving, "open_handlers", open_handlers)
    monkeypatch.setattr(service.logger, "warning", warning)
    monkeypatch.setattr(service.random, "uniform", lambda least, most: most)  # by chance, all pauses may be short
    settings = Settings(queue=QueueSettings(url="http://127.0.0.1:9"), runner=RunnerSettings(directory=tmp_path))
    serving_it = asyncio.create_task(runner_serving.serve(settings, CallableAgent("mine:agent"), ending, lambda: None))
    async with asyncio.timeout(20):
        await warned.wait()
        ending.set()
        await serving_it
    (sentence,) = sentences
    assert sentence.startswith("the queue at http://127.0.0.1:9 does not answer (")
    assert "Start it with `spangrad queue`, or set queue.url. Trying again for 5" in sentence


async def test_close_lost_attempts_waits_for_gateway_and_closes_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_serving, "_RETRY_SECONDS", 0)
    failing = {"old", "new 1"}
    mourned: list[str] = []
    all_done = asyncio.Event()

    class Queue:
        async def run(self, run_id: str) -> Any:
            return SimpleNamespace(cursor=4)

        async def rollouts(self, *, run_id: str, state: str, after: int, limit: int) -> Any:
            return SimpleNamespace(rollouts=["old"] if state == "dead" and not after else [], cursor=1)

        async def ended(self, run_id: str, *, after: int, limit: int, wait_seconds: float) -> Any:
            assert after >= 4
            if after == 6:
                all_done.set()
                await asyncio.Event().wait()
            return SimpleNamespace(rollouts=[f"new {after - 4}"], cursor=after + 1)

    async def close(name: str) -> None:
        if name in failing:
            failing.discard(name)
            raise GatewayError("the gateway is away.")
        mourned.append(name)

    services: Any = SimpleNamespace(queue=Queue(), lost=SimpleNamespace(close=close))
    closing = asyncio.create_task(runner_serving._close_lost_attempts(services, "run"))
    await asyncio.wait([closing, waiting := asyncio.create_task(all_done.wait())], timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert (waiting.done(), closing.done(), mourned) == (True, False, ["old", "new 0", "new 1"])
    closing.cancel()


async def test_rollout_timeout_overrides_worker_setting(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", max_attempts=1)
    with runner_services(tmp_path, queue__url=settings.queue.url, timeout_seconds=0.01) as services:
        async with serving(settings) as (client, _):
            await client.enqueue("run", with_mood("slow", new_rollouts(1, "long", timeout_seconds=100)))
            await client.enqueue("run", with_mood("hang", new_rollouts(1, "short", timeout_seconds=0.5)))
            services.start_worker()
            ended = {rollout.rollout_id: rollout for rollout in await until_ended(client, 2)}
    outcomes = {name: (rollout.state, rollout.attempts[-1].detail) for name, rollout in ended.items()}
    assert outcomes == {"long0": ("succeeded", ""), "short0": ("failed", "run: not done after 0.5 s")}
