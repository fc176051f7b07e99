"""Export of the spans of actions by the servers of tools, whose processes an agent may have started.

In: settings, and the environment of the process. Out: a tracer provider that sends to the store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry.sdk.trace import TracerProvider

from span_processors.export import parse_headers, tracer_provider
from spangrad.http.service import bearer
from spangrad.processes import MARK
from spangrad.settings import StoreSettings

SERVICE = "spangrad-tools"
"""Name of the servers, as `service.name` of their spans."""


def action_provider(store: StoreSettings, environ: Mapping[str, str] | None = None) -> TracerProvider:
    """Return a provider that sends spans to the store; in a process that a worker's agent started, as the agent sends its own."""
    environ = os.environ if environ is None else environ
    if MARK in environ and (endpoint := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        # The agent has neither the worker's settings nor the store's token, but an address and a token for spans.
        return tracer_provider(SERVICE, endpoint, parse_headers(environ.get("OTEL_EXPORTER_OTLP_HEADERS") or ""))
    return tracer_provider(SERVICE, store.otlp_endpoint, bearer(store.token))
