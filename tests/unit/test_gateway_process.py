"""The gateway as a process: how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from running_engine import fetch, start

from fakes import OtlpSink
from gateway.server import serve
from spangrad.errors import SpangradError
from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import Settings, load_settings

ASKED = {"model": "policy", "messages": [{"role": "user", "content": "say rome"}]}


def settings(engine: int, store: str, **flags: object) -> Settings:
    (port,) = free_ports(1)
    values = {
        "gateway.port": port,
        "gateway.url": f"http://127.0.0.1:{port}",
        "gateway.engine_url": f"http://127.0.0.1:{engine}",
        "store.otlp_endpoint": store,
    }
    return load_settings({**values, **flags}, env={})


def started(wanted: Settings, log: Path) -> Child:
    child = start("gateway.server", wanted, log)
    wait_until(lambda: fetch(f"{wanted.gateway.url}/healthz") == {"status": "up"}, 20, "the gateway", [child], poll_seconds=0.05)
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_time_with_every_span_delivered(number: signal.Signals, tmp_path: Path) -> None:
    engine = FakeEngine()
    with OtlpSink() as store:
        async with engine.running():
            # Spans are held back for long, so that only the end can send them.
            wanted = settings(engine.port, store.url, **{"gateway.export_delay_seconds": 60})
            child = await asyncio.to_thread(started, wanted, tmp_path / "log")
            await asyncio.to_thread(fetch, f"{wanted.gateway.url}/v1/chat/completions", ASKED)
            engine.go_on.clear()
            engine.arrived.clear()
            in_flight = asyncio.create_task(asyncio.to_thread(fetch, f"{wanted.gateway.url}/v1/chat/completions", ASKED))
            await engine.arrived.wait()
            assert store.spans == []
            began = time.monotonic()
            child.process.send_signal(number)
            assert await asyncio.to_thread(child.process.wait, 5) == 0
            assert time.monotonic() - began < 2
            await in_flight
    assert [span.attributes.get("spangrad.aborted", False) for span in store.spans] == [False, True]


async def test_spans_that_nobody_took_are_named_at_the_end(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    engine = FakeEngine()
    async with engine.running():
        wanted = settings(engine.port, f"http://127.0.0.1:{nobody}")
        child = await asyncio.to_thread(started, wanted, tmp_path / "log")
        await asyncio.to_thread(fetch, f"{wanted.gateway.url}/v1/chat/completions", ASKED)
        child.process.terminate()
        assert await asyncio.to_thread(child.process.wait, 5) == 1
    assert child.tail(1) == f"1 spans are lost: the store at http://127.0.0.1:{nobody} did not take them before the end."


def test_an_address_that_may_not_be_bound_or_is_taken_is_refused() -> None:
    with pytest.raises(SpangradError, match=r"Set gateway.token, or bind 127.0.0.1"):
        serve(settings(1, "http://127.0.0.1:1", **{"gateway.host": "0.0.0.0"}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SpangradError, match=r"set gateway.port to another port"):
            serve(settings(1, "http://127.0.0.1:1", **{"gateway.port": taken.getsockname()[1]}))
