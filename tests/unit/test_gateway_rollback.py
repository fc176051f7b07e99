"""A way back that an engine has missed: it does not bring the version that was taken back into service again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, all_serve, ask, backends, models, release_of, several, started

POLICY = "/admin/policies/policy"


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0 to 3."""
    return models(tmp_path, 4)


class Hiccup(FakeEngine):
    """Refuses an order once."""

    async def _order(self, request: web.Request) -> web.Response:
        answer = await super()._order(request)
        if answer.status == 500:
            self.refuses = ""
        return answer


def engines(weights: list[Path]) -> list[FakeEngine]:
    return started(weights, 2, Hiccup)


async def publish(stage: Stage, weights: list[Path], version: int, **more: object) -> dict[str, Any]:
    status, answer = await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, version, **more))
    assert status == 200
    return answer["backends"]


async def roll_back(stage: Stage) -> dict[str, Any]:
    status, answer = await ask(stage, "POST", f"{POLICY}/rollback", {})
    assert status == 200
    return answer["backends"]


async def held(stage: Stage, *engines: FakeEngine) -> list[tuple[int, str]]:
    """The version that the gateway says of each engine, once all serve, and the checksum of what it holds."""
    await all_serve(stage, len(engines))
    return [(one["version"], engine.checksum) for one, engine in zip(await backends(stage), engines, strict=True)]


@pytest.mark.parametrize("canary", [None, 0.5])
async def test_rollback_engine_that_refused_pause_takes_old_version_before_calls(weights: list[Path], canary: float | None) -> None:
    first, second = engines(weights)
    async with several(first, second) as stage:
        await publish(stage, weights, 1)
        await publish(stage, weights, 2, canary=canary)
        missing = next(one for one in (second, first) if one.version == 2)
        missing.refuses = "/pause"
        statuses = await roll_back(stage)
        assert sorted(statuses.values()) == [
            f"down: the engine at http://127.0.0.1:{missing.port} is behind: it serves version 2, not 1",
            "serving",
        ]
        assert await held(stage, first, second) == [(1, checksum_directory(weights[1]))] * 2


async def test_rollback_engine_that_was_away_takes_old_version_before_calls(weights: list[Path]) -> None:
    first, second = engines(weights)
    async with several(second) as stage:
        running = first.running()
        url = await running.__aenter__()
        await ask(stage, "POST", "/admin/backends", {"url": url})
        await all_serve(stage, 2)
        await publish(stage, weights, 1)
        await publish(stage, weights, 2)
        await running.__aexit__(None, None, None)
        statuses = await roll_back(stage)
        assert (statuses["policy-0"], statuses["policy-1"].partition(":")[0]) == ("serving", "down")
        async with asyncio.timeout(30), first.running():
            assert await held(stage, second, first) == [(1, checksum_directory(weights[1]))] * 2


async def test_publish_older_version_missed_by_engine_is_still_applied(weights: list[Path]) -> None:
    first, second = engines(weights)
    async with several(first, second) as stage:
        await publish(stage, weights, 2)
        second.refuses = "/pause"
        await publish(stage, weights, 1, again=True)
        assert await held(stage, first, second) == [(1, checksum_directory(weights[1]))] * 2
        await publish(stage, weights, 2)
        assert await held(stage, first, second) == [(2, checksum_directory(weights[2]))] * 2
        await roll_back(stage)
        assert await held(stage, first, second) == [(1, checksum_directory(weights[1]))] * 2


async def test_engine_started_with_newer_version_keeps_it_after_rollback(weights: list[Path]) -> None:
    first, second = engines(weights)
    async with several(first, second) as stage:
        await publish(stage, weights, 1)
        await publish(stage, weights, 2)
        await roll_back(stage)
        second.version, second.checksum = 3, checksum_directory(weights[3])
        async with asyncio.timeout(30):
            while [one["version"] for one in await backends(stage)] != [1, 3]:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        assert await held(stage, first, second) == [(1, checksum_directory(weights[1])), (3, checksum_directory(weights[3]))]
