"""docs/guides/direct-mode.md, the table of routes: what the openai client's spans keep of recorded answers of our vLLM."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad.settings import StoreSettings
from tests.support.built_rollouts import rows, settings_of
from tests.support.otlp import HttpServer
from transition_builder.loop import build_once

ROOT = Path(__file__).parents[2]
ANSWERS = ROOT / "tests" / "fixtures" / "gateway"
BEGIN, END = "<!-- measured by tests/integration/test_direct_mode_routes.py -->\n", "\n<!-- end -->"
ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses"}
HEAD = ["| route | answer | ids for the builder |", "| --- | --- | --- |"]


class Engine(HttpServer):
    """Gives the recorded answers."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        name = ROUTES[path] + ("-stream" if json.loads(body).get("stream") else "")
        recorded = json.loads((ANSWERS / f"{name}.json").read_text())["plugged"]
        return recorded["status"], {"content-type": recorded["type"]}, recorded["body"].encode()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Exporter of the spans that OpenInference's instrumentation of the openai client makes."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    instrumentor = OpenAIInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield kept
    instrumentor.uninstrument()


def ask(client: openai.OpenAI, route: str, stream: bool) -> None:
    """Ask, and read the answer to its end."""
    match route:
        case "/v1/chat/completions":
            answer: Any = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "say rome"}], stream=stream)
        case "/v1/completions":
            answer = client.completions.create(model="policy", prompt="say rome", stream=stream)
        case _:
            answer = client.responses.create(model="policy", input="say rome", stream=stream)
    if stream:
        list(answer)


def test_direct_mode_arrivals_by_route_match_docs_table(store: StoreSettings, spans: InMemorySpanExporter) -> None:
    asked = [(route, stream) for route in ROUTES for stream in (False, True)]
    with Engine() as engine:
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none")
        for route, stream in asked:
            ask(client, route, stream)
        client.close()
    finished = spans.get_finished_spans()
    assert len(finished) == len(asked)
    body = encode_spans(finished).SerializeToString()
    headers = {"Content-Type": "application/x-protobuf"}
    request = urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", body, headers, method="POST")
    urllib.request.urlopen(request, timeout=30).close()
    settings = settings_of(store, "routes", quiet_seconds=0)
    build_once(settings)

    lines = list[str]()
    for (route, stream), span in zip(asked, finished, strict=True):
        assert span.context is not None
        trace = f"TraceId = '{span.context.trace_id:032x}'"
        # Nobody rewarded it: a call of which the ids are known lacks nothing else.
        (reason,) = rows(store, f"SELECT Reason FROM spangrad.drops WHERE {trace} AND BuildSpec = '{settings.builder.spec}'")[0]
        assert reason in {"no_reward", "no_token_ids"}
        cells = (f"`{route}`", "a stream" if stream else "whole", "yes" if reason == "no_reward" else "no")
        lines.append(f"| {' | '.join(cells)} |")
    page = (ROOT / "docs" / "guides" / "direct-mode.md").read_text()
    measured = "\n".join([*HEAD, *lines])
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END, page.index(BEGIN))] == measured, f"\n{measured}"
