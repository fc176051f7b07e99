"""Export of the spans of actions by the servers of tools, whose processes an agent may have started.

In: settings, and the environment of the process. Out: a tracer provider that sends to the store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry.sdk.trace import TracerProvider

from span_processors.export import parse_headers, tracer_provider
from spangrad.http.service import bearer
from spangrad.settings import StoreSettings

SERVICE = "spangrad-tools"
"""Name of the servers, as `service.name` of their spans."""


def action_provider(store: StoreSettings, environ: Mapping[str, str] = os.environ) -> TracerProvider:
    """Return a provider that sends spans to the store, with its token, or else with the headers of the agent that started the process."""
    # A worker leaves its agents no token of the store, but one for spans, in these headers.
    headers = bearer(store.token) or parse_headers(environ.get("OTEL_EXPORTER_OTLP_HEADERS") or "")
    return tracer_provider(SERVICE, store.otlp_endpoint, headers)
