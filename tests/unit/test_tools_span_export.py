"""Spans of actions bear the store's token, or the headers of the agent that started the server."""

from __future__ import annotations

import pytest

from runner.tools.span_export import action_provider
from spangrad.settings import StoreSettings
from tests.support.otlp import OtlpSink

OF_AGENT = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20of-agents"}


@pytest.mark.parametrize(
    ("token", "environ", "sent"),
    [(None, OF_AGENT, "Bearer of-agents"), ("own", OF_AGENT, "Bearer own"), ("own", {}, "Bearer own"), (None, {}, None)],
)
def test_action_provider_sends_store_token_or_agent_headers(token: str | None, environ: dict[str, str], sent: str | None) -> None:
    with OtlpSink() as sink:
        provider = action_provider(StoreSettings(otlp_endpoint=sink.url, token=token), environ)  # pyright: ignore[reportArgumentType]
        provider.get_tracer("test").start_span("action").end()
        provider.shutdown()
        assert [span.name for span in sink.spans] == ["action"]
        assert {request.get("authorization") for request in sink.requests} == {sent}
