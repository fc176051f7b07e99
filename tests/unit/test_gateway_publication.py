"""Publication of weights into a fake engine: the order of steps, and what each failure leaves behind."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gateway.weights.sync_methods import Reload
from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, staged

STEPS = ["/pause", "/reset_prefix_cache", "reload_weights", "/spangrad/checksum", "/update_weight_version", "/resume", "probe"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"w": np.arange(6, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


async def publish(stage: Stage, path: Path, *, version: int = 1, checksum: str | None = None, policy: str = "policy") -> tuple[int, Any]:
    body = {"version": version, "path": str(path), "checksum": checksum or checksum_directory(path)}
    async with stage.client.post(f"/admin/policies/{policy}/versions", json=body) as answer:
        return answer.status, await answer.json()


async def state(stage: Stage) -> dict[str, Any]:
    async with stage.client.get("/admin/policies/policy") as answer:
        return await answer.json()


async def test_publish_runs_steps_in_order_and_serves_version(weights: Path) -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        began = time.monotonic()
        status, answer = await publish(stage, weights)
        seconds, stages = answer.pop("seconds"), answer.pop("stages")["policy-0"]
        assert list(stages) == ["check", "pause", "reload", "checksum", "update_weight_version", "resume", "probe"]
        assert 0 < sum(stages.values()) <= seconds < time.monotonic() - began
        assert (status, answer) == (
            200,
            {"policy": "policy", "version": 1, "checksum": checksum_directory(weights), "backends": {"policy-0": "serving"}},
        )
        assert stage.engine.orders == STEPS
        assert (await state(stage)).items() >= {"policy": "policy", "version": 1, "tokenizer_hash": "cafe", "status": "serving"}.items()
        await stage.chat()
        (span,) = await stage.spans()
        assert span.attributes["spangrad.policy.versions"] == "[[[0,1]]]"


async def test_publish_served_version_again_does_nothing(weights: Path) -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        await publish(stage, weights)
        stage.engine.orders.clear()
        assert await publish(stage, weights) == (
            200,
            {
                "policy": "policy",
                "version": 1,
                "checksum": checksum_directory(weights),
                "seconds": 0.0,
                "backends": {"policy-0": "serving"},
                "stages": {},
            },
        )
        assert stage.engine.orders == []


async def test_publish_invalid_request_is_refused_before_any_order(weights: Path, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    (truncated / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes()[:-4])
    empty = tmp_path / "empty"
    empty.mkdir()
    async with staged(FakeEngine(version=5)) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        for status, reason, arguments in (
            (404, "policy 'other' is not served here", {"path": weights, "version": 6, "policy": "other"}),
            (409, "there is no directory", {"path": tmp_path / "missing", "version": 6, "checksum": "float32:0"}),
            (409, "holds no *.safetensors", {"path": empty, "version": 6, "checksum": "float32:0"}),
            (409, "is truncated", {"path": truncated, "version": 6, "checksum": "float32:0"}),
            (409, "not float32:0. Write them anew.", {"path": weights, "version": 6, "checksum": "float32:0"}),
            (409, "version 5 is not newer than version 5", {"path": weights, "version": 5}),
            (409, "version 4 is not newer than version 5", {"path": weights, "version": 4}),
        ):
            answer_status, answer = await publish(stage, **arguments)  # type: ignore[arg-type]
            assert (answer_status, reason in answer["error"]["message"]) == (status, True), answer
        async with stage.client.post("/admin/policies/policy/versions", json={"version": 6}) as answer:
            assert answer.status == 400
        assert stage.engine.orders == []
        assert (await state(stage))["status"] == "serving"


@pytest.mark.parametrize("step", ["reload_weights", "/spangrad/checksum", "/update_weight_version", "/resume"])
async def test_publish_failing_after_reload_takes_engine_out_until_next(weights: Path, step: str) -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        stage.engine.refuses = step
        status, answer = await publish(stage, weights)
        failed = {"reload_weights": "reload", "/spangrad/checksum": "checksum"}.get(step, step.strip("/"))
        assert status == 502
        assert answer["error"]["message"].startswith(f"publication of version 1 failed at {failed}: ")
        assert answer["error"]["message"].endswith("The engine is down.")
        assert stage.engine.orders == [*STEPS[: STEPS.index(step) + 1], "/pause"]
        down = await state(stage)
        assert (down["status"], down["version"]) == ("down", 0)
        status, body = await stage.chat()
        assert (status, json.loads(body)["error"]["type"]) == (503, "engine_down")
        assert f"failed at {failed}" in json.loads(body)["error"]["message"]

        stage.engine.refuses = ""
        # Whether the version was set before the failure or not, the same publication mends it.
        assert (await publish(stage, weights))[0] == 200
        assert (await stage.chat())[0] == 200


async def test_publish_with_wrong_checksum_after_reload_fails(weights: Path) -> None:
    async with staged(FakeEngine(wrong_after_reload=True)) as stage:
        await stage.readiness("serving")
        status, answer = await publish(stage, weights)
        assert status == 502
        reason = "the engine does not hold the version's weights after the reload: it holds other values of w."
        assert reason in answer["error"]["message"]
        assert "/resume" not in stage.engine.orders


async def test_publish_failing_before_reload_keeps_old_version(weights: Path) -> None:
    async with staged(FakeEngine(refuses="/pause")) as stage:
        await stage.readiness("serving")
        status, answer = await publish(stage, weights)
        assert (status, answer["error"]["message"].endswith("The engine is serving.")) == (502, True)
        assert (await state(stage))["version"] == 0
        assert (await stage.chat())[0] == 200


async def test_publish_failing_early_does_not_resume_engine_that_is_down(weights: Path) -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        for stage.engine.refuses in ("reload_weights", "/pause"):
            status, answer = await publish(stage, weights)
            assert (status, answer["error"]["message"].endswith("The engine is down.")) == (502, True)
        assert "/resume" not in stage.engine.orders
        assert (await stage.chat())[0] == 503


async def test_publish_delays_new_calls_and_continues_calls_in_flight(weights: Path) -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        stage.engine.go_on.clear()
        in_flight = asyncio.create_task(stage.chat())
        await stage.engine.arrived.wait()
        stage.engine.hold_reload.clear()
        publishing = asyncio.create_task(publish(stage, weights))
        await stage.engine.reloading.wait()
        assert (await state(stage))["status"] == "publishing"
        new = asyncio.create_task(stage.chat())
        stage.engine.go_on.set()
        assert (await in_flight)[0] == 200
        await asyncio.wait({new}, timeout=0.1)
        assert stage.engine.orders == ["chat", *STEPS[:3]]
        stage.engine.hold_reload.set()
        assert (await publishing)[0] == 200
        assert (await new)[0] == 200
        assert stage.engine.orders == ["chat", *STEPS, "chat"]
        assert [span.attributes["spangrad.policy.versions"] for span in await stage.spans(2)] == ["[[[0,0]]]", "[[[0,1]]]"]


async def test_publish_whose_trainer_disconnects_completes(weights: Path) -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.hold_reload.clear()
        publishing = asyncio.create_task(publish(stage, weights))
        await stage.engine.reloading.wait()
        publishing.cancel()
        assert (await state(stage))["status"] == "publishing"
        stage.engine.hold_reload.set()
        assert (await stage.chat())[0] == 200
        assert (await state(stage)).items() >= {"policy": "policy", "version": 1, "tokenizer_hash": "cafe", "status": "serving"}.items()


async def test_restarted_engine_is_admitted_with_its_version(weights: Path) -> None:
    engine = FakeEngine()
    async with staged(engine) as stage:
        await stage.readiness("serving")
        engine.refuses = "reload_weights"
        await publish(stage, weights)
        await stage.engine_stops()
        await stage.readiness("does not answer")
        again = FakeEngine(version=1, port=engine.port)
        async with again.running():
            await stage.readiness("serving")
            assert (await state(stage))["version"] == 1
            assert (await stage.chat())[0] == 200


async def test_publish_with_internal_error_takes_engine_out(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("we have not thought of this")

    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        monkeypatch.setattr(Reload, "load", fails)
        status, answer = await publish(stage, weights)
        assert (status, stage.engine.orders) == (502, ["/pause", "/reset_prefix_cache", "/pause"])
        assert "publication of version 1 failed at reload: RuntimeError('we have not thought of this')" in answer["error"]["message"]
        assert (await state(stage))["status"] == "down"
