"""Weights from a real sender into a fake engine: who orders what, what is refused before it is touched, and what needs the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from spangrad.settings import TrainerSettings
from spangrad.weights.checksums import checksum_directory
from spangrad.weights.shards import checksum_of
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, staged
from tests.support.receivers import source_of, sums_of_arrays
from trainer.publish.sender import WeightsSender

WEIGHTS = {"a": np.arange(6, dtype=np.float32) / 3, "b": np.float32([1e30, -0.1])}
BEFORE = ["/pause", "/reset_prefix_cache"]
MEETING = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
SENDING = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
RELABELLING = ["/spangrad/checksum", "/update_weight_version"]
AFTER = ["/spangrad/checksum", "/update_weight_version", "/resume", "probe"]


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    built = WeightsSender(TrainerSettings())
    yield built
    built.close()


@pytest.fixture
def version(tmp_path: Path) -> tuple[Path, str]:
    """Return a version's directory, whose weights are deleted, and its checksum."""
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    checksum = checksum_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return tmp_path, checksum


async def publish(stage: Stage, sender: WeightsSender, version: tuple[Path, str], number: int = 1, **weights: Any) -> tuple[int, Any]:
    path, checksum = version
    with source_of({**WEIGHTS, **weights}) as source, sender.offering(source) as offer:
        body = {"version": number, "path": str(path), "checksum": checksum, "sender": offer}
        async with stage.client.post("/admin/policies/policy/versions", json=body) as answer:
            return answer.status, await answer.json()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_publish_transfer_gateway_orders_and_trainer_sends(sender: WeightsSender, version: tuple[Path, str], dtype: str) -> None:
    async with staged(FakeEngine(transfer="http", checksum=f"{dtype}:{0:016x}")) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        status, body = await publish(stage, sender, version)
        assert (status, body["version"], body["checksum"]) == (200, 1, version[1])
        assert list(body["stages"]["policy-0"]) == ["check", "pause", "transfer", "checksum", "update_weight_version", "resume", "probe"]
        assert stage.engine.orders == [*BEFORE, *MEETING, *SENDING, *AFTER]
        stage.engine.orders.clear()
        assert (await publish(stage, sender, version, 2))[0] == 200
        assert stage.engine.orders == RELABELLING, "it holds these weights: nothing is sent"
        stage.engine.orders.clear()
        other = {"a": WEIGHTS["a"] + 1}
        assert (
            await publish(stage, sender, (version[0], checksum_of(sums_of_arrays({**WEIGHTS, **other}, "float32"), "float32")), 3, **other)
        )[0] == 200
        assert stage.engine.orders == [*BEFORE, *SENDING, *AFTER], "they have met already"


async def test_publish_transfer_invalid_request_is_refused_before_engine_is_touched(
    sender: WeightsSender, version: tuple[Path, str]
) -> None:
    async with staged(FakeEngine()) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        status, body = await publish(stage, sender, version)
        assert (status, "takes no weights from a trainer. Start it with engine.transfer = http" in body["error"]["message"]) == (409, True)
        assert stage.engine.orders == []
    async with staged(FakeEngine(transfer="http", checksum=f"bfloat16:{0:016x}")) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        status, body = await publish(stage, sender, version, b=np.float32([1, 2]))
        assert (status, "the trainer has weights with checksum" in body["error"]["message"]) == (409, True)
        assert stage.engine.orders == []
    for engine, reason in ((FakeEngine(transfer="nccl"), "the trainer's process sees no GPU"),):
        async with staged(engine) as stage:
            await stage.readiness("serving")
            stage.engine.orders.clear()
            status, body = await publish(stage, sender, version)
            assert (status, reason in body["error"]["message"], body["error"]["message"][-22:]) == (502, True, "The engine is serving.")
            assert stage.engine.orders == [*BEFORE, "/resume"]
            assert (await stage.chat())[0] == 200


@pytest.mark.parametrize("order", [*MEETING, *SENDING])
async def test_publish_transfer_failing_order_keeps_old_version_or_takes_engine_out(
    sender: WeightsSender, version: tuple[Path, str], order: str
) -> None:
    async with staged(FakeEngine(transfer="http", refuses=order)) as stage:
        await stage.readiness("serving")
        status, body = await publish(stage, sender, version)
        begun = order in SENDING
        assert (status, body["error"]["message"].endswith("The engine is down." if begun else "The engine is serving.")) == (502, True)
        assert (await stage.chat())[0] == (503 if begun else 200)
        stage.engine.refuses = ""
        stage.engine.orders.clear()
        assert (await publish(stage, sender, version))[0] == 200
        assert stage.engine.orders[-len(MEETING + SENDING + AFTER) :] == [*MEETING, *SENDING, *AFTER], "what failed is made anew"
        assert (await stage.chat())[0] == 200


async def test_rollback_after_transfer_reads_files(sender: WeightsSender, version: tuple[Path, str], tmp_path: Path) -> None:
    async with staged(FakeEngine(transfer="http")) as stage:
        await stage.readiness("serving")
        assert (await publish(stage, sender, version))[0] == 200
        second = tmp_path / "second"
        second.mkdir()
        save_file({**WEIGHTS, "a": WEIGHTS["b"]}, second / "model.safetensors")
        assert (await publish(stage, sender, (second, checksum_directory(second)), 2, a=WEIGHTS["b"]))[0] == 200
        save_file(WEIGHTS, tmp_path / "model.safetensors")
        stage.engine.orders.clear()
        async with stage.client.post("/admin/policies/policy/rollback", json={}) as answer:
            assert (await answer.json())["version"] == 1
        assert "reload_weights" in stage.engine.orders
        assert stage.engine.checksum == version[1]
