"""The agent of the rollouts benchmark: a span of its own, and a reward, at once."""

from __future__ import annotations

from opentelemetry import trace

_TRACER = trace.get_tracer("benchmarks.rollouts_agent")


def agent(task: object) -> float:
    """Return the reward."""
    with _TRACER.start_as_current_span("agent"):
        return 1.0
