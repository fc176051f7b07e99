"""New weights for several fake engines: together, one after the other, into one first, and back; sleep, and restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from spangrad import semconv
from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, all_serve, ask, backends, models, release_of, several, staged, started
from tests.support.otlp import SunkSpan

POLICY = "/admin/policies/policy"
STEPS = ["/pause", "/reset_prefix_cache", "reload_weights", "/spangrad/checksum", "/update_weight_version", "/resume", "probe"]


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0, 1, 2."""
    return models(tmp_path, 3)


def version_of(span: SunkSpan) -> int:
    """The policy version that sampled all tokens of a call of one choice."""
    (((start, version),),) = json.loads(str(span.attributes[semconv.POLICY_VERSIONS]))
    assert start == 0
    return version


async def publish(stage: Stage, weights: list[Path], version: int, **more: object) -> tuple[int, Any]:
    status, answer = await ask(stage, "POST", f"{POLICY}/versions", release_of(weights, version, **more))
    answer.pop("seconds", None)
    if "stages" in answer:
        answer["stages"] = sorted(answer["stages"])
    return status, answer


async def versions(stage: Stage) -> list[int]:
    return [one["version"] for one in await backends(stage)]


async def wait_for(stage: Stage, status: str) -> None:
    """Wait until some backend is so."""
    async with asyncio.timeout(30):
        while status not in [one["status"] for one in await backends(stage)]:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def test_publish_older_version_is_refused_unless_rollback(weights: list[Path]) -> None:
    async with several(*started(weights, 2)) as stage:
        assert (await publish(stage, weights, 2))[0] == 200
        status, answer = await publish(stage, weights, 1)
        assert (status, answer["error"]["message"]) == (409, "version 1 is not newer than version 2, which is served.")
        assert (await publish(stage, weights, 1, again=True))[0] == 200
        assert await versions(stage) == [1, 1]
        body = {"version": 1, "path": str(weights[0]), "checksum": checksum_directory(weights[0]), "again": True}
        status, answer = await ask(stage, "POST", f"{POLICY}/versions", body)
        assert (status, answer["error"]["message"]) == (409, "version 1 is not newer than version 1, which is served.")
        assert (await publish(stage, weights, 2))[0] == 200
        assert await versions(stage) == [2, 2]


