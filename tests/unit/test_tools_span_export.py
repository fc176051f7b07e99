"""Spans of actions go to the store with its token, or as those of the agent that started the server."""

from __future__ import annotations

import pytest

from runner.tools.span_export import action_provider
from spangrad.processes import MARK
from spangrad.settings import StoreSettings
from tests.support.otlp import OtlpSink

OF_OTHERS = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20of-others"}


@pytest.mark.parametrize(
    ("token", "environ", "sent"), [("own", OF_OTHERS, "Bearer own"), ("own", {}, "Bearer own"), (None, OF_OTHERS, None)]
)
def test_action_provider_sends_to_store_with_its_token(token: str | None, environ: dict[str, str], sent: str | None) -> None:
    with OtlpSink() as sink:
        assert _sent(sink, StoreSettings(otlp_endpoint=sink.url, token=token), environ) == {sent}  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("token", [None, "own"])
def test_action_provider_in_agents_process_sends_as_the_agent(token: str | None) -> None:
    with OtlpSink() as sink:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20of-agents", MARK: "host"}
        store = StoreSettings(otlp_endpoint="http://127.0.0.1:9", token=token)  # pyright: ignore[reportArgumentType]
        assert _sent(sink, store, environ) == {"Bearer of-agents"}


def _sent(sink: OtlpSink, store: StoreSettings, environ: dict[str, str]) -> set[str | None]:
    """Send a span; return the tokens of its requests."""
    provider = action_provider(store, environ)
    provider.get_tracer("test").start_span("action").end()
    provider.shutdown()
    assert [span.name for span in sink.spans] == ["action"]
    return {request.get("authorization") for request in sink.requests}
