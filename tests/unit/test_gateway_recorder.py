"""When a client has its answer, the call's span is on disk: the end of the answer waits for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from fake_engine import FakeEngine, Recorded
from unit_gateway import ASKED, FullDisk, staged

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"


async def test_a_whole_answer_waits_for_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_the_event_that_ends_a_stream_waits_for_its_span(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
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
        disk.full = False
        # It comes as soon as the span is written, whatever the engine's connection does.
        with_end = await _come_so_far(answer)
        engine.go_on.set()
        assert (end in disk_was_full, end in with_end, await answer.content.read()) == (False, True, b"")
        assert [span.attributes.get("spangrad.aborted", False) for span in await stage.spans(1)] == [False]


async def _come_so_far(answer: aiohttp.ClientResponse) -> bytes:
    got = b""
    try:
        while part := await asyncio.wait_for(answer.content.readany(), 0.2):
            got += part
    except TimeoutError:
        pass  # no more comes now
    return got


async def test_a_client_that_leaves_at_the_end_of_its_answer_has_one_span_that_is_whole() -> None:
    async with staged() as stage:
        async with stage.client.post("/v1/chat/completions", json={**ASKED, "stream": True}) as answer:
            async for line in answer.content:
                if line == b"data: [DONE]\n":
                    answer.close()
                    break
        (span,) = await stage.spans(1)
        assert (span.attributes.get("spangrad.aborted", False), span.attributes["http.response.status_code"]) == (False, 200)
