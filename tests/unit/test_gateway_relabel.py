"""A publication of weights that an engine holds already: it changes the version's number alone, and interrupts no call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import ask, backends, models, release_of, several, staged, started

POLICY = "/admin/policies/policy"
RELABELLING = ["/spangrad/checksum", "/update_weight_version"]
LOADING = ["/pause", "/reset_prefix_cache", "reload_weights", "/spangrad/checksum", "/update_weight_version", "/resume", "probe"]


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0, 1, 2; the last two hold the same weights."""
    directories = models(tmp_path, 3)
    (directories[2] / "model.safetensors").write_bytes((directories[1] / "model.safetensors").read_bytes())
    return directories


async def publish(stage: Any, weights: list[Path], version: int, **more: object) -> tuple[int, Any]:
    return await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, version, **more))


@pytest.mark.parametrize("in_flight", ["keep", "drain", "abort"])
async def test_publish_of_served_weights_changes_version_while_calls_continue(weights: list[Path], in_flight: str) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        assert (await publish(stage, weights, 1))[0] == 200
        stage.engine.orders.clear()
        stage.engine.go_on.clear()
        call = asyncio.create_task(stage.chat())
        await stage.engine.arrived.wait()
        status, answer = await publish(stage, weights, 2, in_flight=in_flight)
        assert (status, answer["version"], list(answer["stages"]["policy-0"])) == (200, 2, ["checksum", "update_weight_version"])
        assert stage.engine.orders == ["chat", *RELABELLING], "nothing is paused, loaded, reset or probed"
        assert not call.done()
        stage.engine.go_on.set()
        assert (await call)[0] == 200
        assert [(backend["version"], backend["status"]) for backend in await backends(stage)] == [(2, "serving")]
        assert (await publish(stage, weights, 1))[0] == 409, "it is older than what is served now"


async def test_publish_to_several_engines_loads_only_those_that_differ(weights: list[Path]) -> None:
    engines = started(weights, 2)
    engines[0].checksum, engines[0].model = checksum_directory(weights[1]), str(weights[1])
    async with several(*engines) as stage:
        for engine in engines:
            engine.orders.clear()
        status, answer = await publish(stage, weights, 2)
        assert (status, answer["version"]) == (200, 2)
        assert [engine.orders for engine in engines] == [RELABELLING, LOADING]
        assert [(backend["version"], backend["status"]) for backend in await backends(stage)] == [(2, "serving")] * 2


async def test_publish_zero_adapter_changes_version_of_base_only(tmp_path: Path) -> None:
    base = models(tmp_path, 1)[0]
    checksum = checksum_directory(base)
    async with staged(FakeEngine(lora_rank=8, checksum=checksum, base=base)) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        body = {"version": 1, "path": str(base), "checksum": checksum}
        assert (await ask(stage, "POST", f"{POLICY}/versions", body))[0] == 200
        assert stage.engine.orders == RELABELLING


async def test_publish_loads_weights_that_differ_only_in_uncompared_tensors(tmp_path: Path) -> None:
    """A merged adapter changes linear layers alone, which a quantised engine holds in a form of its own."""
    weights = models(tmp_path, 2)
    for directory in weights:
        save_file({**load_file(directory / "model.safetensors"), "norm": np.ones(2, np.float32)}, directory / "model.safetensors")
    async with staged(FakeEngine(model=str(weights[0]), checksum=checksum_directory(weights[0]), unread={"w": "as int8"})) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        assert (await publish(stage, weights, 1))[0] == 200
        assert stage.engine.orders == LOADING
        assert stage.engine.checksum == checksum_directory(weights[1])


async def test_publish_to_engine_with_unexpected_weights_loads_them(weights: list[Path]) -> None:
    """It was restarted a moment ago, and who watches it has not seen that yet."""
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        assert (await publish(stage, weights, 1))[0] == 200
        stage.engine.checksum = checksum_directory(weights[0])
        stage.engine.orders.clear()
        assert (await publish(stage, weights, 2))[0] == 200
        assert stage.engine.orders == ["/spangrad/checksum", *LOADING]
        assert stage.engine.checksum == checksum_directory(weights[2])


async def test_publish_version_refused_by_engine_keeps_old_version(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        assert (await publish(stage, weights, 1))[0] == 200
        stage.engine.refuses = "/update_weight_version"
        status, answer = await publish(stage, weights, 2)
        assert (status, answer["error"]["message"].endswith("The engine is serving.")) == (502, True)
        assert (await stage.chat())[0] == 200
        stage.engine.refuses = ""
        assert (await publish(stage, weights, 2))[0] == 200, "the trainer tries again"
        assert [(backend["version"], backend["status"]) for backend in await backends(stage)] == [(2, "serving")]


async def test_publish_drain_timeout_continues_calls_with_new_weights(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        stage.engine.go_on.clear()
        call = asyncio.create_task(stage.chat())
        await stage.engine.arrived.wait()
        status, answer = await publish(stage, weights, 1, in_flight="drain", drain_seconds=0.2)
        assert (status, answer["version"]) == (200, 1)
        assert 0.2 <= answer["stages"]["policy-0"]["drain"] < 60
        assert (call.done(), stage.engine.pause_modes) == (False, ["keep"])
        stage.engine.go_on.set()
        assert (await call)[0] == 200


async def test_publish_with_abort_ends_calls_in_flight(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        assert (await publish(stage, weights, 1, in_flight="abort"))[0] == 200
        assert stage.engine.pause_modes == ["abort"]
        assert stage.engine.orders[-len(LOADING) :] == LOADING
