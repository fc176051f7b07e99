"""Backends that register: engines by themselves, what a gateway remembers beyond its end."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.pool.registry import FILE, BackendRegistry
from gateway.registration import Registration
from spangrad.errors import GatewayError
from spangrad.processes import free_ports
from spangrad.settings import BackendSettings, Settings
from spangrad.settings.sources import load_settings
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import all_serve, ask, backends, following, staged
from tests.support.scripted_servers import AdminGateway

ROOT = Path(__file__).parents[2]
SECONDS = 30.0
"""Longest wait for what must happen."""


def registering(engine: FakeEngine, port: int) -> Settings:
    """Settings of an engine that registers itself with the gateway at a port."""
    where = {"engine.url": f"http://127.0.0.1:{engine.port}", "gateway.url": f"http://127.0.0.1:{port}"}
    return load_settings({**where, "engine.token": "secret"}, env={})


async def urls(stage: Any) -> list[str]:
    return [backend["url"] for backend in await backends(stage)]


async def happens(stage: Any, expected: list[str]) -> None:
    end = asyncio.get_running_loop().time() + SECONDS
    while await urls(stage) != expected:
        assert asyncio.get_running_loop().time() < end, await urls(stage)
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def test_engine_registers_whenever_gateway_is_up_and_leaves_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = FakeEngine(), FakeEngine()
    (port,) = free_ports(1)
    registration = Registration(registering(second, port), renewal_seconds=0.02)
    both = [f"http://127.0.0.1:{engine.port}" for engine in (first, second)]
    async with second.running():
        registration.__enter__()
        await until(lambda: "the engine is not registered yet" in caplog.text)
        async with staged(first, port=port, spill_path=str(tmp_path / "a")) as stage:
            await happens(stage, both)
            (_, backend) = await backends(stage)
            assert (backend["has_key"], backend["policy"]) == (True, "policy")
        async with staged(first, port=port, spill_path=str(tmp_path / "b")) as stage:  # it has forgotten
            await happens(stage, both)
            await asyncio.sleep(0.1)
            assert await urls(stage) == both, "once, however often it renews"
            await asyncio.to_thread(registration.__exit__, None, None, None)
            assert await urls(stage) == both[:1]


async def test_engine_removed_by_an_order_registers_again_only_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = FakeEngine(), FakeEngine()
    (port,) = free_ports(1)
    both = [f"http://127.0.0.1:{engine.port}" for engine in (first, second)]
    async with second.running(), staged(first, port=port, spill_path=str(tmp_path)) as stage:
        with Registration(registering(second, port), renewal_seconds=0.02) as registration:
            await happens(stage, both)
            await all_serve(stage, 2)
            first.go_on.clear()
            second.go_on.clear()
            calls = [asyncio.create_task(stage.chat()) for _ in range(2)]
            await second.arrived.wait()
            removal = asyncio.create_task(ask(stage, "DELETE", "/admin/backends/policy-1"))
            await asyncio.sleep(0.1)
            assert not removal.done()
            first.go_on.set()
            second.go_on.set()
            assert [(await call)[0] for call in calls] == [200, 200]
            assert (await removal)[0] == 200
            await until(lambda: f"{both[1]} was removed from policy 'policy'" in caplog.text)
            await asyncio.sleep(0.1)
            assert await urls(stage) == both[:1], "the process runs on"
            assert caplog.text.count(f"{both[1]} was removed from policy 'policy'") == 1
            assert registration._name == "", "it removes no backend that has the name after it"
        with Registration(registering(second, port), renewal_seconds=0.02):
            await happens(stage, both)


class _Guarded(FakeEngine):
    """An engine that asks for a token."""

    token = "first"

    async def _info(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        return await super()._info(request)


async def test_engine_that_restarts_with_another_token_is_admitted_with_that(tmp_path: Path) -> None:
    engine, other = _Guarded(), FakeEngine()
    body = {"url": f"http://127.0.0.1:{engine.port}", "renew": True}
    async with engine.running():
        async with staged(other, spill_path=str(tmp_path)) as stage, following(stage) as follower:
            assert (await ask(stage, "POST", "/admin/backends", {**body, "key": "first"}))[0] == 201
            await all_serve(stage, 2)
            engine.token = "second"
            assert (await ask(stage, "POST", "/admin/backends", {**body, "key": "second"}))[0] == 201
            await asyncio.sleep(1)
            await all_serve(stage, 2)
            async with asyncio.timeout(30):
                while not (await ask(stage, "GET", "/admin/followers"))[1]["followers"][0]["confirmed"]:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.01)
            for number in range(2):
                assert (await follower.chat(f"/rollout/r{number}/attempt/0"))[0] == 200
            assert (len(engine.requests), engine.headers[0]["authorization"]) == (1, "Bearer second")
        async with staged(other, spill_path=str(tmp_path)) as stage:
            await all_serve(stage, 2)


async def test_engine_at_its_end_spares_another_backend_of_its_name(caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = FakeEngine(), FakeEngine(), FakeEngine()
    (port,) = free_ports(1)
    async with second.running(), third.running() as url, staged(first, port=port) as stage:
        registration = Registration(registering(second, port), renewal_seconds=600)
        registration.__enter__()
        await until(lambda: registration._name == "policy-1")
        assert (await ask(stage, "DELETE", "/admin/backends/policy-1?now=true"))[0] == 200
        (_, added) = await ask(stage, "POST", "/admin/backends", {"url": url, "renew": True})
        assert added["name"] == "policy-1"
        await asyncio.to_thread(registration.__exit__, None, None, None)
        assert await urls(stage) == [f"http://127.0.0.1:{first.port}", url]
        assert f"backend policy-1 is at {url}, not at http://127.0.0.1:{second.port}. See GET /admin/backends" in caplog.text
        assert (await ask(stage, "POST", "/admin/backends", {"url": url, "renew": True, "again": True}))[0] == 201


async def test_engine_that_the_settings_name_stays_a_backend_with_its_settings(tmp_path: Path) -> None:
    first, second = FakeEngine(), FakeEngine()
    (port,) = free_ports(1)
    both = [f"http://127.0.0.1:{engine.port}" for engine in (first, second)]
    listed = [{"url": f"{both[1]}/v1", "limit": 7}]
    async with second.running(), staged(first, port=port, spill_path=str(tmp_path), backends=listed) as stage:
        for _ in range(2):
            registration = Registration(registering(second, port), renewal_seconds=0.02)
            await asyncio.to_thread(registration._register)
            with registration:
                await happens(stage, both)
            assert [(backend["url"], backend["limit"]) for backend in await backends(stage)] == [(both[0], None), (both[1], 7)]
            assert (await ask(stage, "DELETE", "/admin/backends/policy-1"))[0] == 200
    assert not (tmp_path / FILE).exists(), "the settings have it"


async def test_registration_answered_by_a_foreign_service_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    with AdminGateway() as service, Registration(registering(engine, service.port), 0.01) as registration:
        await until(lambda: len(service.publications) > 1)
        assert registration._thread is not None
        assert registration._thread.is_alive()
    assert "no gateway of this version" in caplog.text


async def test_gateway_after_restart_has_registered_backends(tmp_path: Path) -> None:
    first, second, third = FakeEngine(), FakeEngine(), FakeEngine()
    spill = str(tmp_path / "spill")
    async with second.running(), third.running():
        async with staged(first, spill_path=spill) as stage:
            for engine, key in ((second, "secret"), (third, None)):
                body = {"url": f"http://127.0.0.1:{engine.port}", **({"key": key} if key else {})}
                assert (await ask(stage, "POST", "/admin/backends", body))[0] == 201
            everyone = await urls(stage)
        file = tmp_path / "spill" / FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        async with staged(first, spill_path=spill) as stage:
            assert await urls(stage) == everyone
            assert [backend["has_key"] for backend in await backends(stage)] == [False, True, False]
            assert (await ask(stage, "DELETE", "/admin/backends/policy-1?now=true"))[0] == 200
            (_, renewed) = await ask(stage, "POST", "/admin/backends", {"url": everyone[2], "renew": True})
            assert renewed["name"] == "policy-2", "it stays as it is"
        async with staged(first, spill_path=spill) as stage:
            assert await urls(stage) == [everyone[0], everyone[2]]
    async with staged(third, spill_path=spill) as stage:
        assert await urls(stage) == [everyone[2]], "what the settings name by now is there once"


def test_registry_that_is_damaged_raises_with_remedy(tmp_path: Path) -> None:
    registry = BackendRegistry(tmp_path)
    assert registry.read() == []
    registry.write([BackendSettings(url="http://engine", limit=3)])
    assert registry.read() == [BackendSettings(url="http://engine", limit=3)]
    for damaged in ([{"url": 1}], [{"url": "http://engine", "limit": 0}]):
        (tmp_path / FILE).write_text(json.dumps(damaged))
        with pytest.raises(GatewayError, match=r"(?s)cannot be read .*or remove it: engines register again"):
            registry.read()


def test_registry_error_hides_key(tmp_path: Path) -> None:
    damaged = [{"url": "http://engine", "key": "secret-key\n of two lines"}]
    (tmp_path / FILE).write_text(json.dumps(damaged))
    with pytest.raises(GatewayError, match=r"a token is one line") as caught:
        BackendRegistry(tmp_path).read()
    assert "secret-key" not in str(caught.value)


def test_registry_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    BackendRegistry(tmp_path / "file").write([])
    assert "could not be written" in caplog.text


def test_engine_without_url_registers_nowhere() -> None:
    with Registration(load_settings({"gateway.url": "http://127.0.0.1:9"}, env={})) as registration:
        assert registration._thread is None
