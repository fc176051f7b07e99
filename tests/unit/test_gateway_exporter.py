"""The gateway's exporter: whatever the store does, a span is sent until it is taken."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fakes import OtlpSink
from gateway.exporter import SpanExporter
from gateway.record import attribute
from spangrad.processes import free_ports
from spangrad.settings import load_settings


def span(name: str, filling: int = 0) -> bytes:
    return Span(
        name=name, trace_id=os.urandom(16), span_id=os.urandom(8), attributes=[attribute("filling", "x" * filling)]
    ).SerializeToString()


class Poisoned(OtlpSink):
    """Refuses, for ever, each request that holds the span `poison`."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        return (400, {}, b"poison") if b"poison" in body else super().answer(method, path, headers, body)


@asynccontextmanager
async def exporting(url: str, **flags: object) -> AsyncGenerator[SpanExporter]:
    settings = load_settings({"store.otlp_endpoint": url, **{key.replace("__", "."): value for key, value in flags.items()}}, env={})
    async with aiohttp.ClientSession() as session:
        exporter = SpanExporter(settings, session, "process 1")
        try:
            yield exporter
        finally:
            exporter.task.cancel()


async def arrived(store: OtlpSink, count: int) -> list[str]:
    await asyncio.to_thread(store.wait_for, lambda: len(store.spans) >= count)
    return [one.name for one in store.spans]


async def test_spans_arrive_in_order_with_resource_scope_and_token() -> None:
    with OtlpSink() as store:
        async with exporting(store.url, store__token="secret") as exporter:
            names = [str(number) for number in range(300)]
            for name in names:
                exporter.put(span(name, filling=300))
            assert await arrived(store, 300) == names
            assert await exporter.stop(1) == 0
        assert {(one.service, one.scope) for one in store.spans} == {("spangrad-gateway", "spangrad.gateway")}
        assert {headers["authorization"] for headers in store.requests} == {"Bearer secret"}


async def test_nothing_is_lost_while_the_store_refuses_and_then_takes() -> None:
    with OtlpSink(refusals=[(503, {}), (429, {}), (401, {})]) as store:
        async with exporting(store.url) as exporter:
            for name in "abc":
                exporter.put(span(name))
            assert await arrived(store, 3) == ["a", "b", "c"]
            assert len(store.requests) >= 4


async def test_nothing_is_lost_while_the_store_is_down_and_then_up() -> None:
    (port,) = free_ports(1)
    async with exporting(f"http://127.0.0.1:{port}") as exporter:
        exporter.put(span("a"))
        exporter.put(span("b"))
        await asyncio.sleep(0)
        with OtlpSink(port) as store:
            assert await arrived(store, 2) == ["a", "b"]
        assert await exporter.stop(1) == 0


async def test_a_span_that_the_store_refuses_for_what_it_is_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with Poisoned() as store:
        async with exporting(store.url) as exporter:
            for name in ("a", "poison", "b"):
                exporter.put(span(name))
            assert await arrived(store, 2) == ["a", "b"]
            assert await exporter.stop(1) == 0
    assert [record.message for record in caplog.records if "lost" in record.message] == [
        f"a span is lost: the store at {store.url}/v1/traces refuses it: 400 poison"
    ]


async def test_a_full_queue_makes_calls_wait_until_the_store_takes_spans() -> None:
    (port,) = free_ports(1)
    async with exporting(f"http://127.0.0.1:{port}", gateway__export_bytes=1000) as exporter:
        await exporter.room()
        exporter.put(span("a", filling=2000))
        waiting = asyncio.create_task(exporter.room())
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done()
        with OtlpSink(port):
            await asyncio.wait_for(waiting, 5)


async def test_spans_are_held_back_but_not_beyond_the_end() -> None:
    with OtlpSink() as store:
        async with exporting(store.url, gateway__export_delay_seconds=60) as exporter:
            exporter.put(span("a"))
            exporter.put(span("b"))
            await asyncio.wait({exporter.task}, timeout=0.1)
            assert store.requests == []
            assert await exporter.stop(2) == 0
            assert await arrived(store, 2) == ["a", "b"]


async def test_held_back_spans_leave_when_their_time_has_come() -> None:
    with OtlpSink() as store:
        async with exporting(store.url, gateway__export_delay_seconds=0.2) as exporter:
            began = asyncio.get_running_loop().time()
            exporter.put(span("a"))
            assert await arrived(store, 1) == ["a"]
            assert asyncio.get_running_loop().time() - began >= 0.2


async def test_the_end_tells_how_many_spans_are_lost() -> None:
    (nobody,) = free_ports(1)
    async with exporting(f"http://127.0.0.1:{nobody}") as exporter:
        exporter.put(span("a"))
        exporter.put(span("b"))
        assert await exporter.stop(0.3) == 2
