"""Two gateways before four engines, as processes: publications under load, and kills of each; no answer is mislabelled, no span lost."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from spangrad import semconv
from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings
from tests.support.fake_engine import uint32s
from tests.support.gateways import ASKED, GatedEngine, models, release_of, started
from tests.support.otlp import OtlpSink
from tests.support.processes import fetch, start

PATIENT = """
from gateway.followers import controller, follower
controller.CONFIRM_SECONDS = controller.SILENT_SECONDS = follower.SILENT_SECONDS = 60
"""
"""Statements with which gateways wait for each other longer than a busy machine keeps a process from running."""
CLIENTS = 4
"""Clients of each gateway."""
WAYS: list[dict[str, object]] = [
    {},
    {"in_flight": "drain"},
    {"in_flight": "abort"},
    {"order": "rolling"},
    {"order": "rolling", "in_flight": "drain"},
]


@dataclass
class Gateways:
    """A controller and its follower, in that order, before the engines and a store."""

    engines: list[GatedEngine]
    store: OtlpSink
    settings: list[Settings]
    weights: list[Path]
    logs: Path
    before: str
    """Statements that each gateway begins with."""
    children: list[Child] = field(default_factory=list[Child])
    answered: set[str] = field(default_factory=set[str])
    """Rollouts whose client has the whole answer."""
    broken: int = 0
    """Calls that broke off, or were refused."""
    version: int = 0
    """The newest version that was published, or tried."""

    def begin(self, place: int) -> Child:
        return start("gateway.server", self.settings[place], self.logs / f"gateway-{place}.log", self.before)

    async def restart(self, place: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a gateway, and start it again at once."""
        self.children[place].process.send_signal(number)
        await asyncio.to_thread(self.children[place].process.wait, 10)
        self.children[place] = self.begin(place)

    async def whole(self) -> None:
        """Wait until all engines serve, and the follower knows it."""
        urls = [settings.gateway.url for settings in self.settings]

        def serves() -> bool:
            statuses = [backend["status"] for backend in fetch(f"{urls[1]}/admin/backends").get("backends", ())]
            return statuses == ["serving"] * len(self.engines) and fetch(f"{urls[1]}/healthz") == {"status": "up"}

        await asyncio.to_thread(wait_until, serves, 60, "the gateways", self.children, 0.05)

    async def publish(self, place: int, **more: object) -> int:
        """Publish the next version through a gateway; return the status. 0: the gateway is away."""
        self.version += 1
        url = f"{self.settings[place].gateway.url}/admin/policies/policy/versions"
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=release_of(self.weights, self.version, **more)) as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0

    @asynccontextmanager
    async def load(self) -> AsyncGenerator[None]:
        """Clients of both gateways that call without a pause, each call as a rollout of its own."""
        ends = asyncio.Event()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
            places = [(place, number) for place in range(2) for number in range(CLIENTS)]
            clients = [asyncio.create_task(self._client(session, ends, *place)) for place in places]
            try:
                yield
            finally:
                ends.set()
                await asyncio.gather(*clients)

    async def _client(self, session: aiohttp.ClientSession, ends: asyncio.Event, place: int, number: int) -> None:
        calls = 0
        while not ends.is_set():
            calls += 1
            rollout = f"{place}-{number}-{calls}-{len(self.answered)}"
            url = f"{self.settings[place].gateway.url}/rollout/{rollout}/attempt/0/v1/chat/completions"
            try:
                async with session.post(url, json=ASKED) as answer:
                    body = await answer.read()
                    if answer.status == 200 and json.loads(body)["choices"]:
                        self.answered.add(rollout)
                        continue
            except aiohttp.ClientError:
                pass
            self.broken += 1
            await asyncio.sleep(0.05)

    async def recorded(self) -> dict[str, tuple[int, int]]:
        """Wait for the spans of all calls that were answered; return version and weights of each answer, by rollout."""

        def missing() -> set[str]:
            return self.answered - {str(span.attributes[semconv.ROLLOUT_ID]) for span in self.store.spans}

        await asyncio.to_thread(wait_until, lambda: not missing(), 60, "the spans", [], 0.1)
        recorded: dict[str, tuple[int, int]] = {}
        for span in self.store.spans:
            ids = span.attributes.get(semconv.OUTPUT_TOKEN_IDS)
            if isinstance(ids, bytes) and ids:
                (((_, version),),) = json.loads(str(span.attributes[semconv.POLICY_VERSIONS]))
                recorded[str(span.attributes[semconv.ROLLOUT_ID])] = version, uint32s(ids)[0]
        return recorded


