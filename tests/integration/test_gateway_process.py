"""The gateway as a process: how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from pathlib import Path

import pytest

from gateway.server import serve
from spangrad.errors import SpangradError
from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings
from tests.support.fake_engine import FakeEngine
from tests.support.otlp import OtlpSink
from tests.support.processes import address_of_forks, fetch, start

ASKED = {"model": "policy", "messages": [{"role": "user", "content": "say rome"}]}


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """Start the server that forks in this thread: Linux ends a child with the thread that started it."""
    address_of_forks("services")


def settings(engine: int, store: str, spill: Path, **flags: object) -> Settings:
    (port,) = free_ports(1)
    values = {
        "gateway.port": port,
        "gateway.url": f"http://127.0.0.1:{port}",
        "gateway.spill_path": str(spill),
        "gateway.engine_url": f"http://127.0.0.1:{engine}",
        "store.otlp_endpoint": store,
    }
    return load_settings({**values, **flags}, env={})


def started(chosen: Settings, log: Path, before: str = "") -> Child:
    child = start("gateway.server", chosen, log, before)
    wait_until(lambda: fetch(f"{chosen.gateway.url}/healthz") == {"status": "up"}, 60, "the gateway", [child], poll_seconds=0.05)
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_gateway_signal_ends_in_time_with_every_span_delivered(number: signal.Signals, tmp_path: Path) -> None:
    engine = FakeEngine()
    with OtlpSink() as store:
        async with engine.running():
            # Spans are held back for long, so that only the end can send them.
            chosen = settings(engine.port, store.url, tmp_path / "spill", **{"gateway.export_delay_seconds": 600})
            # The second that a gateway has for them may be too short on a busy machine.
            child = await asyncio.to_thread(started, chosen, tmp_path / "log", "import gateway.server; gateway.server.FLUSH_SECONDS = 50")
            await asyncio.to_thread(fetch, f"{chosen.gateway.url}/v1/chat/completions", ASKED)
            engine.go_on.clear()
            engine.arrived.clear()
            in_flight = asyncio.create_task(asyncio.to_thread(fetch, f"{chosen.gateway.url}/v1/chat/completions", ASKED))
            await engine.arrived.wait()
            assert store.spans == []
            child.process.send_signal(number)
            assert await asyncio.to_thread(child.process.wait, 60) == 0
            await in_flight
    assert [span.attributes.get("spangrad.aborted", False) for span in store.spans] == [False, True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_gateway_restarted_sends_spill_of_earlier_process(number: signal.Signals, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    engine = FakeEngine()
    async with engine.running():
        chosen = settings(engine.port, f"http://127.0.0.1:{port}", tmp_path / "spill")
        child = await asyncio.to_thread(started, chosen, tmp_path / "log")
        await asyncio.to_thread(fetch, f"{chosen.gateway.url}/rollout/r1/attempt/0/v1/chat/completions", ASKED)
        child.process.send_signal(number)
        assert await asyncio.to_thread(child.process.wait, 60) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        assert re.search(r"WARNING \d+ bytes of spans wait in .*spill for the next gateway", child.tail()) or number == signal.SIGKILL
        with OtlpSink(port) as store:
            child = await asyncio.to_thread(started, chosen, tmp_path / "log")
            await asyncio.to_thread(store.wait_for, lambda: bool(store.spans))
            child.process.terminate()
            assert await asyncio.to_thread(child.process.wait, 60) == 0
    assert [span.attributes["spangrad.rollout.id"] for span in store.spans] == ["r1"]
    assert list((tmp_path / "spill").glob("*.spill")) == []


async def test_gateway_with_spill_path_in_use_refuses_to_start(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with engine.running():
        first, second = (settings(engine.port, "http://127.0.0.1:1", tmp_path / "spill") for _ in range(2))
        child = await asyncio.to_thread(started, first, tmp_path / "log")
        refused = start("gateway.server", second, tmp_path / "second.log")
        assert await asyncio.to_thread(refused.process.wait, 60) == 1
        child.process.kill()
        child.process.wait()
    assert refused.tail(1) == (
        f"gateway.spill_path = {tmp_path / 'spill'} is in use by the gateway of process {child.process.pid}. "
        "Stop that one, or set gateway.spill_path to another directory."
    )


async def test_gateway_with_invalid_redact_rule_refuses_to_start(tmp_path: Path) -> None:
    child = start("gateway.server", settings(1, "http://127.0.0.1:1", tmp_path, **{"gateway.redact": ["[0-9"]}), tmp_path / "log")
    assert await asyncio.to_thread(child.process.wait, 60) == 2
    assert child.tail(1) == (
        "gateway.redact has '[0-9', which is no regular expression: unterminated character set at position 0. Fix it, or leave it out."
    )


def test_gateway_with_unsafe_or_taken_address_raises(tmp_path: Path) -> None:
    with pytest.raises(SpangradError, match=r"Set gateway.token, or bind 127.0.0.1"):
        serve(settings(1, "http://127.0.0.1:1", tmp_path, **{"gateway.host": "0.0.0.0"}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SpangradError, match=r"set gateway.port to another port"):
            serve(settings(1, "http://127.0.0.1:1", tmp_path, **{"gateway.port": taken.getsockname()[1]}))
