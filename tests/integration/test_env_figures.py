"""Figures of served episodes by SQL: the query of the guide over what the spans of resets and steps hold."""

from __future__ import annotations

import asyncio
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace

from runner.sessions.server import running
from runner.sessions.shards import ShardCommand
from spangrad.episode.adapters import openenv_server
from spangrad.episode.adapters.openenv_server import OpenEnvServer, RemoteStepError
from spangrad.semconv import RUN_ID
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.runners import environment_service_settings, until

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "tests" / "agents"
(QUERY,) = (
    block for block in re.findall(r"```sql\n(.+?)```", (ROOT / "docs/guides/environments.md").read_text(), re.S) if "MeanReturn" in block
)


def episode(url: str, run: str, *guesses: str) -> None:
    """An episode in the trace of a rollout."""
    parent = trace.NonRecordingSpan(trace.SpanContext(uuid.uuid4().int, 9, False, trace.TraceFlags(1)))
    token = context.attach(baggage.set_baggage(RUN_ID, run, trace.set_span_in_context(parent)))
    try:
        environment = OpenEnvServer([url])
        environment.reset({"secret": 2})
        for guess in guesses:
            try:
                environment.step(guess)
            except RemoteStepError:
                assert guess == "raise"
        environment.close()
    finally:
        context.detach(token)


async def test_figures_of_served_episodes_by_the_query_of_the_guide(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (f"figures-{uuid.uuid4().hex}" for _ in range(2))
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": store.otlp_endpoint}
    async with running(environment_service_settings(), {"game": ShardCommand("guess_game:Guess", AGENTS, variables)}, 1, 8) as url:
        await asyncio.to_thread(episode, url, first, "7", "8", "2")
        await asyncio.to_thread(episode, url, first, "sleep")
        # A client that records no rewards: the spans of the service have them.
        monkeypatch.setattr(openenv_server, "REWARDS_HEADER", "Unread")
        await asyncio.to_thread(episode, url, second, "raise", "2")
    client = connect(store)

    def figures() -> dict[str, list[Any]]:
        return {run: rest for run, *rest in client.query(QUERY).result_rows if run in {first, second}}

    try:
        await until(lambda: asyncio.to_thread(lambda: sum(row[3] for row in figures().values()) == 6))
        delivered = "INSERT INTO otel.otel_traces SELECT * FROM otel.otel_traces WHERE SpanAttributes['spangrad.run.id'] = {run:String}"
        client.command(delivered, parameters={"run": first})  # a second time: they count once
        rows = figures()
        assert {run: tuple(row[:6]) for run, row in rows.items()} == {
            first: ("", 2, 1, 4, 2.0, (0.25 + 0.25 + 1.0 + 0.25) / 2),
            second: ("", 1, 1, 2, 2.0, 1.0),
        }
        assert rows[first][6] >= 0.5
    finally:
        client.close()
