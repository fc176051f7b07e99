"""Adapters into a fake engine: the order of steps, what is refused before the engine is touched, and what each failure leaves behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from spangrad.weights import checksums
from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, backends, several, staged
from tests.support.policies import random_adapter

STEPS = [
    "/pause",
    "/reset_prefix_cache",
    "load_lora_adapter",
    "/spangrad/checksum",
    "/update_weight_version",
    "/resume",
    "probe",
]
"""The base was summed when the engine was admitted; the checksum is the adapter's."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    save_file({"layers.0.q_proj.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return random_adapter(base, tmp_path / "v1", seed=1)


def engine_of(base: Path, rank: int = 4) -> FakeEngine:
    checksum = checksum_directory(base)
    return FakeEngine(lora_rank=rank, checksum=checksum, base=base, model=str(base))


async def publish(stage: Stage, path: Path, version: int = 1) -> tuple[int, Any]:
    body = {"version": version, "path": str(path), "checksum": checksum_directory(path)}
    async with stage.client.post("/admin/policies/policy/versions", json=body) as answer:
        return answer.status, await answer.json()


async def roll_back(stage: Stage) -> int:
    async with stage.client.post("/admin/policies/policy/rollback", json={}) as answer:
        return (await answer.json())["version"]


def loaded(stage: Stage) -> list[Any]:
    return [json.loads(body) for body in stage.engine.bodies]


async def test_publish_adapter_replaces_previous_and_rollback_ends_at_bare_base(base: Path, adapter: Path) -> None:
    async with staged(engine_of(base)) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        status, answer = await publish(stage, adapter)
        assert (status, answer["checksum"], answer["backends"]) == (200, checksum_directory(adapter), {"policy-0": "serving"})
        assert list(answer["stages"]["policy-0"]) == ["check", "pause", "adapter", "checksum", "update_weight_version", "resume", "probe"]
        assert stage.engine.orders == STEPS
        second = random_adapter(base, adapter.with_name("v2"), seed=2)
        assert (await publish(stage, second, 2))[0] == 200
        assert [await roll_back(stage), await roll_back(stage)] == [1, 0]
        paths = [str(adapter), str(second), str(adapter), "the bare adapter"]
        assert loaded(stage) == [{"lora_name": "policy", "lora_path": path, "load_inplace": True} for path in paths]
        assert (stage.engine.version, stage.engine.checksum) == (0, checksum_directory(base))


async def test_publish_adapter_checksum_of_base_is_read_once(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, tensors = list[Path](), checksums._tensors

    def counted(files: list[Path]) -> Any:
        read.extend(file.parent for file in files)
        return tensors(files)

    monkeypatch.setattr(checksums, "_tensors", counted)
    async with staged(engine_of(base)) as stage:
        await stage.readiness("serving")
        adapters = [random_adapter(base, adapter.with_name(f"n{version}"), seed=version) for version in (1, 2, 3)]
        body = [{"version": version, "path": str(path), "checksum": checksum_directory(path)} for version, path in enumerate(adapters, 1)]
        read.clear()
        checksums._sums_of_base.cache_clear()
        for request in body:
            stage.engine.parts.clear()
            async with stage.client.post("/admin/policies/policy/versions", json=request) as answer:
                assert answer.status == 200
            assert stage.engine.parts == ["adapter"], "the engine sums its base when it is admitted, and no more"
    assert read.count(base) == 2, "of three publications the first reads the base: the gateway, and the fake engine in this process"


async def test_publish_with_engine_that_refuses_after_its_restart_counts_for_the_other(base: Path, adapter: Path) -> None:
    first, second = engine_of(base), engine_of(base)
    async with several(first, second) as stage:
        first.go_on.clear()
        call = asyncio.create_task(stage.chat())
        await first.arrived.wait()
        body = {"version": 1, "path": str(adapter), "checksum": checksum_directory(adapter), "order": "rolling", "in_flight": "drain"}
        publishing = asyncio.create_task(stage.client.post("/admin/policies/policy/versions", json=body))
        # Meanwhile the second is started anew, without adapters.
        second.lora_rank, second.version = 0, 7
        async with asyncio.timeout(30):
            while (await backends(stage))[1]["version"] != 7:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        first.go_on.set()
        answer = await (await publishing).json()

        assert (await call)[0] == 200
        assert answer["version"] == 1
        assert answer["backends"]["policy-0"] == "serving"
        assert answer["backends"]["policy-1"].startswith("down: the engine at")
        assert (first.version, first.checksum) == (1, checksum_directory(adapter))


async def test_publish_adapter_unfit_for_engine_is_refused_before_any_order(base: Path, adapter: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file({"layers.0.q_proj.weight": np.ones((2, 3), np.float32)}, whole / "model.safetensors")
    foreign = random_adapter(whole, tmp_path / "foreign", seed=3)
    async with staged(engine_of(base, rank=2)) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        status, answer = await publish(stage, adapter)
        assert (status, "adapter of rank 4, and the engine at" in answer["error"]["message"]) == (409, True)
        assert answer["error"]["message"].endswith("takes ranks up to 2. Start it with engine.lora_rank = 4.")
        assert stage.engine.orders == []
    async with staged(FakeEngine(checksum=checksum_directory(base))) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        status, answer = await publish(stage, adapter)
        assert (status, "takes none. Start it with engine.lora_rank = 4 or more" in answer["error"]["message"]) == (409, True)
        assert stage.engine.orders == []
    async with staged(engine_of(base)) as stage:
        await stage.readiness("serving")
        for other in (foreign, whole):
            stage.engine.orders.clear()
            status, answer = await publish(stage, other)
            assert (status, "Start the engine with that model. The engine is serving." in answer["error"]["message"]) == (502, True)
            assert "load_lora_adapter" not in stage.engine.orders
            assert (stage.engine.version, stage.engine.paused, (await stage.chat())[0]) == (0, False, 200)


@pytest.mark.parametrize("spoils", [False, True])
async def test_publish_adapter_that_cannot_be_read_leaves_old_version_or_takes_engine_out(base: Path, adapter: Path, spoils: bool) -> None:
    async with staged(engine_of(base)) as stage:
        await stage.readiness("serving")
        assert (await publish(stage, adapter))[0] == 200
        stage.engine.refuses, stage.engine.spoils = "load_lora_adapter", spoils
        status, answer = await publish(stage, random_adapter(base, adapter.with_name("v2"), seed=2), 2)
        assert (status, "publication of version 2 failed at adapter" in answer["error"]["message"]) == (502, True)
        assert answer["error"]["message"].endswith("The engine is down." if spoils else "The engine is serving.")
        assert (await stage.chat())[0] == (503 if spoils else 200)
        assert stage.engine.version == 1
        stage.engine.refuses = ""
        assert (await publish(stage, adapter.with_name("v2"), 2))[0] == 200
        assert (await stage.chat())[0] == 200


async def test_restarted_engine_gets_its_adapter_again(base: Path, adapter: Path) -> None:
    async with staged(engine_of(base)) as stage:
        await stage.readiness("serving")
        assert (await publish(stage, adapter))[0] == 200
        stage.engine.version, stage.engine.checksum, stage.engine.model = 0, checksum_directory(base), str(base)
        async with asyncio.timeout(30):
            while stage.engine.version == 0:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        await stage.readiness("serving")
        assert stage.engine.checksum == checksum_directory(adapter)
        assert [order["lora_path"] for order in loaded(stage)] == [str(adapter)] * 2
