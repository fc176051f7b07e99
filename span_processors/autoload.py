"""Entry points of the wheel `spangrad` for OpenTelemetry's auto-instrumentation.

In: the process's environment, whichever distribution of OpenTelemetry is installed besides. Out: a tracer provider with our
processors. Invariant: each provider is equipped once, however many of these run and in whichever order, and nothing that
fails here reaches the agent.

Without another distribution, ours raises the span limits, samples everything and sends with `LosslessSpanProcessor` where the
SDK would have used its own OTLP exporter. With another distribution, its exporter stays; ours is added only when an OTLP
endpoint is set and no exporter is.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from opentelemetry import baggage, context, trace
from opentelemetry.instrumentation.distro import BaseDistro  # pyright: ignore[reportMissingTypeStubs]
from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # pyright: ignore[reportPrivateUsage]  # what every distribution extends
from opentelemetry.sdk.trace import TracerProvider

from span_processors.context import environment_context
from span_processors.exits import flush_at_exits
from span_processors.export import LosslessSpanProcessor, RolloutSpanProcessor, parse_headers, traces_url
from span_processors.langchain_link import link_langchain
from span_processors.websocket_link import link_websockets

_EXPORTER = "OTEL_TRACES_EXPORTER"
_CONFIG_FILE = "OTEL_CONFIG_FILE"
_SPAN_LIMIT = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
_ATTRIBUTE_COUNT_LIMIT = 100_000
"""Attribute limit of a span; OpenTelemetry's default of 128 evicts the oldest attributes first, and with them the token ids."""
_DEFAULTS = {
    _SPAN_LIMIT: str(_ATTRIBUTE_COUNT_LIMIT),
    "OTEL_ATTRIBUTE_COUNT_LIMIT": str(_ATTRIBUTE_COUNT_LIMIT),
    "OTEL_SPAN_EVENT_COUNT_LIMIT": "10000",
    "OTEL_TRACES_SAMPLER": "always_on",
}
_OTLP_EXPORTERS = frozenset({"otlp", "otlp_proto_http", "otlp_proto_grpc"})
_GRPC_PORT, _HTTP_PORT = 4317, 4318
_DEFAULT_ENDPOINT = f"http://localhost:{_HTTP_PORT}"

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_equipped: WeakSet[TracerProvider] = WeakSet()


class SpangradDistro(BaseDistro):
    """Distribution that is used when no other is installed or chosen."""

    def _configure(self, **kwargs: Any) -> None:
        set_defaults()


class SpangradConfigurator(_OTelSDKConfigurator):
    """Configurator that leaves everything to the SDK, except the OTLP exporter of spans, which is ours."""

    def _configure(self, **kwargs: Any) -> None:
        set_defaults()
        if os.environ.get(_CONFIG_FILE):
            super()._configure(**kwargs)
            _equip(export=False)
            return
        named = [name for part in os.environ.get(_EXPORTER, "").split(",") if (name := part.strip()) not in {"", "none"}]
        others = [name for name in named if name not in _OTLP_EXPORTERS]
        # Only while the SDK reads it: child processes must see what the user set.
        with _variable(_EXPORTER, ",".join(others) or "none"):
            super()._configure(**kwargs)
        _equip(export=not os.environ.get(_EXPORTER) or len(others) < len(named))


def pre_instrument() -> None:
    """Add our processors to the provider that a distribution has made, before the instrumentors see it."""
    configured = os.environ.get(_EXPORTER) or os.environ.get(_CONFIG_FILE)
    _equip(export=not configured and bool(_otlp_variable(os.environ, "ENDPOINT")))


def post_instrument() -> None:
    """Link what the instrumentors leave unconnected."""
    for link in (link_langchain, link_websockets):
        try:
            link()
        except Exception:  # an agent must start with whatever versions it has
            _logger.exception("%s failed: some spans will not be linked", link.__name__)


def set_defaults() -> None:
    """Set environment variables of the SDK that training needs, where the user has set none or, as OpenTelemetry has it, an empty value."""
    for name, value in _DEFAULTS.items():
        os.environ[name] = os.environ.get(name) or value


def otlp_url(environ: Mapping[str, str]) -> str:
    """Return the URL for spans, by OpenTelemetry's variables; a gRPC endpoint is used as OTLP/HTTP, with a warning in the log."""
    url = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or traces_url(_otlp_variable(environ, "ENDPOINT") or _DEFAULT_ENDPOINT)
    if "://" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    if parts.port == _GRPC_PORT:
        http_url = parts._replace(
            netloc=parts.netloc[: -len(str(_GRPC_PORT))] + str(_HTTP_PORT), path=parts.path.rstrip("/") or "/v1/traces"
        ).geturl()
        _logger.warning("port %d takes OTLP/gRPC; spans are sent by OTLP/HTTP to %s instead of %s", _GRPC_PORT, http_url, url)
        return http_url
    if _otlp_variable(environ, "PROTOCOL") == "grpc":
        _logger.warning("OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not used here: spans are sent by OTLP/HTTP to %s", url)
    return url


def _otlp_variable(environ: Mapping[str, str], name: str) -> str | None:
    """Return a variable of OTLP's exporters, that for spans before that for all signals."""
    return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}")


def _equip(*, export: bool) -> None:
    """Add our processors to the global provider, once."""
    try:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            _logger.warning("the tracer provider is %s, not OpenTelemetry's SDK: spans will not say their rollout", type(provider).__name__)
            return
        with _lock:
            if provider in _equipped:
                return
            _equipped.add(provider)
        if not os.environ.get(_SPAN_LIMIT):
            _logger.warning("set %s=%d: the default of 128 drops long prompts from spans", _SPAN_LIMIT, _ATTRIBUTE_COUNT_LIMIT)
        started_in = environment_context(os.environ)
        context.attach(started_in)
        provider.add_span_processor(RolloutSpanProcessor(baggage.get_all(started_in)))
        if export:
            headers, certificate = (_otlp_variable(os.environ, name) for name in ("HEADERS", "CERTIFICATE"))
            exporter = LosslessSpanProcessor(otlp_url(os.environ), parse_headers(headers or ""), certificate=certificate)
            provider.add_span_processor(exporter)
        flush_at_exits(provider)
    except Exception:  # an agent must start whatever is wrong with its telemetry
        _logger.exception("spans of this process will not be recorded for training")


@contextmanager
def _variable(name: str, value: str) -> Generator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
