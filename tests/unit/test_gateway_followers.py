"""Gateways that follow another one: its backends, its publications and its pauses reach them, and their calls are waited for."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway.followers import controller
from gateway.followers.followed_pool import FollowedEngine, FollowedPool
from gateway.followers.messages import BackendView, ControllerUpdate, FollowerReport, PolicyView, PoolView
from gateway.pool.registry import RegisteredBackend
from gateway.pool.upstream import BackendStatus
from gateway.proxy.auth import STATE_PATH
from spangrad import semconv
from spangrad.http.announcements import ClosedAttempt
from spangrad.processes import free_ports
from tests.support.fake_engine import FakeEngine, uint32s
from tests.support.gateways import GatedEngine, Stage, ask, backends, following, models, release_of, several, staged, started
from tests.support.otlp import SunkSpan

VERSIONS = "/admin/policies/policy/versions"


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    """Model directories of versions 0 and 1."""
    return models(tmp_path, 2)


def label_and_weights(span: SunkSpan) -> tuple[int, int]:
    """The version that a span names, and the number of the weights that sampled its first token."""
    (((_, version),),) = json.loads(str(span.attributes[semconv.POLICY_VERSIONS]))
    ids = span.attributes[semconv.OUTPUT_TOKEN_IDS]
    assert isinstance(ids, bytes)
    return version, uint32s(ids)[0]


async def until_loaded(stage: Stage, calls: int) -> None:
    """Wait until the first backend has so many calls in flight, of all gateways."""
    async with asyncio.timeout(30):
        while (await backends(stage))[0]["in_flight"] != calls:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def until_confirmed(stage: Stage, status: str) -> None:
    """Wait until the first backend has a status, on which all followers act."""
    async with asyncio.timeout(30):
        while (await backends(stage))[0]["status"] != status or not all(  # noqa: ASYNC110 - there is no event
            follower["confirmed"] for follower in (await ask(stage, "GET", "/admin/followers"))[1]["followers"]
        ):
            await asyncio.sleep(0.01)


async def test_follower_answers_and_records_calls_of_the_controllers_backends() -> None:
    async with staged() as stage, following(stage) as follower:
        assert (await follower.chat("/rollout/r/attempt/0"))[0] == 200
        (span,) = await stage.spans()
        assert span.attributes[semconv.ROLLOUT_ID] == "r"
        assert len(stage.engine.requests) == 1
        assert await ask(follower, "GET", "/healthz") == (200, {"status": "up"})
        status, listed = await ask(stage, "GET", "/admin/followers")
        assert (status, [(each["confirmed"], each["in_flight"]) for each in listed["followers"]]) == (200, [(True, 0)])


async def test_follower_learns_of_backends_that_join_and_leave() -> None:
    joined = FakeEngine(policy="other")
    async with staged() as stage, following(stage) as follower, joined.running() as url:
        assert (await ask(follower, "POST", "/admin/backends", {"url": url, "policy": "other"}))[0] == 201
        await follower.readiness("serving")
        async with asyncio.timeout(30):
            while (await follower.chat(model="other"))[0] != 200:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        assert len(joined.requests) == 1
        assert (await ask(follower, "DELETE", "/admin/backends/other-0"))[0] == 200
        async with asyncio.timeout(30):
            while (answer := await follower.chat(model="other"))[0] != 503:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        assert (b"other" in answer[1], len(joined.requests)) == (True, 1)


async def test_publication_through_follower_reaches_calls_of_both_gateways(weights: list[Path]) -> None:
    async with several(*started(weights, 2, GatedEngine)) as stage, following(stage) as follower:
        assert (await ask(follower, "POST", VERSIONS, release_of(weights, 1)))[0] == 200
        assert [(await gateway.chat())[0] for gateway in (stage, follower) for _ in range(2)] == [200] * 4
        assert {label_and_weights(span) for span in await stage.spans(4)} == {(1, 1)}


async def test_publication_with_drain_waits_for_a_followers_call(weights: list[Path]) -> None:
    (engine,) = started(weights, 1, GatedEngine)
    async with several(engine) as stage, following(stage) as follower:
        engine.go_on.clear()
        calls = [asyncio.create_task(follower.chat()) for _ in range(2)]
        await until_loaded(stage, 2)
        publishing = asyncio.create_task(ask(stage, "POST", VERSIONS, release_of(weights, 1, in_flight="drain")))
        await until_confirmed(stage, "publishing")
        late = asyncio.create_task(follower.chat())
        await asyncio.sleep(0.2)
        assert (engine.orders.count("/pause"), engine.answering) == (0, 2), "the late call waits at its gateway"
        engine.go_on.set()
        assert (await publishing)[0] == 200
        assert [(await call)[0] for call in (*calls, late)] == [200] * 3
        assert engine.while_loading == 0
        assert sorted(label_and_weights(span) for span in await stage.spans(3)) == [(0, 0), (0, 0), (1, 1)]


async def test_follower_that_confirms_nothing_is_disconnected_and_not_waited_for(
    weights: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "CONFIRM_SECONDS", 0.2)
    async with several(*started(weights, 1)) as stage:
        async with stage.client.ws_connect("/admin/followers/state", params={"url": "http://silent"}) as silent:
            await silent.receive()
            assert (await ask(stage, "POST", VERSIONS, release_of(weights, 1, in_flight="drain")))[0] == 200
            assert await ask(stage, "GET", "/admin/followers") == (200, {"followers": []})
        async with stage.client.get("/metrics") as scraped:
            assert "spangrad_gateway_followers_dropped_total 1.0" in await scraped.text()


@asynccontextmanager
async def call_in_pause(weights: list[Path]) -> AsyncGenerator[tuple[Stage, FakeEngine, asyncio.Task[Any]]]:
    """A call of a follower that an engine has refused, paused as it was before; gives the controller, the engine and the call."""
    (engine,) = started(weights, 1, GatedEngine)
    is_refused, refused_call = asyncio.Event(), FollowedEngine.refused_call

    def note(backend: FollowedEngine) -> bool:
        is_refused.set()
        return refused_call(backend)

    async with several(engine) as stage, following(stage) as follower:
        engine.paused, engine.pause_modes = True, ["abort"]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FollowedEngine, "refused_call", note)
            call = asyncio.create_task(follower.chat())
            await asyncio.wait_for(is_refused.wait(), 30)
        yield stage, engine, call


async def test_call_of_follower_waits_where_the_engine_is_paused_already(weights: list[Path]) -> None:
    async with call_in_pause(weights) as (stage, engine, call):
        await asyncio.sleep(0.3)
        assert not call.done()
        engine.paused = False
        assert (await call)[0] == 200
        assert [span.attributes.get(semconv.ERROR_TYPE) for span in await stage.spans()] == [None]


async def test_call_whose_client_leaves_in_a_pause_is_recorded_without_a_status(weights: list[Path]) -> None:
    async with call_in_pause(weights) as (stage, _, call):
        call.cancel()
        (span,) = await stage.spans()
        assert (span.attributes[semconv.ABORTED], span.attributes.get(semconv.HTTP_STATUS)) == (True, None)


async def test_load_of_other_gateways_counts_towards_limit_and_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = list[list[int]](), FollowedPool.take_elsewhere

    def note(pool: FollowedPool, calls: dict[int, int]) -> None:
        take(pool, calls)
        taken.append(list(calls.values()))

    monkeypatch.setattr(FollowedPool, "take_elsewhere", note)
    engines = [FakeEngine(), FakeEngine()]
    limited = [{"url": f"http://127.0.0.1:{engine.port}", "limit": 2} for engine in engines]
    async with several(*engines, backends=limited[1:]) as stage, following(stage) as follower:
        for engine in engines:
            engine.go_on.clear()
        first = [asyncio.create_task(stage.chat()) for _ in range(4)]
        await until_loaded(stage, 2)
        async with asyncio.timeout(30):
            while taken[-1:] != [[2, 2]]:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        second = [asyncio.create_task(follower.chat()) for _ in range(4)]
        async with asyncio.timeout(30):
            while sum(len(engine.requests) for engine in engines) < 8:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        await until_loaded(stage, 6)
        assert [len(engine.requests) for engine in engines] == [6, 2], "the second has a limit, the controller's calls fill it"
        assert [each["in_flight"] for each in await backends(stage)] == [6, 2]
        for engine in engines:
            engine.go_on.set()
        assert [(await call)[0] for call in (*first, *second)] == [200] * 8


async def test_state_is_open_to_gateway_token_alone() -> None:
    clients = [{"name": "operator", "token": "theirs", "may_admin": True}]
    async with staged(token="ours", clients=clients) as stage:
        for token, expected in (("theirs", 403), ("wrong", 401)):
            async with stage.client.get("/admin/followers/state", headers={"Authorization": f"Bearer {token}"}) as answer:
                assert answer.status == expected
        async with following(stage, token="ours") as follower:
            assert (await follower.chat())[0] == 200
            assert (await ask(follower, "GET", "/admin/followers/state"))[0] == 409
            async with follower.client.get("/admin/backends", headers={"Authorization": "Bearer theirs"}) as answer:
                assert answer.status == 401, "a follower has clients of its own"


async def test_follower_serves_on_without_its_controller_and_is_degraded() -> None:
    engine = FakeEngine()
    async with engine.running() as url:
        other = FakeEngine()
        async with staged(other, backends=[{"url": url}], engine_url="") as stage:
            following_stage = following(stage)
            follower = await following_stage.__aenter__()
        try:
            async with asyncio.timeout(30):
                while (await ask(follower, "GET", "/healthz"))[1]["status"] != "degraded":  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.02)
            assert (await follower.chat())[0] == 200
            assert (await ask(follower, "GET", "/readyz"))[0] == 200
            status, answer = await ask(follower, "POST", VERSIONS, {})
            assert (status, "gateway.controller" in answer["error"]["message"]) == (503, True)
            async with follower.client.get("/metrics") as scraped:
                assert "spangrad_gateway_controller_up 0.0" in await scraped.text()
        finally:
            await following_stage.__aexit__(None, None, None)


async def test_follower_of_a_controller_that_hangs_refuses_administration() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with staged(controller=f"http://127.0.0.1:{silent.getsockname()[1]}") as follower, asyncio.timeout(20):
            status, answer = await ask(follower, "GET", "/admin/policies")
            assert (status, "gateway.controller" in answer["error"]["message"]) == (503, True)


async def test_engine_that_refuses_a_followers_connection_is_left_alone_for_a_while() -> None:
    up = FakeEngine()
    async with several(FakeEngine(), up) as stage, following(stage) as follower:
        await stage.engine_stops()
        assert [(await follower.chat())[0] for _ in range(4)] == [200] * 4
        assert len(up.requests) == 4


async def test_follower_that_connects_refuses_calls_of_attempts_closed_before() -> None:
    async with staged() as stage:
        closed = {"attempts": [{"rollout_id": "r", "attempt": 0, "reason": "cancelled"}]}
        assert (await ask(stage, "POST", "/attempts/close", closed))[0] == 200
        async with following(stage) as follower:
            assert [(await follower.chat(f"/rollout/r/attempt/{number}"))[0] for number in range(2)] == [410, 200]


async def until_closed(stage: Stage, path: str) -> None:
    """Wait until the gateway knows that an attempt was cancelled."""
    async with asyncio.timeout(30):
        while await stage.ends(path) != "cancelled":  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


async def test_controller_after_its_restart_learns_of_attempts_closed_at_followers() -> None:
    (port,) = free_ports(1)
    async with staged() as store_keeper:
        async with staged(port=port) as stage:
            following_stage = following(replace(stage, store=store_keeper.store))
            follower = await following_stage.__aenter__()
            closed = {"attempts": [{"rollout_id": "r", "attempt": 0, "reason": "cancelled"}]}
            assert (await ask(follower, "POST", "/attempts/close", closed))[0] == 200
            await until_closed(stage, "/rollout/r/attempt/0")
        try:
            async with staged(port=port) as stage:
                await until_closed(stage, "/rollout/r/attempt/0")
        finally:
            await following_stage.__aexit__(None, None, None)


async def test_report_of_attempts_closed_may_have_more_than_4_mib() -> None:
    names = [f"{number:0512}" for number in range(9_000)]
    closed = {"attempts": [{"rollout_id": name, "attempt": 0, "reason": "cancelled"} for name in names]}
    async with staged() as stage, following(stage) as follower:
        assert (await ask(follower, "POST", "/attempts/close", closed))[0] == 200
        await until_closed(stage, f"/rollout/{names[-1]}/attempt/0")


async def test_followers_are_sent_new_ends_of_attempts_alone() -> None:
    attempts = [ClosedAttempt(rollout_id="r", attempt=number, reason="cancelled") for number in range(2)]
    async with staged() as stage, following(stage) as follower, stage.client.ws_connect("/admin/followers/state") as other:
        for closed in (attempts[:1], attempts):
            body = {"attempts": [msgspec.to_builtins(attempt) for attempt in closed]}
            assert (await ask(follower, "POST", "/attempts/close", body))[0] == 200
            await until_closed(stage, f"/rollout/r/attempt/{closed[-1].attempt}")
        received: list[ClosedAttempt] = []
        while len(received) < 2:
            received += msgspec.msgpack.decode(await other.receive_bytes(timeout=10), type=ControllerUpdate).closed
        assert received == attempts


async def test_frozen_upstreams_and_their_keys_reach_a_follower() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization", ""))
        return web.json_response(FakeEngine().whole({"model": "m"}))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    judge = {"url": f"http://127.0.0.1:{port}/v1", "policy": "judge", "kind": "openai", "key": "sk-judge"}
    try:
        async with staged(backends=[judge]) as stage, following(stage) as follower:
            assert (await follower.chat(model="judge"))[0] == 200
            assert asked == ["Bearer sk-judge"]
    finally:
        await runner.cleanup()


async def test_follower_confirms_no_state_of_an_earlier_connection() -> None:
    reports: list[list[FollowerReport]] = []

    async def connect(request: web.Request) -> web.WebSocketResponse:
        """Send the first follower a state, and those that come later none, as a controller that has only just started."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        taken: list[FollowerReport] = []
        reports.append(taken)
        if len(reports) == 1:
            backend = BackendView(7, "policy-0", RegisteredBackend("http://127.0.0.1:9"), BackendStatus.DOWN, "")
            view = PoolView("policy", {}, (PolicyView("policy", (backend,), None, None, False),))
            await socket.send_bytes(msgspec.msgpack.encode(ControllerUpdate(5, view, {})))
        while not taken or (len(reports) == 1 and taken[-1].revision != 5):
            taken.append(msgspec.msgpack.decode((await socket.receive()).data, type=FollowerReport))
        await socket.close()
        return socket

    (port,) = free_ports(1)
    app = web.Application()
    app.router.add_get(STATE_PATH, connect)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with staged(controller=f"http://127.0.0.1:{port}"), asyncio.timeout(30):
        while len(reports) < 2 or not reports[1]:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)
    await runner.cleanup()
    assert (reports[0][-1].revision, reports[1][0].revision) == (5, 0)