async def test_publish_without_a_checksum_compares_engines_with_the_files(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        status, answer = await ask(stage, "POST", f"{POLICY}/versions", {"version": 1, "path": str(weights[1])})
        assert (status, answer["checksum"], await versions(stage)) == (200, "", [1, 1])
        assert [one["checksum"] for one in await backends(stage)] == [checksum_directory(weights[1])] * 2
        status, answer = await ask(stage, "POST", f"{POLICY}/versions", {"version": 2, "path": "/nowhere"})
        assert (status, answer["error"]["message"]) == (409, "there is no directory '/nowhere' on the gateway's machine.")


async def test_publish_of_version_that_engines_hold_is_given_to_engines_that_restart(weights: list[Path]) -> None:
    """The gateway was restarted: of the version that it finds it knows no files before the publication."""
    engines = [FakeEngine(version=1, checksum=checksum_directory(weights[1])) for _ in range(2)]
    async with several(*engines) as stage:
        assert (await publish(stage, weights, 1))[0] == 200
        engines[1].version, engines[1].checksum, engines[1].model = 0, checksum_directory(weights[0]), str(weights[0])
        async with asyncio.timeout(30):
            while "reload_weights" not in engines[1].orders:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        await all_serve(stage, 2)
        assert await versions(stage) == [1, 1]


async def test_publish_all_at_once_reloads_every_engine_and_calls_wait_for_first(weights: list[Path]) -> None:
    engines = started(weights, 3)
    async with several(*engines) as stage:
        for engine in engines:
            engine.orders.clear()
            engine.hold_reload.clear()
        publishing = asyncio.create_task(publish(stage, weights, 1))
        await asyncio.gather(*(engine.reloading.wait() for engine in engines))
        calls = [asyncio.create_task(stage.chat(f"/rollout/r{number}/attempt/0")) for number in range(6)]
        async with asyncio.timeout(30):
            while (await ask(stage, "GET", POLICY))[1].get("waiting") != len(calls):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert [engine.orders for engine in engines] == [STEPS[:3]] * 3
        for engine in engines:
            engine.hold_reload.set()
        assert await publishing == (
            200,
            {
                "policy": "policy",
                "version": 1,
                "checksum": checksum_directory(weights[1]),
                "backends": {f"policy-{number}": "serving" for number in range(3)},
                "stages": [f"policy-{number}" for number in range(3)],
            },
        )
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 6
        assert [engine.orders[:7] for engine in engines] == [STEPS] * 3
        assert max(len(engine.requests) for engine in engines) <= 3
        assert {version_of(span) for span in await stage.spans(6)} == {1}


async def test_publish_rolling_closes_one_engine_at_a_time(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        for engine in engines:
            engine.orders.clear()
            engine.hold_reload.clear()
        publishing = asyncio.create_task(publish(stage, weights, 1, order="rolling"))
        for number, engine in enumerate(engines):
            await engine.reloading.wait()
            assert [one["status"] for one in await backends(stage)] == ["publishing" if n == number else "serving" for n in range(2)]
            assert (await stage.chat(f"/rollout/r{number}/attempt/0"))[0] == 200
            engine.hold_reload.set()
        assert (await publishing)[0] == 200
        assert [version_of(span) for span in await stage.spans(2)] == [0, 1]
        assert [len(engine.requests) for engine in engines] == [1, 1]


async def test_publish_rolling_fails_with_first_engine_and_takes_out_later_failing_engine(weights: list[Path]) -> None:
    engines = started(weights, 3)
    async with several(*engines) as stage:
        engines[0].refuses = "reload_weights"
        status, answer = await publish(stage, weights, 1, order="rolling")
        assert (status, "publication of version 1 failed at reload" in answer["error"]["message"]) == (502, True)
        assert [(one["status"], one["version"]) for one in await backends(stage)] == [("down", 0), ("serving", 0), ("serving", 0)]

        engines[0].refuses, engines[1].refuses = "", "/spangrad/checksum"
        status, answer = await publish(stage, weights, 1, order="rolling")
        statuses = answer["backends"]
        assert (status, statuses["policy-0"], statuses["policy-2"]) == (200, "serving", "serving")
        assert statuses["policy-1"].startswith("down: publication of version 1 failed at checksum")
        for _ in range(4):
            assert (await stage.chat())[0] == 200
        assert [len(engine.requests) for engine in engines] == [2, 0, 2]
        # The same publication mends what is out, and leaves the others alone.
        engines[1].refuses = ""
        engines[0].orders.clear()
        assert (await publish(stage, weights, 1))[0] == 200
        assert await versions(stage) == [1, 1, 1]
        assert engines[0].orders == []


@pytest.mark.parametrize("order", ["all_at_once", "rolling"])
async def test_publish_leaves_out_engine_that_is_away(weights: list[Path], order: str) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        await stage.engine_stops()
        await wait_for(stage, "down")
        for version in (1, 1, 2):  # twice: a trainer publishes its head again when it starts
            status, answer = await publish(stage, weights, version, order=order)
            assert (status, answer["backends"]["policy-1"]) == (200, "serving")
            assert "does not answer" in answer["backends"]["policy-0"]
        async with engines[0].running():
            await all_serve(stage, 2)
            assert [engine.checksum for engine in engines] == [checksum_directory(weights[2])] * 2


async def test_publish_while_no_engine_can_be_reached_is_refused_for_now(weights: list[Path]) -> None:
    async with several(*started(weights, 1)) as stage:
        await stage.engine_stops()
        await wait_for(stage, "down")
        status, answer = await publish(stage, weights, 1)
        assert (status, "Publish again once /readyz answers 200." in answer["error"]["message"]) == (503, True)


async def test_publish_again_beside_broken_engine_succeeds(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        engines[0].wrong_after_reload = True
        for _ in range(2):
            status, answer = await publish(stage, weights, 1)
            assert (status, answer["backends"]["policy-1"]) == (200, "serving")
            assert "does not hold the version's weights" in answer["backends"]["policy-0"]


async def test_promote_canary_that_is_away_is_refused(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        assert (await publish(stage, weights, 1, canary=0.5))[0] == 200
        assert [engine.version for engine in engines] == [1, 0]
        await stage.engine_stops()
        await wait_for(stage, "down")
        status, answer = await ask(stage, "POST", f"{POLICY}/promote")
        assert (status, "the canary does not serve version 1" in answer["error"]["message"]) == (409, True)


async def test_engine_behind_served_version_gets_no_calls_until_published(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        engines[1].refuses = "/pause"
        status, answer = await publish(stage, weights, 1)
        assert (status, answer["backends"]["policy-0"]) == (200, "serving")
        assert answer["backends"]["policy-1"].startswith("down: the engine at")
        for _ in range(3):
            await stage.chat()
        engines[1].refuses = ""
        # Whoever watches it puts the new version into it, or this does.
        await publish(stage, weights, 1)
        await all_serve(stage, 2)
        assert await versions(stage) == [1, 1]
        assert {version_of(span) for span in await stage.spans(3)} == {1}


async def test_restarted_engine_gets_served_version_before_calls(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        await publish(stage, weights, 2)
        await stage.engine_stops()
        await wait_for(stage, "down")
        (again,) = started(weights, 1)
        again.port = engines[0].port
        async with again.running():
            await all_serve(stage, 2)
            assert again.orders == ["/spangrad/checksum", *STEPS]
            assert (await versions(stage), again.checksum) == ([2, 2], checksum_directory(weights[2]))


async def test_publish_with_drain_waits_for_calls_in_flight(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        stage.engine.orders.clear()
        stage.engine.go_on.clear()
        in_flight = asyncio.create_task(stage.chat())
        await stage.engine.arrived.wait()
        publishing = asyncio.create_task(publish(stage, weights, 1, in_flight="drain"))
        await wait_for(stage, "publishing")
        assert stage.engine.orders == ["chat"]
        stage.engine.go_on.set()
        assert (await in_flight)[0] == 200
        assert (await publishing)[0] == 200
        assert stage.engine.orders == ["chat", *STEPS]


async def test_canary_serves_its_share_until_promoted(weights: list[Path]) -> None:
    engines = started(weights, 3)
    async with several(*engines) as stage:
        assert (await publish(stage, weights, 1, canary=0.3))[0] == 200
        assert sorted(await versions(stage)) == [0, 0, 1]
        _, state = await ask(stage, "GET", POLICY)
        canary = state.pop("canary")
        assert state.items() >= {"policy": "policy", "version": 0, "tokenizer_hash": "cafe", "status": "serving"}.items()
        assert (canary["version"], canary["share"]) == (1, 0.3)
        status, refused = await publish(stage, weights, 2)
        assert (status, "version 1 is out as a canary" in refused["error"]["message"]) == (503, True)
        for number in range(40):
            await stage.chat(f"/rollout/r{number}/attempt/0")
        starts = [version_of(span) for span in await stage.spans(40)]
        assert 4 <= starts.count(1) <= 20
        status, promoted = await ask(stage, "POST", f"{POLICY}/promote", {"order": "rolling"})
        assert (status, promoted["version"], await versions(stage)) == (200, 1, [1, 1, 1])
        assert (await ask(stage, "POST", f"{POLICY}/promote"))[0] == 409
        _, state = await ask(stage, "GET", POLICY)
        facts = {"policy": "policy", "version": 1, "tokenizer_hash": "cafe", "status": "serving", "before": 0}
        assert state.items() >= facts.items()
        assert "canary" not in state


async def test_canary_publication_keeps_waiting_calls_of_other_rollouts_at_old_version(weights: list[Path]) -> None:
    first, second = started(weights, 2)
    limited = [{"url": f"http://127.0.0.1:{engine.port}", "limit": 1} for engine in (first, second)]
    async with second.running(), staged(first, backends=limited) as stage:
        await all_serve(stage, 2)
        first.hold_reload.clear()
        publishing = asyncio.create_task(publish(stage, weights, 1, canary=1e-9))
        await first.reloading.wait()
        second.go_on.clear()
        calls = [asyncio.create_task(stage.chat(f"/rollout/r{number}/attempt/0")) for number in range(3)]
        await second.arrived.wait()
        first.hold_reload.set()
        assert (await publishing)[0] == 200
        second.go_on.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
        assert [version_of(span) for span in await stage.spans(3)] == [0] * 3


async def test_canary_that_fails_cannot_be_promoted(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        engines[0].refuses = "reload_weights"
        assert (await publish(stage, weights, 1, canary=0.5))[0] == 502
        assert (await ask(stage, "POST", f"{POLICY}/promote"))[0] == 409
        assert (await stage.chat())[0] == 200


async def test_rollback_of_canary_restores_old_weights_and_refuses_its_republication(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        await publish(stage, weights, 1, canary=0.5)
        status, back = await ask(stage, "POST", f"{POLICY}/rollback")
        assert (status, back["version"], await versions(stage)) == (200, 0, [0, 0])
        assert {engine.checksum for engine in engines} == {checksum_directory(weights[0])}
        status, refused = await publish(stage, weights, 1)
        assert (status, "version 1 was rolled back. Publish a newer one" in refused["error"]["message"]) == (409, True)
        assert (await publish(stage, weights, 1, again=True))[0] == 200
        assert await versions(stage) == [1, 1]


async def test_canary_with_invalid_share_or_one_engine_is_refused(weights: list[Path]) -> None:
    async with several(*started(weights, 2)) as stage:
        for share in (0, 1, -0.5):
            status, answer = await publish(stage, weights, 1, canary=share)
            assert (status, "lies between 0 and 1" in answer["error"]["message"]) == (409, True)
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        status, answer = await publish(stage, weights, 1, canary=0.5)
        assert (status, "a canary needs two engines that serve" in answer["error"]["message"]) == (409, True)


async def test_rollback_serves_previous_version_and_then_the_one_before(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        await publish(stage, weights, 1)
        await publish(stage, weights, 2)
        for version in (1, 0):
            status, back = await ask(stage, "POST", f"{POLICY}/rollback")
            assert (status, back["version"], back["checksum"]) == (200, version, checksum_directory(weights[version]))
            assert await versions(stage) == [version] * 2
        status, answer = await ask(stage, "POST", f"{POLICY}/rollback")
        assert (status, "no version is known that policy 'policy' served before" in answer["error"]["message"]) == (409, True)
        await stage.chat()
        (span,) = await stage.spans()
        assert version_of(span) == 0


async def test_rollback_after_failed_publication_restores_engines(weights: list[Path]) -> None:
    engines = started(weights, 2)
    async with several(*engines) as stage:
        for engine in engines:
            engine.wrong_after_reload = True
        assert (await publish(stage, weights, 1))[0] == 502
        assert [one["status"] for one in await backends(stage)] == ["down", "down"]
        assert (await stage.chat())[0] == 503
        for engine in engines:
            engine.wrong_after_reload = False
        status, back = await ask(stage, "POST", f"{POLICY}/rollback", {})
        assert (status, back["version"], await versions(stage)) == (200, 0, [0, 0])
        assert (await stage.chat())[0] == 200


async def test_rollback_to_missing_weights_changes_nothing(weights: list[Path]) -> None:
    engines = started(weights, 1)
    async with staged(*engines) as stage:
        await stage.readiness("serving")
        await publish(stage, weights, 1)
        (weights[0] / "model.safetensors").unlink()
        engines[0].orders.clear()
        status, answer = await ask(stage, "POST", f"{POLICY}/rollback")
        assert (status, "holds no *.safetensors" in answer["error"]["message"]) == (409, True)
        assert (engines[0].orders, await versions(stage)) == ([], [1])


async def test_sleep_waits_for_calls_and_wake_up_checks_weights(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        stage.engine.go_on.clear()
        in_flight = asyncio.create_task(stage.chat())
        await stage.engine.arrived.wait()
        stage.engine.orders.clear()
        sleeping = asyncio.create_task(ask(stage, "POST", "/admin/backends/policy-0/sleep", {"level": 1}))
        await wait_for(stage, "asleep")
        assert stage.engine.orders == []
        stage.engine.go_on.set()
        assert (await in_flight)[0] == 200
        status, slept = await sleeping
        assert (status, slept["status"], stage.engine.orders) == (200, "asleep", ["/sleep"])
        call = asyncio.create_task(stage.chat())
        await asyncio.wait({call}, timeout=0.1)
        assert (await ask(stage, "POST", "/admin/backends/policy-0/sleep"))[0] == 409
        assert (await ask(stage, "POST", "/admin/backends/policy-0/sleep", {"level": 3}))[0] == 400
        assert stage.engine.orders == ["/sleep"]
        status, awake = await ask(stage, "POST", "/admin/backends/policy-0/wake_up")
        assert (status, awake["status"]) == (200, "serving")
        assert (await call)[0] == 200
        assert stage.engine.orders == ["/sleep", "/wake_up", "/spangrad/checksum", "/wake_up", "/resume", "probe", "chat"]


async def test_wake_up_of_engine_without_weights_loads_them(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        await ask(stage, "POST", "/admin/backends/policy-0/sleep", {"level": 2})
        stage.engine.orders.clear()
        assert (await ask(stage, "POST", "/admin/backends/policy-0/wake_up"))[0] == 200
        assert stage.engine.orders == ["/wake_up", "/spangrad/checksum", "/wake_up", *STEPS[:-2], "/wake_up", *STEPS[-2:]]
        assert stage.engine.checksum == checksum_directory(weights[0])


async def test_publish_wakes_sleeping_engine(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        await ask(stage, "POST", "/admin/backends/policy-0/sleep")
        stage.engine.orders.clear()
        assert (await publish(stage, weights, 1))[0] == 200
        assert stage.engine.orders == ["/wake_up", *STEPS[:-2], "/wake_up", *STEPS[-2:]]


async def test_wake_up_that_fails_takes_engine_out_with_reason(weights: list[Path]) -> None:
    async with staged(started(weights, 1)[0]) as stage:
        await stage.readiness("serving")
        await ask(stage, "POST", "/admin/backends/policy-0/sleep")
        stage.engine.refuses = "/wake_up"
        status, answer = await ask(stage, "POST", "/admin/backends/policy-0/wake_up")
        assert (status, "it could not be woken: " in answer["error"]["message"]) == (502, True)
        assert (await stage.chat())[0] == 503
