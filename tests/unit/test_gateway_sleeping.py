"""All engines of a policy that sleep while the trainer has their GPUs, and wake with the weights that are served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.pool import watch
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import (
    ASKED,
    GatedEngine,
    Stage,
    all_serve,
    ask,
    backends,
    following,
    models,
    release_of,
    several,
    staged,
    started,
)

POLICY = "/admin/policies/policy"
SLEEP = {"level": 2, "seconds": 60}
STEPS = ["/pause", "/reset_prefix_cache", "reload_weights", "/spangrad/checksum", "/update_weight_version", "/wake_up", "/resume", "probe"]


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0 and 1."""
    return models(tmp_path, 2)


async def until_status(stage: Stage, *statuses: str) -> None:
    async with asyncio.timeout(30):
        while [backend["status"] for backend in await backends(stage)] != list(statuses):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


async def call_unseen(engine: FakeEngine) -> dict[str, Any]:
    """Make a call by a gateway that the controller has lost: only the engine knows of it."""
    url = f"http://127.0.0.1:{engine.port}/v1/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json={**ASKED, "return_token_ids": True}) as answer:
        return await answer.json()


def sampled_by(answer: dict[str, Any]) -> tuple[int, int]:
    """The weights that sampled the first token of a gated engine's answer, and the version that the answer names."""
    return answer["choices"][0]["token_ids"][0], answer["spangrad"]["versions"][0][0][1]


async def test_policy_sleeps_after_the_calls_of_all_gateways_and_wakes(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage, following(stage) as follower:
        engines[0].go_on.clear()
        engines[1].go_on.clear()
        calls = [asyncio.create_task(follower.chat()) for _ in range(2)]
        await asyncio.gather(*(engine.arrived.wait() for engine in engines))
        sleeping = asyncio.create_task(ask(follower, "POST", f"{POLICY}/sleep", SLEEP))
        await asyncio.wait({sleeping}, timeout=0.2)
        assert [engine.orders.count("/sleep") for engine in engines] == [0, 0]
        for engine in engines:
            engine.go_on.set()
        assert [(await call)[0] for call in calls] == [200, 200]
        status, slept = await sleeping
        assert (status, slept["status"], [engine.orders[-1] for engine in engines]) == (200, "asleep", ["/sleep"] * 2)
        waiting = asyncio.create_task(follower.chat())
        assert (await ask(stage, "POST", f"{POLICY}/sleep", SLEEP))[0] == 200, "they sleep already"
        status, awake = await ask(stage, "POST", f"{POLICY}/wake_up")
        assert (status, awake["status"], (await waiting)[0]) == (200, "serving", 200)
        assert [engine.orders.count("/sleep") for engine in engines] == [1, 1]


async def test_publication_wakes_engines_and_their_other_memory_last(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        for version in (1, 1):
            await ask(stage, "POST", f"{POLICY}/sleep", SLEEP)
            for engine in engines:
                engine.orders.clear()
            assert (await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, version)))[0] == 200
            await all_serve(stage, 2)
            assert [engine.orders for engine in engines] == [["/wake_up", *STEPS]] * 2
        assert [(backend["version"], engine.sleeping) for backend, engine in zip(await backends(stage), engines, strict=True)] == [
            (1, set())
        ] * 2


async def test_publication_of_served_version_from_another_copy_is_no_step_to_roll_back_to(weights: list[Path]) -> None:
    (engine,) = started(weights, 1, GatedEngine)
    async with several(engine) as stage:
        assert (await ask(stage, "POST", f"{POLICY}/sleep", SLEEP))[0] == 200
        copy = weights[0].rename(weights[0].with_name("v10"))
        assert (await ask(stage, "POST", f"{POLICY}/versions", release_of([copy], 0)))[0] == 200
        assert "before" not in (await ask(stage, "GET", POLICY))[1]
        assert (await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, 1)))[0] == 200
        assert (await ask(stage, "GET", POLICY))[1]["before"] == 0
        assert (await ask(stage, "POST", f"{POLICY}/rollback", {}))[1]["version"] == 0
        assert (await ask(stage, "POST", f"{POLICY}/rollback", {}))[0] == 409


