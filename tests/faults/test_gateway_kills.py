"""The gateway killed under load, and the store away from it: each call that a client has its whole answer of is stored, once."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.settings.sources import load_settings
from spangrad.store.clickhouse import connect
from tests.support.processes import ROOT, fetch, running_gateway, start
from tests.support.servers import running_store, store_settings

CLIENTS = 8
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "say rome"}]}
_ENGINE = """
import asyncio, sys
sys.path.insert(0, ".")
from tests.support.fake_engine import FakeEngine
async def serve():
    async with FakeEngine(port=int(sys.argv[1])).running():
        await asyncio.Event().wait()
asyncio.run(serve())
"""


@dataclass
class Load:
    """Clients that call without a pause, every second time for a stream, each call as a rollout of its own."""

    settings: Settings
    run: str
    answered: set[str] = field(default_factory=set[str])
    """Rollouts whose client has the whole answer."""
    broken: int = 0
    """Number of calls that broke off, or found no gateway."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        ends = asyncio.Event()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
            clients = [asyncio.create_task(self._client(session, ends, number)) for number in range(CLIENTS)]
            try:
                yield
            finally:
                ends.set()
                await asyncio.gather(*clients)

    async def answers(self, more: int) -> None:
        """Wait for so many more answers."""
        until = len(self.answered) + more
        async with asyncio.timeout(120):
            while len(self.answered) < until:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)

    async def _client(self, session: aiohttp.ClientSession, ends: asyncio.Event, number: int) -> None:
        calls = 0
        while not ends.is_set():
            calls += 1
            rollout, stream = f"{self.run}-{number}-{calls}", calls % 2 == 0
            url = f"{self.settings.gateway.url}/rollout/{rollout}/attempt/0/v1/chat/completions"
            try:
                async with session.post(
                    url, json={**ASKED, "stream": stream}, headers={"baggage": f"spangrad.run.id={self.run}"}
                ) as answer:
                    whole = await _has_end(answer) if stream else bool(await answer.read())
                    if answer.status == 200 and whole:
                        self.answered.add(rollout)
            except (aiohttp.ClientError, OSError):
                self.broken += 1
                await asyncio.sleep(0.02)


async def _has_end(answer: aiohttp.ClientResponse) -> bool:
    """Read until the event after which clients stop reading."""
    async for line in answer.content:
        if line.startswith(b"data: [DONE]"):
            return True
    return False


@pytest.fixture
def settings(tmp_path: Path) -> Generator[Settings]:
    """A gateway's, before an engine that runs, and a store that does not run yet."""
    port, engine_port = free_ports(2)
    values: dict[str, object] = {
        "gateway.port": port,
        "gateway.url": f"http://127.0.0.1:{port}",
        "gateway.engine_url": f"http://127.0.0.1:{engine_port}",
        "gateway.spill_path": str(tmp_path / "spill"),
    }
    loaded = load_settings(values, env={})
    engine = Child("engine", [sys.executable, "-c", _ENGINE, str(engine_port)], tmp_path / "engine.log", {"PYTHONPATH": str(ROOT)})
    wait_until(lambda: bool(fetch(f"{loaded.gateway.engine_url}/spangrad/info")), 30, "the engine", [engine], poll_seconds=0.05)
    yield loaded.model_copy(update={"store": store_settings(tmp_path / "data")})
    engine.stop()


@dataclass(frozen=True)
class Found:
    """Counts of a run's calls in the store: answered calls that are missing, rollouts with several, rows delivered."""

    missing: int
    double: int
    delivered: int
    """Rows as they came: more than calls, when a gateway was killed between a delivery and its note of it."""


def counted(store: StoreSettings, load: Load) -> Found:
    with connect(store) as client:

        def rows(sql: str) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in client.query(sql, {"run": load.run}).result_rows]

        by_rollout = "SELECT RolloutKey, count() FROM spangrad.calls WHERE RunId = {run:String} GROUP BY RolloutKey"
        counts: dict[str, int] = dict(rows(by_rollout))
        ((delivered,),) = rows("SELECT count() FROM otel.otel_traces WHERE SpanAttributes['spangrad.run.id'] = {run:String}")
    return Found(len(load.answered - counts.keys()), sum(1 for count in counts.values() if count > 1), delivered)


def settled(store: StoreSettings, load: Load, seconds: float = 60) -> Found:
    """Return the counts once no answered call is missing in the store, or the last ones when the time is over."""
    end = time.monotonic() + seconds
    while (now := counted(store, load)).missing and time.monotonic() < end:
        time.sleep(0.2)
    return now


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
async def test_gateway_killed_under_load_stores_each_answered_call_once(
    settings: Settings, tmp_path: Path, chance: Random, report: Callable[[str], None], kills: int
) -> None:
    load = Load(settings, uuid.uuid4().hex[:8])
    with running_store(settings.store, tmp_path / "store.log"):
        async with load.running():
            for kill in range(kills):
                child = await asyncio.to_thread(start, "gateway.server", settings, tmp_path / "gateway.log")
                # One in four dies at some point of its start or of its replay.
                if chance.random() < 0.75:
                    await load.answers(20)
                await asyncio.sleep(chance.uniform(0, 1))
                child.process.kill()
                child.process.wait()
                report(f"kill {kill + 1}: {len(load.answered)} answered, {load.broken} broken")
            with running_gateway(settings, tmp_path / "gateway.log"):
                await load.answers(20)
        with running_gateway(settings, tmp_path / "gateway.log") as last:
            now = await asyncio.to_thread(settled, settings.store, load)
            last.process.terminate()
            assert last.process.wait(60) == 0
        report(f"{len(load.answered)} answered, {load.broken} broken, {now}")
        now = counted(settings.store, load)
    assert (now.missing, now.double) == (0, 0)
    # Else nothing was killed in the middle of anything.
    assert load.broken > 0
    assert list((tmp_path / "spill").glob("*.spill")) == []


@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.slow)])
async def test_gateway_while_store_is_down_spills_and_stores_each_call_once(
    settings: Settings, tmp_path: Path, report: Callable[[str], None], seconds: float
) -> None:
    load = Load(settings, uuid.uuid4().hex[:8])
    # So little memory that most of it goes by the disk.
    small = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"export_bytes": 2**16})})
    with running_gateway(small, tmp_path / "gateway.log"), ExitStack() as until_the_end:
        async with load.running():
            with running_store(settings.store, tmp_path / "store.log"):
                await load.answers(50)
            before = len(load.answered)
            await asyncio.gather(asyncio.sleep(seconds), load.answers(51))
            meanwhile = len(load.answered) - before
            until_the_end.enter_context(running_store(settings.store, tmp_path / "store.log"))
            await load.answers(50)
        ended = time.monotonic()
        now = await asyncio.to_thread(settled, settings.store, load)
    report(f"{meanwhile} calls in {seconds} s without a store, all there {time.monotonic() - ended:.1f} s after the last call: {now}")
    assert (now.missing, now.double, load.broken) == (0, 0, 0)
