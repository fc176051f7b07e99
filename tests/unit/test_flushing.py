"""Attempts that end within a few milliseconds share a flush, and none shares one that began before it ended."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from span_processors.export import LosslessSpanProcessor
from spangrad.agent import flushing
from tests.support.otlp import OtlpSink


class CountingProvider(TracerProvider):
    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        self.flushes += 1
        return True


class SilentError(Exception):
    """Exception of a user that fails to give its message."""

    def __str__(self) -> str:
        raise ZeroDivisionError


class FailingProcessor(SpanProcessor):
    """Span processor of a user, whose every flush raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        raise self._error

    def shutdown(self) -> None:
        raise self._error


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> CountingProvider:
    counting = CountingProvider()
    monkeypatch.setattr("spangrad.agent.flushing.trace.get_tracer_provider", lambda: counting)
    return counting


async def test_flusher_attempts_that_end_soon_after_another_share_its_flush(
    provider: CountingProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_turn, are_gathered = asyncio.sleep, asyncio.Event()

    async def gather(seconds: float) -> None:
        assert seconds == flushing._GATHER_SECONDS
        await are_gathered.wait()

    monkeypatch.setattr(flushing.asyncio, "sleep", gather)
    flusher = flushing.Flusher()
    ended = list[asyncio.Task[bool]]()
    for _ in range(5):
        ended.append(asyncio.create_task(flusher.flush()))
        await next_turn(0)
    are_gathered.set()
    assert await asyncio.gather(*ended) == [True] * 5
    assert provider.flushes == 1


async def test_flusher_attempt_that_ends_after_a_flush_has_another(provider: CountingProvider) -> None:
    flusher = flushing.Flusher()
    assert await flusher.flush()
    assert await flusher.flush()
    assert provider.flushes == 2


async def test_flusher_flush_does_not_wait_for_threads_of_agents(provider: CountingProvider) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    tool_ends = threading.Event()
    tool = asyncio.create_task(asyncio.to_thread(tool_ends.wait, 60))
    try:
        assert await asyncio.wait_for(flushing.Flusher().flush(), 30)
    finally:
        tool_ends.set()
    assert await tool
    assert provider.flushes == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("by a user"), SystemExit(3), StopIteration("by a user")])
async def test_flusher_processor_that_raises_leaves_spans_sent(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = TracerProvider()
    monkeypatch.setattr("spangrad.agent.flushing.trace.get_tracer_provider", lambda: provider)
    provider.add_span_processor(FailingProcessor(error))
    assert not await asyncio.wait_for(flushing.Flusher().flush(), 30)
    with OtlpSink() as sink:
        provider.add_span_processor(ours := LosslessSpanProcessor(f"{sink.url}/v1/traces", delay_seconds=60))
        provider.get_tracer("agent").start_span("last").end()
        assert await asyncio.wait_for(flushing.Flusher().flush(), 30)
        assert [span.name for span in sink.spans] == ["last"]
        ours.shutdown()
    assert f"a span processor fails in force_flush: {type(error).__name__}: {error}\n" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("by a user"), SystemExit(3), SilentError()])
def test_exit_process_ends_where_a_processor_raises_and_sends_spans(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, codes = TracerProvider(shutdown_on_exit=False), list[int]()
    monkeypatch.setattr("spangrad.agent.flushing.trace.get_tracer_provider", lambda: provider)
    monkeypatch.setattr(flushing.os, "_exit", codes.append)
    with OtlpSink() as sink:
        provider.add_span_processor(FailingProcessor(error))
        provider.add_span_processor(LosslessSpanProcessor(f"{sink.url}/v1/traces", delay_seconds=60))
        provider.get_tracer("agent").start_span("last").end()
        flushing.exit_process()
        assert [span.name for span in sink.spans] == ["last"]
    assert codes == [0]
