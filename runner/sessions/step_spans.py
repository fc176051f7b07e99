"""Spans of resets and steps that a served environment plays, in the traces of its users.

In: the trace context of a request, what was played. Out: spans by OTLP. Invariant: a request without a trace context costs nothing; a step
has one reward in its trace: where the client records the rewards, the server's span carries a copy that counts for nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from runner.sessions.messages import SessionOpening, SessionRequest
from span_processors.export import parse_headers, tracer_provider
from spangrad import semconv
from spangrad.agent.propagation import context_from
from spangrad.episode.environment import Content, StepResult, as_text

SERVICE = "spangrad-environments"


@dataclass(frozen=True, slots=True)
class PlayedSpan:
    """Span of a reset or a step that has begun."""

    span: Span
    rewards: bool
    """True if its reward counts."""

    def end(self, result: StepResult | None, content: Content, error: str = "") -> None:
        """Record the result of a step (None: it was a reset, or failed), the observation's content, and the error, if there was one."""
        if error:
            self.span.set_status(Status(StatusCode.ERROR, error))
        else:
            name = semconv.GEN_AI_TOOL_RESULT if self.rewards and result else semconv.EPISODE_OBSERVATION
            self.span.set_attribute(name, as_text(content))
        if result is not None:
            self.span.set_attribute(semconv.EPISODE_DONE, result.done)
            if result.reward is not None and self.rewards:
                score = {semconv.EVALUATION_NAME: semconv.REWARD_NAME, semconv.EVALUATION_SCORE: float(result.reward)}
                self.span.add_event(semconv.EVALUATION_EVENT, score)
            elif result.reward is not None:
                self.span.set_attribute(semconv.EPISODE_STEP_REWARD, float(result.reward))
        self.span.end()


class PlayedSpans:
    """Source of the spans of one process; OpenTelemetry's variables say where they go."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._endpoint = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        self._headers = parse_headers(environ.get("OTEL_EXPORTER_OTLP_HEADERS") or "")
        self._provider: TracerProvider | None = None
        self._creating = threading.Lock()

    def begin(self, request: SessionRequest, opening: SessionOpening, attributes: Mapping[str, str | int]) -> PlayedSpan | None:
        """Begin the span of a reset or a step. None: it belongs to no trace, or spans are sent nowhere."""
        name, rewards = request.type, not opening.client_rewards
        carrier = {**opening.carrier, "traceparent": request.traceparent} if request.traceparent else opening.carrier
        if self._endpoint is None or "traceparent" not in carrier:
            return None
        with self._creating:  # sessions begin their first spans in threads of their own
            if self._provider is None:
                self._provider = tracer_provider(SERVICE, self._endpoint, self._headers)
        source = context_from(carrier, Context())
        known = dict(attributes)
        if rewards and name == "step":
            known |= {semconv.GEN_AI_OPERATION: "execute_tool", semconv.GEN_AI_TOOL_NAME: name}
            name = f"execute_tool {name}"
        tracer = self._provider.get_tracer(semconv.EPISODE_SCOPE)
        return PlayedSpan(tracer.start_span(name, source, SpanKind.SERVER, known), rewards)

    def close(self) -> None:
        """Send what is left, in bounded time."""
        if self._provider is not None:
            self._provider.shutdown()
