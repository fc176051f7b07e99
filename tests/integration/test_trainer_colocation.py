"""Turns of a trainer and its engines on the same devices: real gateway, fake engines and optimizer, and a trainer that dies between them.

The trainer that dies is forked by a program of its own: Polars starts threads, which do not survive a fork.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gateway.pool import watch
from spangrad import semconv
from spangrad.errors import BadRowsError, SettingsError
from spangrad.processes import wait_until
from spangrad.settings import GatewaySettings
from tests.support.fake_engine import FakeEngine, uint32s
from tests.support.gateways import GatedEngine, Stage, ask, backends, several, started
from tests.support.policies import trainer_settings
from tests.support.processes import crashes, fetch, survives
from tests.support.runners import is_true, until
from tests.support.trainers import FakeMirror, FakeOptimizer, FakeSource, begun, committed, normalise, settings, write_base
from trainer import colocation
from trainer.credit.learning import check
from trainer.data.batch import Batch
from trainer.ledger.recovery import newest_version, open_ledger, prepare, running_trainer
from trainer.loop import Trainer
from trainer.publish.publisher import Publisher
from trainer.restoring import restore

TURNS = {"of_trainer", "hand_back", "_wake"}
"""Functions of `trainer.colocation` at whose every line the trainer dies."""
DEATHS = 24
BATCHES = 16
"""More than the deaths that come after a commit."""
SLEEP_SECONDS = 4.0


class DeviceOptimizer(FakeOptimizer):
    """An optimizer that steps while its models are on the device and all engines sleep, and leaves the device before any of them wakes."""

    def __init__(self, engines: Sequence[str]) -> None:
        super().__init__()
        self.engines, self.moves = engines, list[str]()

    def sleeping(self) -> list[bool]:
        return [fetch(f"{url}/spangrad/info")["asleep"] for url in self.engines]

    def step(self, batch: Batch, before_update: Any = lambda: None) -> dict[str, float]:
        assert self.moves[-1] == "load_back"
        assert self.sleeping() == [True] * len(self.engines)
        return super().step(batch, before_update)

    def load_back(self) -> None:
        assert self.sleeping() == [True] * len(self.engines)
        self.moves.append("load_back")

    def offload(self) -> None:
        assert self.sleeping() == [True] * len(self.engines)
        self.moves.append("offload")


def colocated(url: str, engines: Sequence[str], directory: Path, groups: int) -> tuple[Trainer, DeviceOptimizer]:
    """A trainer that shares its devices with these engines, begun."""
    chosen = settings(directory / "v0", directory / "trainer", workers__colocated=True, max_staleness=99)
    chosen = chosen.model_copy(update={"gateway": GatewaySettings(url=url)})
    ledger, source = open_ledger(chosen), FakeSource([f"g{number:02}" for number in range(groups)])
    prepare(ledger, chosen)
    with running_trainer(ledger, chosen) as newest:
        tokenizer = newest.tokenizer_hash
    source.changes = {name: {"TokenizerHash": tokenizer} for name in source.names}
    optimizer = DeviceOptimizer(engines)
    restore(newest_version(ledger), ledger, source, chosen.trainer, normalise, lambda _: optimizer)  # type: ignore[arg-type, return-value]
    return begun(chosen, ledger, source, FakeMirror(ledger), Publisher(chosen.gateway), optimizer), optimizer


class Calls:
    """Calls through the gateway, one after another, while the block runs."""

    def __init__(self, stage: Stage) -> None:
        self.statuses = list[int]()
        self._stage = stage

    async def __aenter__(self) -> Calls:
        self._caller = asyncio.create_task(self._call())
        await until(lambda: is_true(self.statuses))  # a call of the first version is over before anything changes
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await self._caller

    async def _call(self) -> None:
        self._over = False
        while not self._over:
            self.statuses.append((await self._stage.chat(f"/rollout/r{len(self.statuses)}/attempt/0"))[0])
            await asyncio.sleep(0.02)

    async def labelled(self) -> list[tuple[int, int]]:
        """The weights that sampled each call, and the version that its span names."""
        spans = await self._stage.spans(len(self.statuses))
        versions = [json.loads(str(span.attributes[semconv.POLICY_VERSIONS]))[0][0][1] for span in spans]
        return [
            (uint32s(bytes(span.attributes[semconv.OUTPUT_TOKEN_IDS]))[0], version)  # type: ignore[arg-type]
            for span, version in zip(spans, versions, strict=True)
        ]


@asynccontextmanager
async def shared_devices(directory: Path, patch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[Stage, Calls, list[FakeEngine]]]:
    """A gateway before two engines that serve `v0`, under calls."""
    patch.setattr(watch, "POLL_SECONDS", 0.02)
    engines = started([write_base(directory / "v0")], 2, GatedEngine)
    async with several(*engines) as stage, Calls(stage) as calls:
        yield stage, calls, engines


def url_of(stage: Stage) -> str:
    return str(stage.client._base_url).rstrip("/")  # pyright: ignore[reportPrivateUsage]


async def test_colocated_trainer_steps_while_its_engines_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared_devices(tmp_path, monkeypatch) as (stage, calls, engines):
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]

        def train() -> DeviceOptimizer:
            trainer, optimizer = colocated(url_of(stage), urls, tmp_path, groups=6)
            trainer.run(follow=False)
            assert [list(rollouts) for rollouts in committed(trainer).values()][1:] == [
                [f"g{number:02}-{rollout}" for number in (pair, pair + 1) for rollout in (0, 1)] for pair in (0, 2, 4)
            ]
            assert newest_version(trainer.ledger).metrics.keys() >= {"seconds_sleep", "seconds_publish"}
            trainer.close()
            return optimizer

        optimizer = await asyncio.to_thread(train)
        assert optimizer.moves == ["load_back", "offload"] * 3
        assert [(engine["status"], engine["version"]) for engine in await backends(stage)] == [("serving", 3)] * 2
        assert [engine.orders.count("/sleep") for engine in engines] == [3, 3]
    assert set(calls.statuses) == {200}
    labelled = await calls.labelled()
    assert all(weights == version for weights, version in labelled)
    assert {0, 3} <= {version for _, version in labelled}


async def test_colocated_trainer_waits_for_late_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared_devices(tmp_path, monkeypatch) as (stage, _, engines):
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
        for engine in engines:
            engine.refuses = "reload_weights"

        def train() -> DeviceOptimizer:
            trainer, optimizer = colocated(url_of(stage), urls, tmp_path, groups=4)
            trainer.run(follow=False)
            trainer.close()
            return optimizer

        training = asyncio.create_task(asyncio.to_thread(train))
        async with asyncio.timeout(60):
            while {engine["status"] for engine in await backends(stage)} != {"down"}:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        for engine in engines:
            engine.refuses = ""
        assert (await training).moves == ["load_back", "offload"] * 2
        assert [(engine["status"], engine["version"]) for engine in await backends(stage)] == [("serving", 2)] * 2


async def test_colocated_engines_wake_after_refused_rows_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared_devices(tmp_path, monkeypatch) as (stage, calls, engines):
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]

        def train(fails: BaseException) -> DeviceOptimizer:
            trainer, optimizer = colocated(url_of(stage), urls, tmp_path, groups=2)
            optimizer.fails = fails
            try:
                trainer.step(trainer.take())  # type: ignore[arg-type]
            finally:
                trainer.close()
            return optimizer

        with pytest.raises(RuntimeError, match="out of memory"):
            await asyncio.to_thread(train, RuntimeError("out of memory"))
        assert [(engine["status"], engine["version"]) for engine in await backends(stage)] == [("serving", 0)] * 2
        optimizer = await asyncio.to_thread(train, BadRowsError("gap", {0: "logprob_gap"}))  # type: ignore[arg-type]
        assert optimizer.moves == ["load_back", "offload"]
        assert [(engine["status"], engine["version"]) for engine in await backends(stage)] == [("serving", 0)] * 2
    assert set(calls.statuses) == {200}


async def test_colocated_trainer_killed_in_a_turn_leaves_engines_that_wake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared_devices(tmp_path, monkeypatch) as (stage, calls, engines):
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
        program = [sys.executable, "-m", "tests.integration.test_trainer_colocation", url_of(stage), str(tmp_path), *urls]
        trainer = await asyncio.create_subprocess_exec(*program, cwd=Path(__file__).parents[2], stdout=-1, stderr=-1)
        output, errors = await trainer.communicate()
        assert trainer.returncode == 0, errors.decode()
        assert output.split() == [str(number).encode() for number in range(DEATHS)]
        assert [engine["status"] for engine in await backends(stage)] == ["serving"] * 2
        status, policy = await ask(stage, "GET", "/admin/policies/policy")
        assert (status, policy["version"]) == (200, BATCHES)
    assert set(calls.statuses) == {200}
    assert all(weights == version for weights, version in await calls.labelled())


def die_in_turns(url: str, directory: Path, engines: Sequence[str]) -> None:
    """Train, dying at each line of a turn; after some deaths the gateway wakes the engines, after the others the next start does."""
    colocation.SLEEP_SECONDS = SLEEP_SECONDS

    def train(_: int) -> None:
        colocated(url, engines, directory, 2 * BATCHES)[0].run(follow=False)

    def end() -> None:
        trainer, optimizer = colocated(url, engines, directory, 2 * BATCHES)
        trainer.run(follow=False)
        trained = [rollout for rollouts in committed(trainer).values() for rollout in rollouts]
        assert trained == [f"g{number:02}-{rollout}" for number in range(2 * BATCHES) for rollout in (0, 1)]
        assert optimizer.weight == BATCHES, "a step was repeated or skipped"

    for boundary in islice(crashes(train, {colocation.__file__: TURNS}), DEATHS):
        print(boundary, flush=True)
        if boundary % 4 == 0:
            wait_until(lambda: {backend["status"] for backend in fetch(f"{url}/admin/backends")["backends"]} == {"serving"}, 60, "engines")
    survives(end)


def test_colocation_without_publication_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"trainer\.weight_sync\.publish = false: engines would not wake"):
        check(trainer_settings(workers__colocated=True, weight_sync__publish=False))


if __name__ == "__main__":
    die_in_turns(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
