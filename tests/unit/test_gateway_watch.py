"""An engine that the gateway cannot bring up is out, and the others serve on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.pool import watch
from gateway.weights.publication import Expected
from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, all_serve, ask, backends, models, release_of, several, staged, started

VERSIONS = "/admin/policies/policy/versions"


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0, 1, 2."""
    return models(tmp_path, 3)


async def second_is_down(stage: Stage) -> str:
    """The reason that the second of two engines is down for good; the first serves."""
    async with asyncio.timeout(30):
        while (listed := await backends(stage))[1]["status"] != "down" or "is not admitted" in listed[1]["reason"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert listed[0]["status"] == "serving"
    return listed[1]["reason"]


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


async def test_engine_restarted_within_a_failing_publication_is_admitted_again(weights: list[Path]) -> None:
    engines = started(weights, 2)
    engines[1].started = 1
    async with several(*engines) as stage:
        await all_serve(stage, 2)
        engines[1].refuses = "reload_weights"
        assert (await ask(stage, "POST", VERSIONS, release_of(weights, 1)))[0] == 200
        assert "failed at reload" in await second_is_down(stage)
        # What a restart does to vLLM; the gateway looks again when it is up.
        engines[1].started, engines[1].refuses, engines[1].paused = 2, "", False
        await all_serve(stage, 2)
        assert [engine.version for engine in engines] == [1, 1]
        assert engines[1].checksum == checksum_directory(weights[1])


async def test_admission_during_a_publication_ends_with_the_published_version(weights: list[Path]) -> None:
    first, second = (*started(weights, 1), *started(weights, 1))
    limited = [{"url": f"http://127.0.0.1:{first.port}", "limit": 1}]
    async with staged(first, backends=limited) as stage, second.running() as url:
        await stage.readiness("serving")
        assert (await ask(stage, "POST", VERSIONS, release_of(weights, 1)))[0] == 200
        first.reloading.clear()
        for engine in (first, second):
            engine.hold_reload.clear()
        publishing = asyncio.create_task(ask(stage, "POST", VERSIONS, release_of(weights, 2)))
        await first.reloading.wait()
        await ask(stage, "POST", "/admin/backends", {"url": url})
        await second.reloading.wait()  # of version 1, which is served so far
        first.hold_reload.set()
        assert (await publishing)[0] == 200
        first.go_on.clear()
        calls = [asyncio.create_task(stage.chat()) for _ in range(2)]
        async with asyncio.timeout(30):
            while not (await ask(stage, "GET", "/admin/policies/policy"))[1].get("waiting"):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        second.hold_reload.set()
        await all_serve(stage, 2)
        first.go_on.set()
        assert [(await call)[0] for call in calls] == [200, 200]
        assert [span.attributes["spangrad.policy.versions"] for span in await stage.spans(2)] == ["[[[0,2]]]"] * 2
        assert [engine.checksum for engine in (first, second)] == [checksum_directory(weights[2])] * 2


async def test_admission_while_published_files_are_read_ends_with_that_version(
    weights: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway was restarted, and knows no files of what the first engine serves."""
    first = FakeEngine(version=1, checksum=checksum_directory(weights[1]))
    (second,) = started(weights, 1)
    read = Expected.by

    async def slowly(expected: Expected, backend: Any) -> Any:
        if backend.url.endswith(str(first.port)):
            await ask(stage, "POST", "/admin/backends", {"url": f"http://127.0.0.1:{second.port}"})
            await all_serve(stage, 2)
        return await read(expected, backend)

    async with staged(first) as stage, second.running():
        await stage.readiness("serving")
        monkeypatch.setattr(Expected, "by", slowly)
        status, answer = await ask(stage, "POST", VERSIONS, release_of(weights, 1))
        assert (status, answer["backends"]["policy-1"].partition(":")[0]) == (200, "down")
        await all_serve(stage, 2)
        assert second.checksum == checksum_directory(weights[1])


async def test_admission_of_restarted_engine_that_is_refused_logs_once(
    weights: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    engines = started(weights, 2)
    engines[1].started = 1
    async with several(*engines) as stage:
        await all_serve(stage, 2)
        engines[1].topology, engines[1].shared_state, engines[1].started = {"api_servers": 2, "data": 2}, False, 2
        assert "runs 2 API servers that share no state" in await second_is_down(stage)
        await asyncio.sleep(10 * watch.POLL_SECONDS)
        assert len([record for record in caplog.records if "share no state" in record.getMessage()]) == 1


async def test_admission_of_engine_whose_api_servers_share_no_state_refuses() -> None:
    """The second one would not know of a pause, which the first one was told of."""
    engines = [FakeEngine(), FakeEngine()]
    async with several(*engines) as stage:
        # What a restart of it by hand does.
        engines[1].topology, engines[1].shared_state, engines[1].version = {"api_servers": 2, "data": 2}, False, 3
        assert "runs 2 API servers that share no state" in await second_is_down(stage)
        assert (await stage.chat())[0] == 200
        assert not engines[1].requests


async def test_admission_of_engine_with_several_workers_and_replicas_shows_topology() -> None:
    engine = FakeEngine(topology={"tensor": 2, "data": 2, "api_servers": 2})
    engine.reports = [[engine.report("all")] * 2] * 2
    async with staged(engine) as stage:
        await stage.readiness("serving")
        (shown,) = await backends(stage)
        assert shown["topology"] == {"tensor": 2, "pipeline": 1, "data": 2, "api_servers": 2}
        assert engine.probed == ["0", "1"], "each replica has answered a probe"


async def test_admission_of_engine_whose_replicas_differ_refuses() -> None:
    engine = FakeEngine(topology={"data": 2})
    stale = FakeEngine(checksum="float32:0000000000000001")
    engine.reports = [[engine.report("all")], [stale.report("all")]]
    async with staged(engine) as stage:
        await stage.readiness("data-parallel replica 1 holds other weights than replica 0: it holds other values of w")
        assert (await stage.chat())[0] == 503


async def test_admission_of_quantised_engine_names_uncompared_tensors(weights: list[Path]) -> None:
    engine = FakeEngine(model=str(weights[0]), checksum=checksum_directory(weights[0]), unread={"w": "vLLM holds it as float8_e4m3fn"})
    async with staged(engine) as stage:
        await stage.readiness("serving")
        (shown,) = await backends(stage)
        assert shown["uncompared"] == "1 of 1 tensors are not compared, such as w: vLLM holds it as float8_e4m3fn"


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
