"""An engine that the gateway cannot bring up is out, and the others serve on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.pool import watch
from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, ask, backends, models, release_of, several, started

VERSIONS = "/admin/policies/policy/versions"


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0 and 1."""
    return models(tmp_path, 2)


async def second_is_down(stage: Stage) -> str:
    """The reason that the second of two engines is down for good; the first serves."""
    async with asyncio.timeout(10):
        while (told := await backends(stage))[1]["status"] != "down" or "is not admitted" in told[1]["reason"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert told[0]["status"] == "serving"
    return told[1]["reason"]


async def test_admission_with_unreadable_weights_keeps_only_that_engine_out(weights: list[Path], tmp_path: Path) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        body = release_of(weights, 1)
        assert (await ask(stage, "POST", VERSIONS, body))[0] == 200
        (weights[1] / "model.safetensors").unlink()
        (weights[1] / "model.safetensors").symlink_to(tmp_path / "nowhere")
        # What a restart does to vLLM.
        engines[1].version, engines[1].checksum = 0, checksum_directory(weights[0])
        reason = await second_is_down(stage)
        assert f"it does not hold version 1, which cannot be had: {weights[1]} cannot be read: " in reason
        assert (await stage.chat())[0] == 200
        status, answer = await ask(stage, "POST", VERSIONS, {**body, "version": 2})
        assert (status, "cannot be read" in answer["error"]["message"]) == (409, True)
        status, answer = await ask(stage, "POST", VERSIONS, {**body, "version": 2, "path": "x" * 5000})
        assert (status, "File name too long" in answer["error"]["message"]) == (409, True)


@pytest.mark.parametrize("counts", [{"api_servers": 2}, {"data_parallel_size": 2}, {"api_servers": 2, "data_parallel_size": 2}], ids=str)
async def test_admission_of_an_engine_with_several_servers_or_ranks_refuses(counts: dict[str, int]) -> None:
    """A second API server has a middleware of its own, which no order reaches: it would go on with the label of the old version."""
    engines = [FakeEngine(), FakeEngine()]
    async with several(*engines) as stage:
        # What a restart of it with other arguments does.
        for name, value in {**counts, "version": 3}.items():
            setattr(engines[1], name, value)
        reason = await second_is_down(stage)
        servers, ranks = counts.get("api_servers", 1), counts.get("data_parallel_size", 1)
        assert f"runs {servers} API servers and {ranks} data-parallel ranks" in reason
        assert (await stage.chat())[0] == 200
        assert not engines[1].requests


async def test_admission_with_internal_error_takes_only_that_engine_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [FakeEngine(), FakeEngine()]
    admit = watch._try_to_admit

    async def faulty(backend: Any, *more: Any) -> None:
        if backend.name == "policy-1":
            raise RuntimeError("we have not thought of this")
        await admit(backend, *more)

    async with several(*engines) as stage:
        monkeypatch.setattr(watch, "_try_to_admit", faulty)
        engines[1].version = 3
        reason = await second_is_down(stage)
        assert "the gateway failed at the engine" in reason
        assert "we have not thought of this" in reason
        assert (await stage.chat())[0] == 200
