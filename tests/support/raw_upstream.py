"""A gateway in this process before an engine that is written byte by byte: what it sends, when, and how it dies is a test's to say.

In: what agents' requests are answered with. Out: what the gateway's clients got, and what was recorded of it. Invariant: the engine is
sound but for what agents get of it, so that the gateway admits it.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from fake_engine import float32s, uint32s
from unit_gateway import Stage, staged

from benchmarks.gateway_bodies import ANSWER_TOKENS, Bodies
from benchmarks.gateway_upstream import CHAT_PATH, Answers
from fakes import SunkSpan
from spangrad import semconv

BODIES = Bodies()
QUESTION = json.loads(BODIES.request(stream=False))
EVENTS = BODIES.events(ids=True, logprobs=True)
PLAIN_EVENTS = BODIES.events(ids=False, logprobs=False)
WHOLE = BODIES.whole(ids=True, logprobs=True)
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass
class Exchange:
    """A chat request, and the connection on which it is answered."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sent: int = 0
    """Bytes that the connection has taken."""

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            self.sent += len(part)

    def die(self) -> None:
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Until the gateway has closed the connection."""
        while await self.reader.read(1):
            pass


Answer = Callable[[Exchange], Awaitable[None]]


@dataclass
class Upstream:
    """An engine that is sound but for what agents get of it."""

    answer: Answer
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    left: int = 0
    """Exchanges that the gateway ended before they were answered."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        control, probe = _CONTROL.control, _CONTROL.whole[True, True]
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
                body = await reader.readexactly(length)
                path = head.split(b" ", 2)[1]
                if path != CHAT_PATH or b'"probe"' in body:
                    writer.write(control.get(path, probe))
                    continue
                exchange = Exchange(reader, writer)
                self.exchanges.append(exchange)
                await self.answer(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            async with self.changed:
                self.left += 1
                self.changed.notify_all()
        finally:
            writer.close()


_CONTROL = Answers(BODIES)


@asynccontextmanager
async def between(answer: Answer, request_timeout_seconds: float = 60) -> AsyncGenerator[tuple[Stage, Upstream]]:
    """A gateway before an engine that answers like this."""
    upstream = Upstream(answer)
    server = await asyncio.start_server(upstream.connection, "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    try:
        async with staged(engine_url=f"http://127.0.0.1:{port}", request_timeout_seconds=request_timeout_seconds) as stage:
            await stage.readiness("serving")
            yield stage, upstream
    finally:
        server.close()


async def ask(stage: Stage, *, stream: bool) -> tuple[int, bytes, bool]:
    """Status, what came of the body, and whether that was all of it."""
    question = QUESTION | {"stream": True} if stream else QUESTION
    read = b""
    async with stage.client.post("/rollout/r/attempt/0/v1/chat/completions", json=question) as answer:
        try:
            async for part in answer.content.iter_any():
                read += part
        except aiohttp.ClientPayloadError:
            return answer.status, read, False
    return answer.status, read, True


def recorded(span: SunkSpan) -> dict[str, Any]:
    """What training would take of a call, and how it failed."""
    ids = {
        "prompt": uint32s(_bytes(span, semconv.INPUT_TOKEN_IDS)),
        "response": uint32s(_bytes(span, semconv.OUTPUT_TOKEN_IDS)),
        "logprobs": float32s(_bytes(span, semconv.OUTPUT_LOGPROBS)),
    }
    facts = {key: span.attributes.get(key) for key in (semconv.ERROR_TYPE, semconv.ABORTED, semconv.GEN_AI_FINISH_REASONS)}
    return {**ids, **facts, "status": span.status}


def of_the_first(tokens: int, *, error: str | None = None, aborted: bool | None = None) -> dict[str, Any]:
    """What must be recorded of a stream of which so many tokens came."""
    return {
        "prompt": BODIES.prompt_ids,
        "response": BODIES.response_ids[:tokens],
        "logprobs": _as_float32(BODIES.logprobs[:tokens]),
        semconv.ERROR_TYPE: error,
        semconv.ABORTED: aborted,
        semconv.GEN_AI_FINISH_REASONS: ["stop" if tokens == ANSWER_TOKENS else ""],
        "status": "ERROR" if error else "UNSET",
    }


def nothing(error: str) -> dict[str, Any]:
    """What must be recorded of a call that failed before anything came."""
    facts = {semconv.ERROR_TYPE: error, semconv.ABORTED: None, semconv.GEN_AI_FINISH_REASONS: None, "status": "ERROR"}
    return {"prompt": [], "response": [], "logprobs": [], **facts}


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


def _bytes(span: SunkSpan, key: str) -> bytes:
    value = span.attributes.get(key, b"")
    assert isinstance(value, bytes)
    return value


def _as_float32(values: Sequence[float]) -> list[float]:
    return list(struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values)))


async def before_a_sound_call(stage: Stage, upstream: Upstream) -> list[SunkSpan]:
    """The spans of the calls so far: spans arrive in order, so that they must be there when the next call's is."""
    upstream.answer = answer_whole
    await ask(stage, stream=False)

    def last() -> bool:
        return bool(stage.store.spans) and stage.store.spans[-1].attributes[semconv.SEQ] == 1

    await asyncio.to_thread(stage.store.wait_for, last)
    return stage.store.spans[:-1]


async def answer_whole(exchange: Exchange) -> None:
    await exchange.send(JSON_HEAD % len(WHOLE) + WHOLE)
