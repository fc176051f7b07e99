"""A gateway in this process between fake engines, or engines that are written byte by byte, and a fake store."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from safetensors.numpy import save_file

from benchmarks.gateway_bodies import ANSWER_TOKENS, Bodies
from benchmarks.gateway_upstream import CHAT_PATH, Answers
from gateway.server import running
from gateway.vllm_plugin.middleware import PAUSED
from spangrad import semconv
from spangrad.settings.sources import load_settings
from spangrad.weights.checksums import checksum_directory
from spangrad.weights.shards import EngineReports, combine
from tests.support.fake_engine import FakeEngine, float32s, uint32s
from tests.support.otlp import OtlpSink, SunkSpan
from tests.support.processes import fetch

# The gateway in this process between a fake engine and a fake store, for its unit tests.

MESSAGES = [{"role": "user", "content": "say rome"}]
ASKED = {"model": "policy", "messages": MESSAGES, "temperature": 0.5}


@dataclass
class Stage:
    """A gateway, its neighbours and a client of it."""

    engine: FakeEngine
    engine_stops: Callable[[], Awaitable[None]]
    store: OtlpSink
    client: aiohttp.ClientSession

    async def chat(self, path: str = "", headers: dict[str, str] | None = None, **asked: Any) -> tuple[int, bytes]:
        async with self.client.post(f"{path}/v1/chat/completions", json={**ASKED, **asked}, headers=headers) as answer:
            return answer.status, await answer.read()

    async def spans(self, count: int = 1) -> list[SunkSpan]:
        await asyncio.to_thread(self.store.wait_for, lambda: len(self.store.spans) >= count)
        return self.store.spans

    async def announce(self, path: str, **announced: str | dict[str, float]) -> int:
        """Announce the attempt of a path such as `/rollout/r/attempt/0`; return the status."""
        body = {"attempts": [_attempt(path) | {"run_id": "run", "mode": "train"} | announced]}
        async with self.client.post("/attempts", json=body) as answer:
            return answer.status

    async def start_stage(self, path: str, stage: str, seconds: float) -> int:
        """Announce that an attempt begins a stage; return the status."""
        body = {"attempts": [_attempt(path) | {"stage": stage, "seconds": seconds}]}
        async with self.client.post("/attempts/stages", json=body) as answer:
            return answer.status

    async def count(self, path: str) -> tuple[int | None, bool]:
        """Return the calls of an attempt (None: it is not known), and whether the last one was too long."""
        counted = await self._counted(path)
        return counted["calls"], counted["overflowed"]

    async def ends(self, path: str) -> str:
        """Return the reason for which an attempt was closed; empty: it was not."""
        return (await self._counted(path))["closed"]

    async def _counted(self, path: str) -> dict[str, Any]:
        async with self.client.post("/attempts/calls", json={"attempts": [_attempt(path)]}) as answer:
            (counted,) = (await answer.json())["attempts"]
            assert counted["in_flight"] == 0
            return counted

    async def readiness(self, until: str) -> None:
        """Wait until /readyz says so."""
        async with asyncio.timeout(60):
            while until not in await (await self.client.get("/readyz")).text():  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)


def _attempt(path: str) -> dict[str, Any]:
    _, _, rollout, _, number = path.split("/")
    return {"rollout_id": rollout, "attempt": int(number)}


@asynccontextmanager
async def staged(engine: FakeEngine | None = None, **flags: object) -> AsyncGenerator[Stage]:
    """A gateway in this process between fakes; `flags` are settings of section gateway."""
    engine = engine or FakeEngine()
    with OtlpSink() as store, TemporaryDirectory() as spill:
        settings = load_settings(
            {
                "gateway.port": 0,
                "gateway.engine_url": f"http://127.0.0.1:{engine.port}",
                "gateway.spill_path": spill,
                "store.otlp_endpoint": store.url,
                **{f"gateway.{key}": value for key, value in flags.items()},
            },
            env={},
        )
        token = {"Authorization": f"Bearer {flags['token']}"} if "token" in flags else {}
        async with AsyncExitStack() as engine_runs:
            await engine_runs.enter_async_context(engine.running())
            async with running(settings) as gateway, aiohttp.ClientSession(gateway.url, headers=token) as client:
                yield Stage(engine, engine_runs.aclose, store, client)


# The gateway in this process before several fake engines, and what its administration says of them.


@asynccontextmanager
async def several(*engines: FakeEngine, **flags: Any) -> AsyncGenerator[Stage]:
    """A gateway before several engines, all admitted; the first is `stage.engine`."""
    async with AsyncExitStack() as stack:
        for engine in engines[1:]:
            await stack.enter_async_context(engine.running())
        listed = [{"url": f"http://127.0.0.1:{engine.port}"} for engine in engines[1:]]
        settings: dict[str, Any] = {"backends": listed, **flags}
        stage = await stack.enter_async_context(staged(engines[0], **settings))
        await all_serve(stage, 1 + len(settings["backends"]))
        yield stage


async def backends(stage: Stage) -> list[dict[str, Any]]:
    async with stage.client.get("/admin/backends") as answer:
        return (await answer.json())["backends"]


async def all_serve(stage: Stage, count: int) -> None:
    async with asyncio.timeout(60):
        while [backend["status"] for backend in await backends(stage)] != ["serving"] * count:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


async def ask(stage: Stage, method: str, path: str, body: object = None) -> tuple[int, Any]:
    async with stage.client.request(method, path, json=body) as answer:
        return answer.status, await answer.json()


def models(under: Path, count: int) -> list[Path]:
    """Model directories of so many versions, each with weights of its own."""
    directories = [under / f"v{version}" for version in range(count)]
    for version, directory in enumerate(directories):
        directory.mkdir()
        save_file({"w": np.arange(6, dtype=np.float32) + version}, directory / "model.safetensors")
    return directories


def started(weights: list[Path], count: int, kind: type[FakeEngine] = FakeEngine) -> list[FakeEngine]:
    """Engines that say which weights they were started with: the first."""
    return [kind(model=str(weights[0]), checksum=checksum_directory(weights[0])) for _ in range(count)]


def release_of(weights: list[Path], version: int, **more: object) -> dict[str, object]:
    """Return the body of a request to publish a version."""
    return {"version": version, "path": str(weights[version]), "checksum": checksum_directory(weights[version]), **more}


# Gateways that follow another one, and engines that pause as vLLM with our plugin does.


@dataclass
class GatedEngine(FakeEngine):
    """An engine whose calls wait in a pause, or are refused in one that aborts; the first token of an answer is its weights' number."""

    weights: int = 0
    """Number of the directory of `models` whose weights it holds."""
    answering: int = 0
    while_loading: int = 0
    """Calls that were being answered when weights were loaded, in all."""
    while_sleeping: int = 0
    """Calls that were being answered when it fell asleep, in all."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if (await request.json())["messages"][0]["content"] == "probe":
            return await super()._chat(request)
        while self.closed:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.002)
        if not await self._opened():
            return web.json_response(PAUSED, status=503)
        self.answering += 1
        try:
            await asyncio.sleep(0.01)
            await self.go_on.wait()
            if not await self._opened():
                return web.json_response(PAUSED, status=503)
            return await super()._chat(request)
        finally:
            self.answering -= 1

    async def _opened(self) -> bool:
        """Wait until the engine is paused no more; return False where it aborts calls instead."""
        while self.paused and self.pause_modes[-1] == "keep":  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.002)
        return not self.paused

    async def _order(self, request: web.Request) -> web.Response:
        order = await request.json()
        if request.path == "/sleep":
            self.closed = True
            while request.query["mode"] == "wait" and self.answering:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.002)
            self.while_sleeping += self.answering
        if order.get("method") == "reload_weights":
            self.while_loading += self.answering
            self.weights = int(Path(order["kwargs"]["weights_path"]).name[1:])
        return await super()._order(request)

    def whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, sampled by the weights that are held now."""
        answer = super().whole(asked)
        (answer["choices"][0]["token_ids"] or [0])[0] = self.weights
        return answer


