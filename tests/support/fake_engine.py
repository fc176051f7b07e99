"""A fake engine with switchable faults: vLLM 0.32 with our plugin, in the shapes of its answers.

In: what the gateway asks. Out: what vLLM would answer, a request at a time and deterministic. Invariant: fields that vLLM
writes as null when they were not asked for are null here, and chunks that it leaves out are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from gateway.vllm_plugin.middleware import CHECKSUM_PATH
from spangrad.errors import CheckpointError
from spangrad.processes import free_ports
from spangrad.weights.adapters import PREFIX
from spangrad.weights.checksums import checksum_directory, sums_of_directory
from spangrad.weights.shards import TensorSums, checksum_of
from tests.support.receivers import sums_sent

ANSWER_TEXT = "weather rome"
ANSWER_TOKENS = [(9, "weather", -0.25), (12, " rome", -0.5), (2, "", -0.125)]
PROMPT_IDS = [1, 4, 7, 12, 2, 1, 5]
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "constrained": False,
}
"""vLLM's own defaults, in the form of the plugin's field."""


@dataclass(frozen=True)
class Recorded:
    """An answer as it is to be sent, events a write."""

    body: bytes
    type: str = "application/json"
    status: int = 200


@dataclass
class FakeEngine:
    """vLLM with our plugin, as the gateway sees it: shapes of answers are those of vLLM 0.32."""

    policy: str = "policy"
    version: int = 0
    checksum: str = "float32:0000000000000000"
    warm: bool = True
    model: str = ""
    """Directory of the weights that it was started with."""
    lora_rank: int = 0
    """Largest rank of the adapters that it takes."""
    transfer: str = ""
    base: Path | None = None
    """Directory of its base, where that is another than the weights' that it was started with."""
    scope: str = "full"
    """Scope of the parameters that its checksum covers."""
    unread: dict[str, str] = field(default_factory=dict[str, str])
    """Tensors that it holds in a form that cannot be compared."""
    reports: list[list[dict[str, Any]]] | None = None
    """Reports of its workers, by replica. None: one worker holds the weights of `checksum`."""
    spoils: bool = False
    """An adapter that it refuses spoils what it had."""
    sampling: dict[str, Any] | None = None
    """Parameters in effect, as the plugin reports them. None: it does not."""
    topology: dict[str, int] = field(default_factory=dict[str, int])
    shared_state: bool = True
    started: int = 0
    port: int = field(default_factory=lambda: free_ports(1)[0])
    status: int = 200
    """Status of chat answers; anything but 200 is an error in vLLM's form, with `refusal` as its message."""
    refusal: str = "the engine says no"
    body: bytes | None = None
    """Chat answers' body, in place of the right one."""
    cut_after: int | None = None
    """Chunks of a stream after which the connection breaks."""
    error_after: int | None = None
    """Chunks of a stream after which vLLM reports an error."""
    silent_chunks: bool = False
    """Send a chunk that vLLM sends only for its ids, as a tool parser that waits causes it."""
    tool_call: bool = False
    refuses: str = ""
    """A control path (or method of /collective_rpc) that answers 500."""
    wrong_after_reload: bool = False
    ids_missing: bool = False
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers wait for it, streams after `stall_after` chunks; set at the start."""
    stall_after: int = 1
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    probed: list[str] = field(default_factory=list[str])
    """Data-parallel ranks that were asked for a probe by name."""
    parts: list[str] = field(default_factory=list[str])
    """Parts of the parameters that were asked for, in the order they came."""
    orders: list[str] = field(default_factory=list)
    """Control orders and chat requests, in the order they came."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The gateway closed a chat request before it was answered."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    paused: bool = False
    sleeping: set[str] = field(default_factory=set[str])
    """Kinds of memory that it has given away."""
    closed: bool = False
    """Calls wait: from its falling asleep until it is resumed."""
    pause_modes: list[str] = field(default_factory=list[str])
    hold_reload: asyncio.Event = field(default_factory=asyncio.Event)
    """A reload waits for it; set at the start."""
    reloading: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[str, Recorded] = field(default_factory=dict[str, "Recorded"])
    """Answers at other paths of dialects, recorded from vLLM."""
    bodies: list[bytes] = field(default_factory=list[bytes])
    """Bodies of the requests to the paths of `answers`, and to paths of no dialect."""

    def __post_init__(self) -> None:
        self._known = dict[str, dict[str, TensorSums]]()
        self.go_on.set()
        self.hold_reload.set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{dialect:completions|responses|messages}", self._recorded)
        app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
        app.router.add_route("*", "/v1/{rest:.*}", self._other)
        app.router.add_get("/spangrad/info", self._info)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_get("/get_world_size", self._world_size)
        app.router.add_post("/{order:.*}", self._order)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.policy, "object": "model"}]})

    async def _recorded(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        recorded = self.answers[request.path]
        response = web.StreamResponse(status=recorded.status, headers={"content-type": recorded.type})
        await response.prepare(request)
        *events, rest = recorded.body.split(b"\n\n")
        try:
            for place, event_bytes in enumerate(events):
                await response.write(event_bytes + b"\n\n")
                if place + 1 == self.stall_after:
                    await self.go_on.wait()
            await response.write(rest)
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response

    async def _other(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        await self.go_on.wait()
        return web.json_response({"method": request.method, "path": request.raw_path}, status=418)

    async def _info(self, request: web.Request) -> web.Response:
        served = {"policy": self.policy, "version": self.version, "tokenizer_hash": "cafe", "warm": self.warm, "model": self.model}
        adapters = {"lora_rank": self.lora_rank, "zero_adapter": "the bare adapter" if self.lora_rank else ""}
        weights = {"transfer": self.transfer, "checksum": self.scope, "dtype": self.checksum.partition(":")[0]}
        processes = {"topology": self.topology, "shared_state": self.shared_state, "started": self.started, "asleep": bool(self.sleeping)}
        return web.json_response({**served, **adapters, **weights, **processes})

    def take(self, sums: dict[str, TensorSums]) -> None:
        """Hold these weights from now on."""
        self.checksum = checksum_of(sums, next(iter(sums.values())).dtype)
        self._known[self.checksum] = sums

    def report(self, part: str) -> dict[str, Any]:
        """The report of its worker: the sums of the weights with `checksum`, which a test may have set."""
        sums = self._held()
        base = {name: each for name, each in sums.items() if not name.startswith(PREFIX)}
        held = {"all": sums, "base": base, "adapter": {name: each for name, each in sums.items() if name not in base}}[part]
        shards = [[name, [0, [[each.words, 1]]], msgspec.structs.asdict(each)] for name, each in held.items() if name not in self.unread]
        return {"shards": shards, "unread": self.unread}

    def _held(self) -> dict[str, TensorSums]:
        for directory in [self.base, *([Path(self.model), *Path(self.model).parent.iterdir()] if self.model else [])]:
            if directory and self.checksum not in self._known and any(directory.glob("*.safetensors")):
                with contextlib.suppress(CheckpointError):
                    self._known.setdefault(checksum_directory(directory), sums_of_directory(directory))
        dtype, _, total = self.checksum.partition(":")
        return self._known.get(self.checksum) or {"w": TensorSums(dtype, 6, int(total, 16), 0)}

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _order(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body.get("method", request.path)
        self.orders.append(name)
        if name == self.refuses:
            return web.Response(status=500, text="Internal Server Error")
        if name == "/pause":
            self.paused = True
            self.pause_modes.append(request.query.get("mode", "abort"))
        elif name == "/sleep":
            self.closed, self.sleeping = True, {"weights", "kv_cache"}
            if request.query["level"] == "2":
                self.checksum = "float32:0000000000000000"
        elif name == "/wake_up":
            self.sleeping.discard(request.query["tags"])
        elif name == "/resume":
            self.paused = self.closed = False
        elif name == "/update_weight_version":
            self.version, self.model = int(body["new_version"]), ""
        elif name == "reload_weights":
            self.reloading.set()
            await self.hold_reload.wait()
            self.take(sums_of_directory(Path(body["kwargs"]["weights_path"])))
            if self.wrong_after_reload:
                self.checksum = "float32:ffffffffffffffff"
        elif name == "/update_weights":
            update = body["update_info"]
            over_http = "ranks" in update
            self.take(
                await asyncio.to_thread(sums_sent, update) if over_http else {"other": TensorSums(self.checksum.partition(":")[0], 1, 1, 1)}
            )
        elif name == CHECKSUM_PATH:
            self.parts.append(body["part"])
            return web.json_response({"replicas": self.reports or [[self.report(body["part"])]]})
        return web.json_response({"results": [None]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Vllm reads the new adapter before it lets go of the old one."""
        body = await request.json()
        self.orders.append("load_lora_adapter")
        self.bodies.append(json.dumps(body).encode())
        if self.refuses == "load_lora_adapter":
            if self.spoils:
                self.checksum = "float32:ffffffffffffffff"
            return web.json_response({"error": {"message": "unexpected modules", "code": 500}}, status=500)
        bare = body["lora_path"] == "the bare adapter"
        self.take(sums_of_directory(Path(body["lora_path"]) if not bare else self.base or Path(self.model)))
        return web.Response(text="Success: LoRA adapter 'policy' added successfully.")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        probe = asked["messages"][0]["content"] == "probe"
        self.orders.append("probe" if probe else "chat")
        if probe and "X-data-parallel-rank" in request.headers:
            self.probed.append(request.headers["X-data-parallel-rank"])
        if not probe:
            self.requests.append(asked)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.arrived.set()
        try:
            if self.status != 200 and not probe:
                error = {"message": self.refusal, "type": "BadRequestError", "param": None, "code": self.status}
                return web.json_response({"error": error}, status=self.status)
            if self.body is not None and not probe:
                return web.Response(body=self.body, content_type="application/json")
            if asked.get("stream"):
                return await self._stream(request, asked)
            if not probe:
                await self.go_on.wait()
            return web.json_response(self.whole(asked), headers={"x-request-id": "r-1"})
        except asyncio.CancelledError:
            self.left.set()
            raise

    def facts(self, choices: int = 0) -> dict[str, Any]:
        """Our field: of an answer with so many choices, or of one that has begun (0)."""
        versions = {"versions": [[[0, self.version]]] * choices} if choices else {}
        sampling = {"sampling": self.sampling} if choices and self.sampling else {}
        return {"policy": self.policy, "tokenizer_hash": "cafe", **versions, **sampling}

    def whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The whole answer to a request, as vLLM with the plugin gives it."""
        ids = bool(asked.get("return_token_ids")) and not self.ids_missing
        message: dict[str, Any] = {"role": "assistant", "content": ANSWER_TEXT, "refusal": None, "reasoning": None}
        if self.tool_call:
            message |= {"content": "", "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
        count = asked.get("n", 1)
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1700000000,
            "model": asked["model"],
            "choices": [
                {
                    "index": index,
                    "message": message,
                    "logprobs": {"content": [_logprob(token) for token in ANSWER_TOKENS]} if asked.get("logprobs") else None,
                    "finish_reason": "tool_calls" if self.tool_call else "stop",
                    "stop_reason": None,
                    "token_ids": [token[0] + 100 * index for token in ANSWER_TOKENS] if ids else None,
                }
                for index in range(count)
            ],
            "usage": {"prompt_tokens": 7, "total_tokens": 7 + 3 * count, "completion_tokens": 3 * count},
            "prompt_logprobs": None,
            "prompt_token_ids": PROMPT_IDS if ids else None,
            "spangrad": self.facts(count),
        }

    def chunks(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of the stream that answers a request, as vLLM with the plugin gives them."""
        ids, logprobs = asked.get("return_token_ids"), asked.get("logprobs")
        indices = range(asked.get("n", 1))
        first = [
            _chunk(asked, {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})
            | {"prompt_token_ids": PROMPT_IDS if ids else None}
            for i in indices
        ]
        deltas: list[dict[str, Any]] = [{"content": token[1]} for token in ANSWER_TOKENS]
        if self.tool_call:
            start = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{"}}
            deltas = [{"tool_calls": [start]}, {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, {"content": ""}]
        if self.silent_chunks:
            deltas[1] = {}
        rest: list[dict[str, Any]] = []
        for place, (token, delta) in enumerate(zip(ANSWER_TOKENS, deltas, strict=True)):
            last = place == len(ANSWER_TOKENS) - 1
            if not delta and not ids and not logprobs and not last:
                continue
            for i in indices:
                choice = {
                    "index": i,
                    "delta": delta,
                    "logprobs": {"content": [_logprob(token)]} if logprobs else None,
                    "finish_reason": ("tool_calls" if self.tool_call else "stop") if last else None,
                    **({"stop_reason": None} if last else {}),
                    "token_ids": [token[0] + 100 * i] if ids else None,
                }
                rest.append(_chunk(asked, choice))
        usage = {"prompt_tokens": 7, "total_tokens": 7 + 3 * len(indices), "completion_tokens": 3 * len(indices)}
        if (asked.get("stream_options") or {}).get("include_usage"):
            rest.append(_chunk(asked) | {"usage": usage})
        return [*first, *rest]

    async def _stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        chunks = self.chunks(asked)
        chunks[0]["spangrad"] = self.facts()
        chunks[-1]["spangrad"] = self.facts(asked.get("n", 1))
        for place, chunk in enumerate(chunks):
            if place == self.cut_after:
                assert request.transport
                request.transport.abort()
                return response
            if place == self.error_after:
                chunk = {"error": {"message": "the engine broke", "type": "InternalServerError", "param": None, "code": 500}}
            await response.write(event(chunk))
            if place == self.error_after:
                break
            if place + 1 == self.stall_after:
                await self.go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


def event(chunk: dict[str, Any]) -> bytes:
    """A server-sent event, written as vLLM writes it."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _chunk(asked: dict[str, Any], *choices: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": asked["model"], "choices": list(choices)}


def _logprob(token: tuple[int, str, float]) -> dict[str, Any]:
    return {"token": token[1], "logprob": token[2], "bytes": list(token[1].encode()), "top_logprobs": []}


def uint32s(data: bytes) -> list[int]:
    """Little-endian uint32 values, as spans carry token ids."""
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def float32s(data: bytes) -> list[float]:
    """Little-endian float32 values, as spans carry logprobs."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))
