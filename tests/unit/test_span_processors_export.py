"""The loss-free export of spans, against a small OTLP endpoint, through the real SDK."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from opentelemetry import baggage
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Link, SpanContext

from span_processors.export import LosslessSpanProcessor, RolloutSpanProcessor, parse_headers, tracer_provider, traces_url
from spangrad.http.service import bearer
from spangrad.processes import free_ports
from spangrad.semconv import PROCESS_ID, ROLLOUT_ATTEMPT, SEQ
from tests.support.otlp import OtlpSink
from tests.support.spans import provider_with

TEXT = "x" * 3000


def emit(provider: TracerProvider, count: int, **attributes: Any) -> None:
    tracer = provider.get_tracer("test")
    for number in range(count):
        tracer.start_span(f"span-{number}", attributes=attributes).end()


def flush_seconds(provider: TracerProvider) -> float:
    """Return the seconds that a flush took, which had to send or count every span."""
    started = time.monotonic()
    assert provider.force_flush(60_000)
    return time.monotonic() - started


def test_lossless_span_processor_sends_spans_whole_with_headers() -> None:
    with OtlpSink() as sink:
        provider = tracer_provider("unit", sink.url, {**bearer("secret"), **parse_headers("x-team=a%20b")})
        tracer = provider.get_tracer("scope")
        with tracer.start_as_current_span("outer", attributes={"text": "é", "many": [1, 2]}) as outer:
            outer.add_event("said", {"score": 0.5})
            tracer.start_span("inner").end()
        assert provider.force_flush()
        provider.shutdown()
        inner, outer_span = sink.spans
        process = outer_span.attributes[PROCESS_ID]
        assert outer_span.attributes == {"text": "é", "many": [1, 2], PROCESS_ID: process, SEQ: outer_span.attributes[SEQ]}
        assert inner.attributes == {PROCESS_ID: process, SEQ: int(str(outer_span.attributes[SEQ])) + 1}
        assert (inner.name, inner.parent_id, inner.trace_id) == ("inner", outer_span.span_id, outer_span.trace_id)
        assert outer_span.events == (("said", {"score": 0.5}),)
        assert (outer_span.service, outer_span.scope, outer_span.parent_id) == ("unit", "scope", "")
        assert [(r["authorization"], r["x-team"], r["content-type"]) for r in sink.requests] == [
            ("Bearer secret", "a b", "application/x-protobuf")
        ]


def test_tracer_provider_keeps_all_links_events_and_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OTEL_SPAN_LINK_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"):
        monkeypatch.setenv(variable, "7")  # an agent's own limits
    many = {f"key-{number}": "long text" for number in range(200)}
    links = [Link(SpanContext(1, number, is_remote=True), many) for number in range(1, 513)]
    ended = InMemorySpanExporter()
    with OtlpSink() as sink:
        provider = tracer_provider("unit", sink.url)
        provider.add_span_processor(SimpleSpanProcessor(ended))
        with provider.get_tracer("test").start_as_current_span("step", links=links, attributes=many) as step:
            for _ in range(512):
                step.add_event("reward", many)
        provider.shutdown()
    (span,) = ended.get_finished_spans()
    assert [link.context.span_id for link in span.links] == list(range(1, 513))
    assert (len(span.events), span.dropped_links, span.dropped_events, span.dropped_attributes) == (512, 0, 0, 0)
    for attributes in (span.attributes, span.links[0].attributes, span.events[0].attributes):
        assert {name: (attributes or {})[name] for name in many} == many


def test_lossless_span_processor_skips_unsampled_spans() -> None:
    with OtlpSink() as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url))
        provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
        provider.add_span_processor(processor)
        emit(provider, 3)
        provider.shutdown()
        assert (sink.requests, processor.lost) == ([], 0)


def test_lossless_span_processor_while_store_is_down_loses_no_span() -> None:
    (port,) = free_ports(1)
    processor = LosslessSpanProcessor(f"http://127.0.0.1:{port}/v1/traces", batch_bytes=2000, delay_seconds=0.01)
    provider = provider_with(processor)
    emit(provider, 100)
    started = time.monotonic()
    assert not provider.force_flush(3000)
    assert 2.9 < time.monotonic() - started < 15
    with OtlpSink(port) as sink:
        emit(provider, 100)
        assert provider.force_flush(60_000)
        assert sorted(span.name for span in sink.spans) == sorted(f"span-{n}" for n in range(100) for _ in range(2))
        assert processor.lost == 0
        provider.shutdown()


def test_lossless_span_processor_respects_retry_after() -> None:
    refusals = [(503, {"retry-after": "0.3"}), (429, {"retry-after": "0.3"}), (408, {}), (500, {})]
    with OtlpSink(refusals=refusals) as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url))
        provider = provider_with(processor)
        started = time.monotonic()
        emit(provider, 2)
        assert provider.force_flush()
        assert time.monotonic() - started > 0.6
        assert ([span.name for span in sink.spans], len(sink.requests), processor.lost) == (["span-0", "span-1"], 5, 0)
        provider.shutdown()


def test_lossless_span_processor_counts_and_reports_refused_spans(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with OtlpSink(refusals=[(400, {})]) as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url))
        provider = provider_with(processor)
        emit(provider, 2)
        assert provider.force_flush()
        emit(provider, 1)
        with caplog.at_level(logging.ERROR):
            provider.shutdown()
        assert ([span.name for span in sink.spans], processor.lost, processor.lost_because) == (["span-0"], 2, "HTTP 400 not now")
        assert f"{sink.url}/v1/traces refused 2 spans for good: HTTP 400 not now" in caplog.text
        assert capsys.readouterr().err == f"spangrad: 2 spans were not delivered to {sink.url}/v1/traces and are lost.\n"


def test_lossless_span_processor_full_queue_delays_once_then_drops(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    processor = LosslessSpanProcessor(
        f"http://127.0.0.1:{port}/v1/traces", queue_bytes=5000, batch_bytes=1000, full_wait_seconds=0.2, shutdown_seconds=0.3
    )
    provider = provider_with(processor)
    started = time.monotonic()
    emit(provider, 50, text="x" * 700)
    assert 0.2 < time.monotonic() - started < 8, "one wait, not one for each span"
    assert 40 <= processor.lost < 50
    started = time.monotonic()
    provider.shutdown()
    assert time.monotonic() - started < 20
    assert capsys.readouterr().err == f"spangrad: 50 spans were not delivered to http://127.0.0.1:{port}/v1/traces and are lost.\n"
    assert processor.lost == 50


def test_lossless_span_processor_full_queue_logs_without_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    provider = provider_with(
        LosslessSpanProcessor(f"http://127.0.0.1:{port}/v1/traces", queue_bytes=600, full_wait_seconds=0.05, shutdown_seconds=0.1)
    )
    inside = threading.Event()

    class SpanHandler(logging.Handler):
        """Handler that ends a span for each record; its lock is one that the end of Python does not wait for."""

        def createLock(self) -> None:  # noqa: N802
            self.lock = None
            self.turn = threading.RLock()

        def emit(self, record: logging.LogRecord) -> None:
            with self.turn:
                inside.set()
                time.sleep(0.3)  # the other thread finds the queue full in this time
                emit(provider, 1)

    def fill() -> None:
        inside.wait()
        emit(provider, 10)

    handler = SpanHandler()
    other = logging.getLogger("agent")
    for logger in (other, logging.getLogger("span_processors.export")):
        monkeypatch.setattr(logger, "handlers", [handler])
    threads = [threading.Thread(target=target, daemon=True) for target in (fill, lambda: other.warning("in the handler"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not [thread for thread in threads if thread.is_alive()]
    provider.shutdown()


def test_lossless_span_processor_put_while_closing_counts_lost() -> None:
    with OtlpSink(refusals=[(503, {"retry-after": "30"})]) as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url), queue_bytes=600, full_wait_seconds=60, shutdown_seconds=0)
        provider = provider_with(processor)
        emit(provider, 1, text="x" * 400)
        waiting = threading.Thread(target=emit, args=(provider, 1), kwargs={"text": "x" * 400}, daemon=True)
        waiting.start()
        time.sleep(0.5)  # it waits for room
        provider.shutdown()
        waiting.join(30)
        assert (waiting.is_alive(), processor.lost) == (False, 2)


def test_lossless_span_processor_put_while_shutdown_waits_is_sent() -> None:
    with OtlpSink() as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url), shutdown_seconds=5)
        provider = provider_with(processor)
        emit(provider, 1)
        assert provider.force_flush()
        with processor._changed:  # as `shutdown` begins; the thread may be faster than it
            processor._closing = True
            processor._changed.notify_all()
        assert processor._thread
        processor._thread.join(0.5)
        emit(provider, 1)
        provider.shutdown()
        assert (len(sink.spans), processor.lost) == (2, 0)


def test_lossless_span_processor_concurrent_flushes_share_requests() -> None:
    with OtlpSink() as sink:
        provider = provider_with(LosslessSpanProcessor(traces_url(sink.url), delay_seconds=60))
        ready = threading.Barrier(32)
        flushed: list[bool] = []

        def work() -> None:
            emit(provider, 1)
            ready.wait()
            flushed.append(provider.force_flush())

        threads = [threading.Thread(target=work) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(sink.spans), flushed, len(sink.requests)) == (32, [True] * 32, 1)
        provider.shutdown()


@pytest.mark.parametrize("value", [TEXT, [TEXT], {"a": TEXT}, [[{"a": {"b": [TEXT]}}]]])
def test_lossless_span_processor_batches_are_bounded_by_bytes(value: Any) -> None:
    with OtlpSink() as sink:
        provider = provider_with(LosslessSpanProcessor(traces_url(sink.url), batch_bytes=10_000, delay_seconds=60))
        emit(provider, 30, text=value)
        assert provider.force_flush()
        assert len(sink.spans) == 30
        assert max(int(request["content-length"]) for request in sink.requests) < 11_000
        provider.shutdown()


def test_lossless_span_processor_invalid_span_affects_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpSink() as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url))
        provider = provider_with(processor)
        provider.get_tracer("test").start_span("lone surrogate \ud800").end()
        emit(provider, 2)
        assert provider.force_flush()
        assert ([span.name for span in sink.spans], processor.lost) == (["span-0", "span-1"], 1)
        provider.shutdown()


def test_lossless_span_processor_name_of_another_type_ends_span() -> None:
    with OtlpSink() as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url))
        provider = provider_with(processor)
        provider.add_span_processor(RolloutSpanProcessor({}))
        tracer = provider.get_tracer("test")
        for name in (None, 5, "last"):
            tracer.start_span(name).end()  # type: ignore[arg-type]
        assert provider.force_flush()
        assert ([span.name for span in sink.spans], processor.lost) == (["", "last"], 1)
        provider.shutdown()


def test_rollout_span_processor_unreadable_context_starts_span(caplog: pytest.LogCaptureFixture) -> None:
    with OtlpSink() as sink:
        provider = provider_with(LosslessSpanProcessor(traces_url(sink.url)))
        provider.add_span_processor(RolloutSpanProcessor({}))
        attempt = baggage.set_baggage(ROLLOUT_ATTEMPT, "9" * 5000)  # more digits than Python reads
        provider.get_tracer("test").start_span("span", attempt).end()
        assert provider.force_flush()
        assert [sorted(span.attributes) for span in sink.spans] == [[PROCESS_ID, SEQ]]
        assert "a span starts without the attributes of its context" in caplog.text
        provider.shutdown()


UNSENDABLE = [
    pytest.param("http://127.0.0.1:9", {"authorization": "Bearer t0ken\n"}, id="newline in a header"),
    pytest.param("http://127.0.0.1:9", {"authorization": "Bearer t0ken\u20ac"}, id="header outside of Latin-1"),
    pytest.param("http://collector..svc", bearer("t0ken"), id="empty label in the host"),
    pytest.param("http://127.0.0.1:9/f\u00fcr", bearer("t0ken"), id="letter outside of ASCII in the path"),
    pytest.param("http://127.0.0.1:9/a b", bearer("t0ken"), id="space in the path"),
    pytest.param("http://127.0.0.1:99999", bearer("t0ken"), id="port out of range"),
]


@pytest.mark.parametrize(("url", "headers"), UNSENDABLE)
def test_lossless_span_processor_unsendable_request_counts_lost_spans(
    url: str, headers: dict[str, str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = LosslessSpanProcessor(traces_url(url), headers)
    provider = provider_with(processor)
    for lost in (1, 2):
        emit(provider, 1)
        assert flush_seconds(provider) < 20
        assert processor.lost == lost
    provider.shutdown()
    shown = capsys.readouterr().err + caplog.text + processor.lost_because
    assert "no request can be made" in shown
    assert "t0ken" not in shown


def test_lossless_span_processor_any_exception_counts_lost_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    with OtlpSink() as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url))
        provider = provider_with(processor)
        with monkeypatch.context() as patch:
            patch.setattr(processor, "encode", fail)
            patch.setattr(logging.Logger, "handle", fail)
            emit(provider, 2)
            assert flush_seconds(provider) < 20
        emit(provider, 1)
        assert flush_seconds(provider) < 20
        lost = processor.lost, processor.lost_because
        assert ([span.name for span in sink.spans], lost) == (["span-0"], (2, "ZeroDivisionError while they were sent"))
        provider.shutdown()


def test_lossless_span_processor_invalid_address_raises() -> None:
    with pytest.raises(ValueError, match="is not an http"):
        LosslessSpanProcessor("localhost:4318/v1/traces")
