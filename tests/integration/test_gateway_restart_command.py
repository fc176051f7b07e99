"""A command that restarts an engine: run as a process, and told when it fails."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from spangrad import processes
from spangrad.weights.checksums import checksum_directory
from tests.support.gateways import Stage, all_serve, ask, backends, models, release_of, staged, started

POLICY = "/admin/policies/policy"


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0, 1, 2."""
    return models(tmp_path, 3)


async def publish(stage: Stage, weights: list[Path], version: int, **more: object) -> tuple[int, Any]:
    status, answer = await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, version, **more))
    answer.pop("seconds", None)
    if "stages" in answer:
        answer["stages"] = sorted(answer["stages"])
    return status, answer


async def versions(stage: Stage) -> list[int]:
    return [one["version"] for one in await backends(stage)]


async def test_restart_command_brings_engine_back_with_served_version(
    weights: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_inherited_files", 512)
    (engine,) = started(weights, 1)
    restarts = tmp_path / "restarts"
    show = f"import resource; open({str(restarts)!r}, 'a').write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))"
    command = [sys.executable, "-c", show]
    async with staged(engine, backends=[{"url": f"http://127.0.0.1:{engine.port}", "restart_command": command}]) as stage:
        await stage.readiness("serving")
        await publish(stage, weights, 1)
        engine.wrong_after_reload = True
        assert (await publish(stage, weights, 2))[0] == 502
        async with asyncio.timeout(60):
            while not restarts.exists():  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        # What a restart does to vLLM: it holds what it was started with, and is not paused.
        engine.wrong_after_reload, engine.paused = False, False
        engine.version, engine.model, engine.checksum = 0, str(weights[0]), checksum_directory(weights[0])
        await all_serve(stage, 1)
        assert (await versions(stage), engine.checksum) == ([1], checksum_directory(weights[1]))
    assert restarts.read_text() == "512", "an engine may open as many files as the gateway could at its start"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/no/such/command"], "Its restart command cannot be run: "),
        ([sys.executable, "-c", "print('no such unit'); raise SystemExit(5)"], "Its restart command ended with exit code 5: no such unit"),
    ],
)
async def test_restart_command_that_fails_is_reported_in_readiness(weights: list[Path], command: list[str], reason: str) -> None:
    (engine,) = started(weights, 1)
    async with staged(engine, backends=[{"url": f"http://127.0.0.1:{engine.port}", "restart_command": command}]) as stage:
        await stage.readiness("serving")
        engine.refuses = "reload_weights"
        await publish(stage, weights, 1)
        await stage.readiness(reason)
