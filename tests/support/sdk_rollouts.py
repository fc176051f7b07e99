"""Rollouts as OpenTelemetry's own SDK tells of them: spans with exceptions and events, log records, sent to a store by OTLP/HTTP.

In: a store, a run. Out: what an agent with tools would leave there. Invariant: ids, events, exceptions and logs are the SDK's, unchanged.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from gateway.recorder.record import SAMPLING_DEFAULTS
from spangrad import semconv
from spangrad.settings import StoreSettings


class SdkRollout:
    """One rollout: its root is open as long as it is entered, and each call asks for one tool."""

    def __init__(self, store: StoreSettings, run: str, name: str, calls: int) -> None:
        """Name a rollout of a run, whose root will say how many calls it has."""
        resource = Resource({"service.name": "sdk-agent", "service.instance.id": f"{run}-{name}"})
        self._traces, self._logs = TracerProvider(resource=resource), LoggerProvider(resource=resource)
        self._traces.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{store.otlp_endpoint}/v1/traces")))
        self._logs.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(f"{store.otlp_endpoint}/v1/logs")))
        self._facts = {semconv.RUN_ID: run, semconv.ROLLOUT_ID: f"{run}-{name}", semconv.ROLLOUT_MODE: "train"}
        self._root = {
            semconv.GROUP_ID: f"{run}-group",
            semconv.GROUP_SIZE: "1",
            semconv.TASK_ID: "task",
            semconv.ROLLOUT_CALLS: str(calls),
            semconv.ROLLOUT_FINAL: "true",
        }

    @contextmanager
    def running(self, reward: float = 1.0) -> Generator[SdkRollout]:
        """Open the root span; its reward is written when it ends."""
        try:
            with self._traces.get_tracer("spangrad.runner").start_as_current_span(
                "rollout", attributes={**self._facts, **self._root}
            ) as root:
                yield self
                root.add_event(semconv.EVALUATION_EVENT, {semconv.EVALUATION_NAME: "reward", semconv.EVALUATION_SCORE: reward})
        finally:
            self._traces.shutdown()
            self._logs.shutdown()

    def call(self) -> None:
        """A call that the gateway recorded."""
        arrays = {
            semconv.INPUT_TOKEN_IDS: struct.pack("<2I", 1, 2),
            semconv.OUTPUT_TOKEN_IDS: struct.pack("<2I", 3, 4),
            semconv.OUTPUT_LOGPROBS: struct.pack("<2f", -0.5, -0.25),
        }
        facts: dict[str, str | int | float] = {
            **self._facts,
            semconv.POLICY_NAME: "policy",
            semconv.POLICY_VERSIONS: "[[[0,3]]]",
            **dict(SAMPLING_DEFAULTS.values()),
            semconv.SAMPLING_CONSTRAINED: False,
            semconv.HTTP_STATUS: 200,
            **{name: base64.b64encode(value).decode() for name, value in arrays.items()},
        }
        with self._traces.get_tracer(semconv.GATEWAY_SCOPE).start_as_current_span("chat", attributes=facts):
            pass

    def tool(self, name: str, run: Callable[[], None], **attributes: str) -> None:
        """A tool that the call before it caused; what it raises ends in its span, and the agent goes on."""
        facts = {**self._facts, semconv.OPENINFERENCE_KIND: "TOOL", semconv.OPENINFERENCE_TOOL_NAME: name, **attributes}
        try:
            with self._traces.get_tracer("openinference.instrumentation.langchain").start_as_current_span(name, attributes=facts):
                run()
        except Exception as error:  # the agent tells its model
            self.log(SeverityNumber.DEBUG, f"the tool failed: {error}")

    def log(self, severity: SeverityNumber, body: str) -> None:
        """Write a log record in the span that is open."""
        self._logs.get_logger("agent").emit(LogRecord(severity_number=severity, severity_text=severity.name, body=body))


def add_event(name: str, **attributes: str) -> None:
    """Add an event to the span that is open."""
    trace.get_current_span().add_event(name, attributes)