@asynccontextmanager
async def gateways(directory: Path, versions: int, before: str = "") -> AsyncGenerator[Gateways]:
    """A controller and its follower that serve, before four engines."""
    weights = models(directory, versions + 1)
    engines = started(weights, 4, GatedEngine)
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with OtlpSink() as store:
        values: list[dict[str, Any]] = [
            {"gateway.engine_url": "", "gateway.backends": [{"url": f"http://127.0.0.1:{engine.port}"} for engine in engines]},
            {"gateway.controller": urls[0]},
        ]
        for place, more in enumerate(values):
            more |= {"gateway.port": ports[place], "gateway.url": urls[place], "gateway.spill_path": str(directory / f"spill-{place}")}
            more["store.otlp_endpoint"] = store.url
        running = Gateways(engines, store, [load_settings(more, env={}) for more in values], weights, directory, before)
        async with AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.running())
            stack.enter_context(_processes(running))
            await running.whole()
            yield running


@contextmanager
def _processes(running: Gateways) -> Generator[None]:
    try:
        running.children += [running.begin(place) for place in range(2)]
        yield
    finally:
        for child in running.children:
            child.stop()


def mislabelled(recorded: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {rollout: pair for rollout, pair in recorded.items() if pair[0] != pair[1]}


async def test_versions_are_right_through_both_gateways_during_publications(tmp_path: Path) -> None:
    async with gateways(tmp_path, 20, PATIENT) as running:
        async with running.load():
            for number in range(20):
                way = WAYS[number % len(WAYS)]
                before = sum(engine.while_loading for engine in running.engines)
                assert await running.publish(number % 2, **way) == 200
                if way.get("in_flight") == "drain":
                    assert sum(engine.while_loading for engine in running.engines) == before, "drained of both gateways' calls"
                await asyncio.sleep(0.02)
        recorded = await running.recorded()
        assert mislabelled(recorded) == {}
        assert {engine.weights for engine in running.engines} == {20}
        assert len({version for version, _ in recorded.values()}) > 10
        assert {rollout[0] for rollout in recorded} == {"0", "1"}
        assert all(engine.requests for engine in running.engines)
        assert running.broken == 0


async def test_follower_that_is_stopped_holds_no_publication_back_for_long(tmp_path: Path) -> None:
    async with gateways(tmp_path, 2) as running:
        follower = running.children[1].process
        follower.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert await running.publish(0, in_flight="drain") == 200
        assert time.monotonic() - began < 20
        follower.send_signal(signal.SIGCONT)
        await running.whole()
        async with running.load():
            assert await running.publish(1, in_flight="drain") == 200
        recorded = await running.recorded()
        assert mislabelled(recorded) == {}
        assert {version for rollout, (version, _) in recorded.items() if rollout[0] == "1"} <= {1, 2}


async def kill(running: Gateways, chance: Random, kills: int) -> None:
    """Kill one of the gateways at random while versions are published, and publish until that succeeds again."""
    async with running.load():
        for number in range(kills):
            publishing = asyncio.create_task(running.publish(0, **chance.choice(WAYS)))
            await asyncio.sleep(chance.uniform(0, 0.1))
            await running.restart(number % 2)
            await publishing
            async with asyncio.timeout(60):
                while await running.publish(chance.randrange(2), **chance.choice(WAYS)) != 200:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.1)
            await running.whole()
    assert mislabelled(await running.recorded()) == {}
    assert running.answered


async def test_kills_of_both_gateways_mislabel_nothing_and_lose_no_span(tmp_path: Path) -> None:
    async with gateways(tmp_path, 200) as running:
        await kill(running, Random(1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_many_kills_of_both_gateways_mislabel_nothing_and_lose_no_span(tmp_path: Path, seed: int) -> None:
    async with gateways(tmp_path, 2000) as running:
        await kill(running, Random(seed), 20)
