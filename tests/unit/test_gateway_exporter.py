"""The gateway's exporter: whatever the store does, a span is sent until it is taken."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.rollout_spans import key_value
from gateway.recorder import exporter as exporter_module
from gateway.recorder import spill
from gateway.recorder.exporter import SpanExporter
from spangrad.processes import free_ports
from spangrad.settings.sources import load_settings
from tests.support.otlp import FullDisk, OtlpSink

Exporting = Callable[..., AbstractAsyncContextManager[SpanExporter]]


def span(name: str, filling: int = 0) -> bytes:
    return Span(
        name=name, trace_id=os.urandom(16), span_id=os.urandom(8), attributes=[key_value("filling", "x" * filling)]
    ).SerializeToString()


class Poisoned(OtlpSink):
    """Refuses, for ever, each request that holds the span `poison`."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        return (400, {}, b"poison") if b"poison" in body else super().answer(method, path, headers, body)


@pytest.fixture
def exporting(tmp_path: Path) -> Exporting:
    """Exporters that use the same spill, one after the other."""

    @asynccontextmanager
    async def started(url: str, seconds: float = 30, lost: int = 0, **flags: object) -> AsyncGenerator[SpanExporter]:
        """An exporter that has `seconds` for its end, and loses so many spans then."""
        values = {"store.otlp_endpoint": url, "gateway.spill_path": str(tmp_path / "spill")}
        settings = load_settings({**values, **{key.replace("__", "."): value for key, value in flags.items()}}, env={})
        async with aiohttp.ClientSession() as session:
            exporter = SpanExporter(settings, session, "process 1")
            yield exporter
            assert await exporter.stop(seconds) == lost

    return started


async def arrived(store: OtlpSink, count: int) -> list[str]:
    await asyncio.to_thread(store.wait_for, lambda: len(store.spans) >= count)
    return [one.name for one in store.spans]


async def test_exporter_sends_spans_in_order_with_resource_scope_and_token(exporting: Exporting) -> None:
    with OtlpSink() as store:
        async with exporting(store.url, store__token="secret") as exporter:
            names = [str(number) for number in range(300)]
            for name in names:
                await exporter.put(span(name, filling=300))
            assert await arrived(store, 300) == names
        assert {(one.service, one.scope) for one in store.spans} == {("spangrad-gateway", "spangrad.gateway")}
        assert {headers["authorization"] for headers in store.requests} == {"Bearer secret"}


async def test_exporter_while_store_refuses_loses_no_span(exporting: Exporting) -> None:
    with OtlpSink(refusals=[(503, {}), (429, {}), (401, {})]) as store:
        async with exporting(store.url) as exporter:
            for name in "abc":
                await exporter.put(span(name))
            assert await arrived(store, 3) == ["a", "b", "c"]
            assert len(store.requests) >= 4


async def test_exporter_while_store_is_down_loses_no_span(exporting: Exporting) -> None:
    (port,) = free_ports(1)
    async with exporting(f"http://127.0.0.1:{port}") as exporter:
        await exporter.put(span("a"))
        await exporter.put(span("b"))
        await asyncio.sleep(0)
        with OtlpSink(port) as store:
            assert await arrived(store, 2) == ["a", "b"]


async def test_exporter_sends_spill_of_earlier_exporter_first(exporting: Exporting, tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    names = [str(number) for number in range(20)]
    for name in names:
        async with exporting(f"http://127.0.0.1:{nobody}", seconds=0) as exporter:
            await exporter.put(span(name, filling=1000))
    with OtlpSink() as store:
        async with exporting(store.url) as exporter:
            assert exporter.waiting_bytes > 20_000
            await exporter.put(span("new"))
            assert await arrived(store, 21) == [*names, "new"]
    assert list((tmp_path / "spill").glob("*.spill")) == []


async def test_exporter_damaged_span_in_spill_is_reported_and_others_sent(
    exporting: Exporting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (nobody,) = free_ports(1)
    async with exporting(f"http://127.0.0.1:{nobody}", seconds=0) as exporter:
        for name in ("alpha", "bravo", "carol"):
            await exporter.put(span(name))
    (path,) = (tmp_path / "spill").glob("*.spill")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"bravo", b"brave")[:-1])
    with OtlpSink() as store:
        async with exporting(store.url):
            assert await arrived(store, 1) == ["alpha"]
    lost = len(data) - 1 - len(data) // 3
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        f"{lost} bytes of {path} are no whole spans, and left out"
    ]


