"""Connections of the library `websockets` in an agent: their opening requests have the trace context of the rollout."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from runner.sessions.server import running
from runner.sessions.shards import ShardCommand
from spangrad import semconv
from tests.support.otlp import OtlpSink
from tests.support.runners import environment_service_settings

AGENTS = Path(__file__).resolve().parent.parent / "agents"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STARTED_FOR = {"TRACEPARENT": f"00-{TRACE_ID}-{PARENT_ID}-01", "BAGGAGE": "spangrad.rollout.id=r1"}
ASYNC = """
import asyncio, json, sys
from opentelemetry import trace
from websockets.asyncio.client import connect

async def play():
    async with connect(sys.argv[1], additional_headers={"X-Own": "kept"}) as environment:
        for message in ({"type": "reset", "data": {"secret": 5}}, {"type": "step", "data": {"text": "5"}}):
            await environment.send(json.dumps(message))
            print(json.loads(await environment.recv())["data"]["done"])

with trace.get_tracer("agent").start_as_current_span("agent"):
    asyncio.run(play())
"""
SYNC = """
import json, sys
from opentelemetry import trace
from websockets.sync.client import connect

with trace.get_tracer("agent").start_as_current_span("agent"):
    with connect(sys.argv[1]) as environment:
        for message in ({"type": "reset", "data": {"secret": 5}}, {"type": "step", "data": {"text": "5"}}):
            environment.send(json.dumps(message))
            print(json.loads(environment.recv())["data"]["done"])
"""
OWN_HEADERS = 'Headers([("Traceparent", "00-' + "1" * 32 + "-" + "2" * 16 + '-01"), ("X-Own", "one"), ("X-Own", "two")])'
OWN_TRACE = "from websockets.datastructures import Headers\n" + ASYNC.replace('{"X-Own": "kept"}', OWN_HEADERS)


async def played(program: str, directory: Path, endpoint: str) -> None:
    """Run a program under opentelemetry-instrument, which plays an environment that is served, to the end."""
    file = directory / "agent.py"
    file.write_text(program)
    command = {"game": ShardCommand("guess_game:Guess", AGENTS, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})}
    async with running(environment_service_settings(), command, 1, 8) as url:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("opentelemetry-instrument")),
            sys.executable,
            str(file),
            f"{url.replace('http', 'ws')}/ws",
            env={"PATH": "/usr/bin:/bin", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **STARTED_FOR},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert (process.returncode, output) == (0, b"False\nTrue\n")


@pytest.mark.parametrize("program", [ASYNC, SYNC], ids=["async", "sync"])
async def test_websocket_of_an_agent_carries_its_trace_context(tmp_path: Path, program: str) -> None:
    with OtlpSink() as sink:
        await played(program, tmp_path, sink.url)
        spans = {span.name: span for span in sink.spans}
    assert {name: span.trace_id for name, span in spans.items()} == dict.fromkeys(("agent", "reset", "execute_tool step"), TRACE_ID)
    assert spans["agent"].parent_id == PARENT_ID
    assert spans["reset"].parent_id == spans["execute_tool step"].parent_id == spans["agent"].span_id
    assert {span.attributes[semconv.ROLLOUT_ID] for span in spans.values()} == {"r1"}


async def test_websocket_of_an_agent_keeps_its_own_headers(tmp_path: Path) -> None:
    with OtlpSink() as sink:
        await played(OWN_TRACE, tmp_path, sink.url)
        traces = {span.name: span.trace_id for span in sink.spans}
    assert traces == {"agent": TRACE_ID, "reset": "1" * 32, "execute_tool step": "1" * 32}