async def test_call_of_lost_follower_ends_before_sleep_or_waits_for_next_version(weights: list[Path]) -> None:
    (engine,) = started(weights, 1, GatedEngine)
    assert isinstance(engine, GatedEngine)
    async with staged(engine) as stage:
        await all_serve(stage, 1)
        engine.go_on.clear()
        unseen = asyncio.create_task(call_unseen(engine))
        async with asyncio.timeout(30):
            while not engine.answering:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        sleeping = asyncio.create_task(ask(stage, "POST", f"{POLICY}/sleep", SLEEP))
        async with asyncio.timeout(30):
            while not engine.closed:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        late = asyncio.create_task(call_unseen(engine))
        await asyncio.wait({late, sleeping}, timeout=0.1)
        assert not engine.sleeping
        engine.go_on.set()
        assert (sampled_by(await unseen), (await sleeping)[0], engine.while_sleeping) == ((0, 0), 200, 0)
        assert not late.done()
        assert (await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, 1)))[0] == 200
        assert sampled_by(await late) == (1, 1)


async def test_policy_without_engine_that_serves_cannot_sleep() -> None:
    async with staged(FakeEngine(warm=False)) as stage:
        status, answer = await ask(stage, "POST", f"{POLICY}/sleep", SLEEP)
        assert (status, "warming up" in answer["error"]["message"]) == (503, True)


async def test_engine_that_takes_adapters_keeps_their_base_when_it_sleeps(weights: list[Path]) -> None:
    (engine,) = started(weights, 1)
    engine.lora_rank = 4
    async with staged(engine) as stage:
        await all_serve(stage, 1)
        status, answer = await ask(stage, "POST", f"{POLICY}/sleep", SLEEP)
        assert (status, "would forget their base" in answer["error"]["message"]) == (409, True)
        assert (await ask(stage, "POST", f"{POLICY}/sleep", {**SLEEP, "level": 1}))[0] == 200


async def test_engines_wake_with_served_version_once_time_is_not_renewed(weights: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    engines = started(weights, 2)
    async with several(*engines) as stage:
        await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, 1))
        assert (await ask(stage, "POST", f"{POLICY}/sleep", {"level": 2, "seconds": 2}))[0] == 200
        waiting = asyncio.create_task(stage.chat())
        for seconds, pause in ((60, 2.2), (0.5, 0)):
            renewal = {"level": 2, "seconds": seconds, "renew": True}
            assert (await ask(stage, "POST", f"{POLICY}/sleep", renewal))[1]["status"] == "asleep"
            await asyncio.sleep(pause)
        await all_serve(stage, 2)
        assert (await waiting)[0] == 200
        assert {engine.version for engine in engines} == {1}
        status, renewed = await ask(stage, "POST", f"{POLICY}/sleep", {"level": 2, "seconds": 9, "renew": True})
        assert (status, renewed["status"]) == (200, "serving"), "a late request for more time sends nobody to sleep"


async def test_engine_that_sleeps_when_its_gateway_starts_is_woken(weights: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    (engine,) = started(weights, 1)
    engine.closed, engine.sleeping, engine.checksum = True, {"weights", "kv_cache"}, "float32:0000000000000000"
    async with staged(engine) as stage:
        await until_status(stage, "asleep")
        assert engine.orders == [], "nothing is read of its memory"
        assert (await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, 1)))[0] == 200
        assert (engine.orders[0], engine.version) == ("/wake_up", 1)
    engine.orders.clear()
    engine.version, engine.model = 0, str(weights[0])
    engine.closed, engine.sleeping, engine.checksum = True, {"weights", "kv_cache"}, "float32:0000000000000000"
    monkeypatch.setattr(watch, "FOUND_ASLEEP_SECONDS", 0.1)
    async with staged(engine) as stage:
        await all_serve(stage, 1)
        assert (engine.orders[0], (await backends(stage))[0]["version"]) == ("/wake_up", 0)
