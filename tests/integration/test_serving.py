"""A worker that serves a queue: what it waits for, what it goes on with afterwards, and whose time its agents have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from commands.training import worker
from runner.queue.client import QueueClient
from runner.queue.wire import RolloutSelector
from runner.workers import serving as runner_serving
from runner.workers.agents import CallableAgent
from runner.workers.serving import LostAttemptCloser
from spangrad.errors import GatewayError, QueueError, StoreError
from spangrad.http import service
from spangrad.settings import QueueSettings, RunnerSettings, Settings
from tests.support.runners import is_true, new_rollouts, queue_settings, runner_services, serving, until, until_ended, with_mood


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
    monkeypatch.setattr(worker, "end_signal", asyncio.Event)
    await worker._work(Settings(), CallableAgent("mine:agent"))
    assert begins == 4


async def test_worker_whose_store_never_answered_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(settings: Settings, agent: Any, ending: asyncio.Event, ready: Callable[[], object]) -> None:
        raise StoreError("the store is away.")

    monkeypatch.setattr(runner_serving, "serve", serve)
    monkeypatch.setattr(worker, "end_signal", asyncio.Event)
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


async def test_worker_whose_token_the_queue_refuses_leaves_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_handlers(settings: Settings, agent: Any, stack: Any, queue: Callable[[], Any]) -> Any:
        return await queue()

    monkeypatch.setattr(runner_serving, "open_handlers", open_handlers)
    opened, of = list[QueueClient](), QueueClient.of
    monkeypatch.setattr(QueueClient, "of", lambda *given, **more: opened.append(of(*given, **more)) or opened[-1])
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", queue__token=SecretStr("secret"))
    async with serving(settings) as (client, _):
        wrong = QueueSettings(url=client.url, token=SecretStr("wrong"))
        with pytest.raises(QueueError, match=r"\(401\): this queue asks for its token"):
            await runner_serving.serve(Settings(queue=wrong), CallableAgent("mine:agent"), asyncio.Event(), lambda: None)
        session = opened[-1]._session
        assert session is not None
        assert session.closed


async def test_lost_attempt_closer_waits_for_gateway_and_closes_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_serving, "_RETRY_SECONDS", 0)
    monkeypatch.setattr(runner_serving, "_GATHER_SECONDS", 0)
    failing = {"4", "6"}
    closed: list[str] = []
    all_done = asyncio.Event()

    class Queue:
        async def close_endings(self, run_id: str) -> int:
            return 4

        async def ended(self, run_id: str, *, after: int, limit: int, wait_seconds: float) -> Any:
            if after == 7:
                all_done.set()
                await asyncio.Event().wait()
            return SimpleNamespace(rollouts=[SimpleNamespace(rollout_id=str(after), state="dead")], cursor=after + 1)

    async def close(rollout: Any) -> None:
        if rollout.rollout_id in failing:
            failing.discard(rollout.rollout_id)
            raise GatewayError("the gateway is away.") if rollout.rollout_id == "4" else RuntimeError("can't start new thread")
        closed.append(rollout.rollout_id)

    services: Any = SimpleNamespace(queue=Queue(), lost=SimpleNamespace(close=close))
    closing = asyncio.create_task(LostAttemptCloser(services, None, "run").run())  # type: ignore[arg-type]
    await asyncio.wait([closing, waiting := asyncio.create_task(all_done.wait())], timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert (waiting.done(), closing.done(), closed) == (True, False, ["4", "5", "6"])
    closing.cancel()


async def test_lost_attempt_closer_report_that_got_no_thread_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = 0

    async def report(_: LostAttemptCloser) -> None:
        nonlocal reports
        reports += 1
        if reports == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runner_serving, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(LostAttemptCloser, "report", report)
    services: Any = None
    reporting = asyncio.create_task(LostAttemptCloser(services, None, "run")._report_periodically())  # type: ignore[arg-type]
    await until(lambda: is_true(reports > 1))
    reporting.cancel()


class ClosingProcess:
    """A worker process that closes lost attempts: what it does, in order; its worker holds attempts until `free` is set."""

    def __init__(self, queue: QueueClient) -> None:
        self.done: list[object] = []
        self.free = asyncio.Event()
        services: Any = SimpleNamespace(queue=queue, lost=self, roots=self)
        self.closer = LostAttemptCloser(services, self, "run")  # type: ignore[arg-type]

    async def close(self, rollout: Any) -> None:
        self.done.append(rollout.rollout_id)

    async def without(self, rollouts: set[str]) -> None:
        self.done.append(set(rollouts))
        await self.free.wait()

    async def acknowledged(self, retry_seconds: float) -> None:
        self.done.append("acknowledged")

    async def run_until(self, count: int) -> None:
        """Run until so many things are done."""
        closing = asyncio.create_task(self.closer.run())
        await until(lambda: is_true(len(self.done) >= count))
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)


async def test_lost_attempt_closer_begins_after_the_endings_that_were_reported(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/queue.db")) as (client, _):
        await client.enqueue("run", new_rollouts(3))
        await client.cancel(RolloutSelector(rollout_ids=["r0", "r1"]))
        first, second, third = (ClosingProcess(client) for _ in range(3))
        await first.run_until(2)  # it is killed before it reports anything
        await second.run_until(2)
        assert (first.done, second.done) == (["r0", "r1"], ["r0", "r1"])
        reporting = asyncio.create_task(second.closer.report())
        await until(lambda: is_true(len(second.done) > 2))
        assert await client.close_endings("run") == 0, "its own attempts have no root spans yet"
        second.free.set()
        await reporting
        assert second.done[2:] == [{"r0", "r1"}, "acknowledged"]
        await second.closer.report()
        assert len(second.done) == 4, "nothing new is reported"
        newest = (await client.run("run")).cursor
        assert (await client.close_endings("run"), await client.close_endings("run", newest - 1)) == (newest, newest)
        await client.cancel(RolloutSelector(rollout_ids=["r2"]))
        await third.run_until(1)
        assert third.done == ["r2"]


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
