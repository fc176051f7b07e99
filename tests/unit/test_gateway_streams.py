"""Streams as other servers than vLLM write them: other ends of lines, no space after `data:`."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.dialects import DIALECTS
from gateway.dialects.answer import EngineAnswer
from gateway.proxy.calls import _is_end
from spangrad import semconv
from spangrad.processes import free_ports
from tests.support.fake_engine import FakeEngine, Recorded
from tests.support.gateways import MESSAGES, staged

CHAT = "/v1/chat/completions"
TEXTS = ["a", "b", "c"]


def chunk(text: str) -> bytes:
    place = TEXTS.index(text)
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop" if place == 2 else None}
    return json.dumps({"id": "s", "model": "judge", "choices": [choice]}, separators=(",", ":")).encode()


def stream(end: bytes, data: bytes) -> list[bytes]:
    """The events of an answer."""
    events = [b": ping", *(b"id: 7" + end + data + chunk(text) for text in TEXTS), data + b"[DONE]"]
    return [event + end + end for event in events]


@pytest.mark.parametrize("data", [b"data: ", b"data:"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_stream_of_other_line_ends_passes_event_by_event_unchanged(end: bytes, data: bytes) -> None:
    (port,) = free_ports(1)
    seen = asyncio.Event()
    events = stream(end, data)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            seen.clear()
            await response.write(event)
            await seen.wait()
        return response

    app = web.Application()
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    judge = {"url": f"http://127.0.0.1:{port}", "policy": "judge", "kind": "openai"}
    async with staged(backends=[judge]) as stage, asyncio.timeout(30):
        async with stage.client.post(CHAT, json={"model": "judge", "messages": MESSAGES, "stream": True}) as got:
            for event in events:
                assert await got.content.readexactly(len(event)) == event
                seen.set()
            assert await got.content.read() == b""
        (span,) = await stage.spans()
    await runner.cleanup()
    whole: dict[str, Any] = json.loads(str(span.attributes[semconv.RESPONSE_JSON]))
    assert whole["choices"] == [{"index": 0, "message": {"content": "abc"}, "finish_reason": "stop"}]
    assert span.status == "UNSET"


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_stream_reader_finds_events_at_any_cut(end: bytes, at_once: int) -> None:
    reader = DIALECTS[CHAT].stream(DIALECTS[CHAT].parse(b"{}"))
    body = b"".join(stream(end, b"data: ")) + b"rest"
    given = [reader.feed(body[start : start + at_once]) for start in range(0, len(body), at_once)]
    assert b"".join(given) + reader.rest() == body
    assert reader.rest() == b"rest"
    assert [(choice.message, choice.finish_reason) for choice in reader.answer.ordered()] == [({"content": "abc"}, "stop")]


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: {}\r\n\r\nevent: message_stop\r\ndata: {}\r\n\r\n", True),
        (b"event:response.completed\ndata: {}\n\n", True),
        (b"data: [DONE]\n\ndata: {}\n\n", False),
        (b"event: message_delta\ndata: [DONE]\n\n", False),
        (b"", False),
    ],
)
def test_is_end_detects_last_event_with_any_line_end(events: bytes, end: bool) -> None:
    assert _is_end(events) is end


def answers_in_memory() -> int:
    """Return the number of engines' answers in this process."""
    return sum(isinstance(each, EngineAnswer) for each in gc.get_objects())


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
async def test_answer_of_ended_stream_is_freed_without_garbage_collection(dialect: str) -> None:
    given = json.loads((Path(__file__).parent.parent / f"fixtures/gateway/{dialect}-stream.json").read_text())
    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.answers[given["path"]] = Recorded(given["plugged"]["body"].encode(), given["plugged"]["type"])
        gc.collect()
        before = answers_in_memory()
        gc.disable()
        try:
            for _ in range(3):
                async with stage.client.post(given["path"], json=given["request"]) as answer:
                    assert answer.status == 200
                    assert await answer.read()
            await stage.spans(3)
            async with asyncio.timeout(30):
                while answers_in_memory() > before:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.1)
        finally:
            gc.enable()


async def test_stream_of_an_error_status_passes_and_is_recorded_as_failed() -> None:
    body = b"event: error\ndata: overloaded\n\n"
    async with staged(FakeEngine(answers={"/v1/messages": Recorded(body, "text/event-stream", 529)})) as stage:
        await stage.readiness("serving")
        async with stage.client.post("/v1/messages", json={"model": "policy", "messages": [], "stream": True}) as answer:
            assert (answer.status, answer.content_type, await answer.read()) == (529, "text/event-stream", body)
        (span,) = await stage.spans()
    assert (span.attributes[semconv.ERROR_TYPE], span.status) == ("529", "ERROR")


@pytest.mark.parametrize(
    ("path", "events"),
    [
        (
            "/v1/responses",
            [
                {"type": "response.output_item.added", "output_index": 0, "item": None},
                {"type": "response.output_text.delta", "output_index": 0, "delta": "x"},
            ],
        ),
        (
            "/v1/messages",
            [
                {"type": "content_block_start", "index": 0, "content_block": "x"},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
            ],
        ),
    ],
)
def test_stream_whose_parts_are_no_objects_passes_and_counts_as_failed(path: str, events: list[dict[str, Any]]) -> None:
    reader = DIALECTS[path].stream(DIALECTS[path].parse(b"{}"))
    sent = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    assert reader.feed(sent) == sent
    assert reader.answer.failed


@pytest.mark.parametrize(
    ("path", "first", "part"),
    [
        ("/v1/chat/completions", {}, {"choices": [{"index": 0, "delta": {"content": "PART"}}]}),
        (
            "/v1/chat/completions",
            {},
            {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "PART"}}]}}]},
        ),
        ("/v1/completions", {}, {"choices": [{"index": 0, "text": "PART"}]}),
        (
            "/v1/messages",
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "PART"}},
        ),
        (
            "/v1/responses",
            {"type": "response.output_item.added", "output_index": 0, "item": {}},
            {"type": "response.output_text.delta", "output_index": 0, "delta": "PART"},
        ),
    ],
)
def test_stream_of_many_parts_takes_time_by_their_number(path: str, first: dict[str, Any], part: dict[str, Any]) -> None:
    """Were each part a copy of all before it, 20 GB would be copied."""
    reader = DIALECTS[path].stream(DIALECTS[path].parse(b'{"stream": true}'))
    reader.event(b"data: " + json.dumps(first).encode())
    event = b"data: " + json.dumps(part).replace("PART", 400 * "x").encode()
    began = time.process_time()
    for _ in range(10_000):
        reader.event(event)
    assert time.process_time() - began < 4
    assert not reader.answer.failed