async def test_exporter_memory_is_bounded_and_spill_keeps_order(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "SEGMENT_BYTES", 20_000)
    monkeypatch.setattr(exporter_module, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(exporter_module, "QUICK_READ_BYTES", 5_000)
    (port,) = free_ports(1)
    names = [str(number) for number in range(100)]
    async with exporting(f"http://127.0.0.1:{port}", gateway__export_bytes=5000) as exporter:
        for name in names:
            await exporter.put(span(name, filling=1000))
        assert exporter.memory_bytes <= 6100 < 100_000 < exporter.waiting_bytes
        with OtlpSink(port) as store:
            assert await arrived(store, 100) == names
            # It has caught up: what comes now takes the short way again.
            await exporter.put(span("short way"))
            assert exporter.memory_bytes > 0
            assert await arrived(store, 101) == [*names, "short way"]


async def test_exporter_span_refused_by_store_is_reported_and_others_sent(exporting: Exporting, caplog: pytest.LogCaptureFixture) -> None:
    with Poisoned() as store:
        async with exporting(store.url) as exporter:
            for name in ("a", "poison", "b"):
                await exporter.put(span(name))
            assert await arrived(store, 2) == ["a", "b"]
    assert [record.message for record in caplog.records if "lost" in record.message] == [
        f"a span is lost: the store at {store.url}/v1/traces refuses it: 400 poison"
    ]


async def test_exporter_spill_bytes_spent_makes_calls_wait(exporting: Exporting) -> None:
    (port,) = free_ports(1)
    async with exporting(f"http://127.0.0.1:{port}", gateway__spill_bytes=1000) as exporter:
        await exporter.room()
        await exporter.put(span("a", filling=2000))
        waiting = asyncio.create_task(exporter.room())
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done()
        with OtlpSink(port):
            await asyncio.wait_for(waiting, 30)


async def test_exporter_spill_bytes_spent_by_earlier_exporter_makes_calls_wait(exporting: Exporting) -> None:
    (port,) = free_ports(1)
    async with exporting(f"http://127.0.0.1:{port}", seconds=0) as exporter:
        await exporter.put(span("a", filling=2000))
    async with exporting(f"http://127.0.0.1:{port}", gateway__spill_bytes=1000) as exporter:
        waiting = asyncio.create_task(exporter.room())
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done()
        with OtlpSink(port):
            await asyncio.wait_for(waiting, 30)


async def test_exporter_full_disk_makes_calls_wait_and_loses_no_span(
    exporting: Exporting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch, full=False)
    with OtlpSink() as store:
        async with exporting(store.url) as exporter:
            await exporter.put(span("a"))
            disk.full = True
            ends, leaves = (asyncio.create_task(exporter.put(span(name))) for name in "bc")
            begins = asyncio.create_task(exporter.room())
            await disk.refused.wait()
            # The client of this one leaves: its span counts all the same.
            leaves.cancel()
            await asyncio.wait({ends, begins}, timeout=0.05)
            assert (ends.done(), begins.done()) == (False, False)
            disk.full = False
            await asyncio.wait_for(asyncio.gather(ends, begins), 30)
            assert await arrived(store, 3) == ["a", "b", "c"]
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        f"spans cannot be written to {tmp_path / 'spill'} (No space left on device): calls wait until they can"
    ]


async def test_exporter_end_reports_number_of_lost_spans(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, full=False)
    with OtlpSink() as store:
        async with exporting(store.url, lost=2) as exporter:
            disk.full = True
            puts = [asyncio.create_task(exporter.put(span(name))) for name in "ab"]
            await asyncio.wait(puts, timeout=0.05)
        for put in puts:
            put.cancel()


async def test_exporter_export_delay_ends_at_close(exporting: Exporting) -> None:
    with OtlpSink() as store:
        async with exporting(store.url, gateway__export_delay_seconds=60) as exporter:
            await exporter.put(span("a"))
            await exporter.put(span("b"))
            await asyncio.wait({exporter.task}, timeout=0.1)
            assert store.requests == []
        assert await arrived(store, 2) == ["a", "b"]


async def test_exporter_export_delay_sends_after_delay(exporting: Exporting) -> None:
    with OtlpSink() as store:
        async with exporting(store.url, gateway__export_delay_seconds=0.2) as exporter:
            began = asyncio.get_running_loop().time()
            await exporter.put(span("a"))
            assert await arrived(store, 1) == ["a"]
            assert asyncio.get_running_loop().time() - began >= 0.2
