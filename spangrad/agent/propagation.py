"""Propagation of a rollout's identity between processes: in the two W3C headers, and in a process's resource attributes.

In: a context with a span and baggage. Out: `traceparent` and `baggage`, and back; OTEL_RESOURCE_ATTRIBUTES. Invariant: the W3C formats,
whatever propagators a process is configured with, because the gateway and every agent must read the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from opentelemetry import baggage, context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spangrad.semconv import ROLLOUT_ATTEMPT, ROLLOUT_ID, ROLLOUT_MODE, RUN_ID

RESOURCE_ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"
_IDENTITY = (RUN_ID, ROLLOUT_ID, ROLLOUT_MODE, ROLLOUT_ATTEMPT)


def context_from(carrier: Mapping[str, str], base: Context | None = None) -> Context:
    """Extract trace context and baggage.

    Args:
        carrier: `traceparent`, `tracestate`, `baggage`, in lower case; missing or malformed headers are ignored.
        base: the context to add to. None: the current one.
    """
    traced = TraceContextTextMapPropagator().extract(carrier, base)
    return W3CBaggagePropagator().extract(carrier, traced)


def carrier_of(source: Context | None = None) -> dict[str, str]:
    """Return the headers of a context, as `context_from` reads them; None: of the current one."""
    source = context.get_current() if source is None else source
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, source)
    W3CBaggagePropagator().inject(carrier, source)
    return carrier


def baggage_of(header: str) -> dict[str, str]:
    """Return the entries of a `baggage` header; empty where it is malformed."""
    return {key: str(value) for key, value in baggage.get_all(context_from({"baggage": header}, Context())).items()}


def with_baggage(source: Context, entries: Mapping[str, str]) -> Context:
    """Return the context with further baggage."""
    for key, value in entries.items():
        source = baggage.set_baggage(key, value, source)
    return source


def resource_variable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return OTEL_RESOURCE_ATTRIBUTES with the current rollout's identity, which SDKs of every language write on each span of a process.

    They need no processor of ours for that, and do not read TRACEPARENT. Attributes that the variable has already in `environ`, the
    environment of the process to be, are kept. Empty where the current context names no rollout.
    """
    carried = baggage.get_all()
    if ROLLOUT_ID not in carried:
        return {}
    kept = without_rollout(environ.get(RESOURCE_ATTRIBUTES, ""))
    # The SDKs of Rust and C++ decode nothing: what ids of tasks and runs often contain stays as it is.
    identity = (f"{key}={quote(str(carried[key]), safe='/:@')}" for key in _IDENTITY if key in carried)
    return {RESOURCE_ATTRIBUTES: ",".join(filter(None, [kept, *identity]))}


def without_rollout(variable: str) -> str:
    """Return a value of OTEL_RESOURCE_ATTRIBUTES without the identity of a rollout."""
    return ",".join(entry for entry in variable.split(",") if entry and entry.partition("=")[0].strip() not in _IDENTITY)