@asynccontextmanager
async def following(controller: Stage, **flags: object) -> AsyncGenerator[Stage]:
    """A gateway that follows a stage's, before the same store."""
    with TemporaryDirectory() as spill:
        flags |= {"port": 0, "spill_path": spill, "controller": str(controller.client._base_url).rstrip("/")}
        named = {f"gateway.{key}": value for key, value in flags.items()}
        settings = load_settings({**named, "store.otlp_endpoint": controller.store.url}, env={})
        token = {"Authorization": f"Bearer {flags['token']}"} if "token" in flags else {}
        async with running(settings) as gateway, aiohttp.ClientSession(gateway.url, headers=token) as client:
            await (stage := replace(controller, client=client)).readiness("serving")
            yield stage


# A gateway in this process before an engine that is written byte by byte: what it sends, when, and how it dies is a test's to say.

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

    async def wait_closed(self) -> None:
        """Wait until the gateway has closed the connection."""
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


async def ask_raw(stage: Stage, *, stream: bool) -> tuple[int, bytes, bool]:
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
    """Return what training reads of a call's span, and its failure."""
    ids = {
        "prompt": uint32s(_bytes(span, semconv.INPUT_TOKEN_IDS)),
        "response": uint32s(_bytes(span, semconv.OUTPUT_TOKEN_IDS)),
        "logprobs": float32s(_bytes(span, semconv.OUTPUT_LOGPROBS)),
    }
    facts = {key: span.attributes.get(key) for key in (semconv.ERROR_TYPE, semconv.ABORTED, semconv.GEN_AI_FINISH_REASONS)}
    return {**ids, **facts, "status": span.status}


def of_the_first(tokens: int, *, error: str | None = None, aborted: bool | None = None) -> dict[str, Any]:
    """Return what `recorded` must give for a stream of which only the first tokens came."""
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
    """Return what `recorded` must give for a call that failed before anything came."""
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
    await ask_raw(stage, stream=False)

    def last() -> bool:
        return bool(stage.store.spans) and stage.store.spans[-1].attributes[semconv.SEQ] == 1

    await asyncio.to_thread(stage.store.wait_for, last)
    return stage.store.spans[:-1]


async def answer_whole(exchange: Exchange) -> None:
    await exchange.send(JSON_HEAD % len(WHOLE) + WHOLE)


def held_checksum(engine_url: str) -> str:
    """Checksum of the parameters that all workers of an engine hold."""
    return combine(msgspec.convert(fetch(f"{engine_url}/spangrad/checksum", {"part": "all"}), EngineReports)).checksum
