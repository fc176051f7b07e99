"""Spans of forked children: sent by the child, once."""

from __future__ import annotations

import os

from span_processors.export import LosslessSpanProcessor, RolloutSpanProcessor, traces_url
from spangrad.semconv import PROCESS_ID, SEQ
from tests.support.otlp import OtlpSink
from tests.support.spans import provider_with


def test_lossless_span_processor_in_forked_child_sends_own_spans_only() -> None:
    with OtlpSink() as sink:
        processor = LosslessSpanProcessor(traces_url(sink.url), delay_seconds=60)
        provider = provider_with(processor)
        provider.add_span_processor(RolloutSpanProcessor({}))
        tracer = provider.get_tracer("test")
        tracer.start_span("parent").end()
        child = os.fork()
        if not child:  # nothing in here may raise: the child must not run pytest's remains
            tracer.start_span("child").end()
            os._exit(0 if provider.force_flush(60_000) and processor.lost == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert [span.name for span in sink.spans] == ["child"]
        assert provider.force_flush()
        in_child, in_parent = sink.spans
        assert in_parent.name == "parent"
        assert in_child.attributes[PROCESS_ID] != in_parent.attributes[PROCESS_ID]
        assert in_child.attributes[SEQ] == 0
        provider.shutdown()
