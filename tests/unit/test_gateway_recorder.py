"""Spans of the recorder: the end of an answer waits until the call's span is on disk, and every counted call has a span."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from gateway.proxy import calls
from tests.support.fake_engine import FakeEngine, Recorded
from tests.support.gateways import ASKED, staged
from tests.support.otlp import FullDisk

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"


async def test_recorder_whole_answer_waits_for_span_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    async with staged() as stage:
        call = asyncio.create_task(stage.chat())
        await disk.refused.wait()
        await asyncio.wait({call}, timeout=0.1)
        assert not call.done()
        disk.full = False
        status, _ = await call
        assert (status, len(await stage.spans(1))) == (200, 1)


@pytest.mark.parametrize("name", ["chat-stream", "completions-stream", "messages-stream", "responses-stream"])
async def test_recorder_last_event_of_stream_waits_for_span_on_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Streams as a real vLLM sent them, over connections that it leaves open for a while."""
    given = json.loads((GOLDEN / f"{name}.json").read_text())
    body = given["plugged"]["body"].encode()
    last_event = body[: -len(b"\n\n")].rpartition(b"\n\n")[2]
    end = b"[DONE]" if b"[DONE]" in last_event else last_event.partition(b"\n")[0]
    disk, engine = FullDisk(monkeypatch), FakeEngine(stall_after=body.count(b"\n\n"))
    engine.answers[given["path"]] = Recorded(body, given["plugged"]["type"])
    engine.go_on.clear()
    async with staged(engine) as stage, asyncio.timeout(20), stage.client.post(given["path"], json=given["request"]) as answer:
        await disk.refused.wait()
        disk_was_full = await _come_so_far(answer)
        assert end not in disk_was_full
        disk.full = False
        # It comes as soon as the span is written, whatever the engine's connection does.
        with_end = disk_was_full
        while end not in with_end or not with_end.endswith(b"\n\n"):
            with_end += (part := await answer.content.readany())
            assert part, "the answer has no end"
        engine.go_on.set()
        assert await answer.content.read() == b""
        assert [span.attributes.get("spangrad.aborted", False) for span in await stage.spans(1)] == [False]


async def _come_so_far(answer: aiohttp.ClientResponse) -> bytes:
    got = b""
    try:
        while part := await asyncio.wait_for(answer.content.readany(), 0.2):
            got += part
    except TimeoutError:
        pass  # no more comes now
    return got


async def test_recorder_client_leaving_at_end_of_answer_has_one_whole_span() -> None:
    async with staged() as stage:
        async with stage.client.post("/v1/chat/completions", json={**ASKED, "stream": True}) as answer:
            async for line in answer.content:
                if line == b"data: [DONE]\n":
                    answer.close()
                    break
        (span,) = await stage.spans(1)
        assert (span.attributes.get("spangrad.aborted", False), span.attributes["http.response.status_code"]) == (False, 200)


async def test_recorder_failure_leaves_minimal_span_and_client_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bytes:
        raise OverflowError("the words of the call")

    path = "/rollout/r1/attempt/2"
    async with staged() as stage:
        await stage.announce(path)
        monkeypatch.setattr(calls, "build_span", fails)
        status, body = await stage.chat(path)
        (span,) = await stage.spans()
        assert await stage.count(path) == (1, False)
    assert (status, json.loads(body)["choices"][0]["finish_reason"]) == (200, "stop")
    process = span.attributes.pop("spangrad.process.id")
    assert isinstance(process, str)
    assert (span.name, span.status, span.attributes) == (
        "chat",
        "ERROR",
        {
            "gen_ai.operation.name": "chat",
            "http.route": "/v1/chat/completions",
            "gen_ai.provider.name": "vllm",
            "spangrad.backend.name": "policy-0",
            "spangrad.run.id": "run",
            "spangrad.rollout.id": "r1",
            "spangrad.rollout.attempt": 2,
            "spangrad.rollout.mode": "train",
            "spangrad.seq": 0,
            "http.response.status_code": 200,
            "error.type": "gateway_error",
        },
    )


async def test_gateway_too_deeply_nested_request_is_refused_and_not_counted() -> None:
    deep = b'{"model": "policy", "messages": [], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    path = "/rollout/r1/attempt/0"
    async with staged() as stage:
        await stage.announce(path)
        async with stage.client.post(f"{path}/v1/chat/completions", data=deep) as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["message"]) == (400, "the request is not a JSON object: it is nested too deeply")
        assert await stage.count(path) == (0, False)
        async with stage.client.post("/v1/embeddings", data=deep) as answer:
            assert (answer.status, stage.engine.bodies) == (418, [deep])
