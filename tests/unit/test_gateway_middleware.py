"""The middleware inside vLLM, around an application that answers as vLLM does."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from gateway.vllm_plugin import middleware as middleware_module
from gateway.vllm_plugin.middleware import PAUSED, SpangradMiddleware
from gateway.vllm_plugin.request_fields import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH, with_ids
from gateway.vllm_plugin.state import EngineState, write_state
from spangrad.weights.checksums import tokenizer_hash
from tests.support.fake_engine import SAMPLING, FakeEngine, event

ADAPTERS = {"policy": SimpleNamespace(load_inplace=True)}
"""Adapter that vLLM keeps by its name, loaded in place."""
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "say rome"}]}


@dataclass
class Sampling:
    """vLLM's sampling parameters."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class EngineClient:
    """vLLM's engine client: all choices of three tokens at once, the last of which has the label of the weights at that time."""

    first = label = "default"
    errored = False

    async def generate(self, prompt: object, sampling_params: Sampling) -> AsyncGenerator[Any, None]:
        spans = [SimpleNamespace(version=self.first, start=0, end=2), SimpleNamespace(version=self.label, start=2, end=3)]
        completions = [SimpleNamespace(index=i, finish_reason="stop", weight_versions=spans) for i in range(sampling_params.n)]
        yield SimpleNamespace(outputs=completions)


class Vllm:
    """An ASGI application: what it was asked, and answers from the fake engine, without our field."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.state = SimpleNamespace(
            engine_client=EngineClient(),
            openai_serving_models=SimpleNamespace(lora_requests=ADAPTERS),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(
                    _api_process_count=1, data_parallel_size=1, tensor_parallel_size=2, pipeline_parallel_size=1
                ),
                model_config=SimpleNamespace(dtype="torch.bfloat16"),
                scheduler_config=SimpleNamespace(max_num_seqs=128),
            ),
        )
        self.asked: list[Any] = []
        self.refuses = False
        self.before_last = asyncio.Event()
        self.before_last.set()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        assert dict(scope["headers"]).get(b"content-length", b"0") == str(len(message["body"])).encode()
        if scope["path"] == "/update_weight_version" and not self.refuses:
            self.state.engine_client.label = json.loads(message["body"])["new_version"]
        if scope["path"] not in (CHAT_PATH, COMPLETIONS_PATH):
            await self._send(send, 500 if self.refuses else 200, b"application/json", [b"{}"])
            return
        self.asked.append(message["body"])
        if self.refuses:
            await self._send(send, 400, b"application/json", [b'{"error":{}}'])
            return
        request = json.loads(message["body"])
        if request.get("stream"):
            chunks = [event(chunk) for chunk in self.engine.chunks(request)]
            await self._send(send, 200, b"text/event-stream; charset=utf-8", [*chunks, b"data: [DONE]\n\n"])
        else:
            answer = self.engine.whole(request)
            del answer["spangrad"]
            await self._send(send, 200, b"application/json", [json.dumps(answer).encode()])

    async def _send(self, send: Any, status: int, kind: bytes, parts: list[bytes]) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(sum(map(len, parts))).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await self.before_last.wait()
        if self.asked and not self.refuses:
            async for _ in self.state.engine_client.generate("prompt", Sampling(n=json.loads(self.asked[-1]).get("n", 1))):
                pass
        await send({"type": "http.response.body", "body": parts[-1], "more_body": False})


@pytest.fixture
def vllm() -> Vllm:
    return Vllm()


@pytest.fixture
def middleware(vllm: Vllm, plugin_environment: None) -> SpangradMiddleware:
    return SpangradMiddleware(vllm)


async def call(
    middleware: SpangradMiddleware, path: str, body: object = None, method: str = "POST", headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[bytes, bytes], list[bytes]]:
    """Status, headers and the parts of the body as they were sent."""
    sent: list[dict[str, Any]] = []
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    incoming = [{"type": "http.request", "body": raw[:5], "more_body": True}, {"type": "http.request", "body": raw[5:], "more_body": False}]

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(b"content-length", str(len(raw)).encode()), *((name.encode(), value.encode()) for name, value in headers.items())],
        "app": middleware.app,
    }
    await middleware(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), [message["body"] for message in sent[1:]]


def field(middleware: SpangradMiddleware, *versions: tuple[int, int], choices: int = 1) -> dict[str, Any]:
    """Our field: of an answer whose choices have these versions; without any, of one that has begun."""
    complete = {"versions": [[list(pair) for pair in versions]] * choices, "sampling": SAMPLING} if versions else {}
    return {"policy": "policy", "tokenizer_hash": middleware.tokenizer_hash, **complete}


async def test_middleware_whole_answer_gets_ids_and_spangrad_field(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    status, headers, parts = await call(middleware, CHAT_PATH, ASKED)
    expected = vllm.engine.whole({**ASKED, "return_token_ids": True, "logprobs": True}) | {"spangrad": field(middleware, (0, 3))}
    assert (status, json.loads(parts[0])) == (200, expected)
    assert headers[b"content-length"] == str(len(parts[0])).encode()


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}], ids=str)
async def test_middleware_stream_has_field_in_first_and_last_chunk(
    vllm: Vllm, middleware: SpangradMiddleware, extra: dict[str, Any]
) -> None:
    asked = {**ASKED, **extra, "stream": True}
    _, _, parts = await call(middleware, CHAT_PATH, asked)
    chunks = vllm.engine.chunks({**asked, "return_token_ids": True, "logprobs": True})
    chunks[0]["spangrad"] = field(middleware)
    chunks[-1]["spangrad"] = field(middleware, (0, 3), choices=extra.get("n", 1))
    assert b"".join(parts) == b"".join(map(event, chunks)) + b"data: [DONE]\n\n"


async def test_middleware_stream_delays_only_possible_last_chunk(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    vllm.before_last.clear()
    sent: list[bytes] = []
    middleware_send = asyncio.create_task(call_into(middleware, {**ASKED, "stream": True}, sent))
    await asyncio.wait({middleware_send}, timeout=0.05)
    # The role, two tokens; the token with the finish reason waits for [DONE].
    assert [b'"finish_reason":null' in part for part in sent] == [True, True, True]
    vllm.before_last.set()
    await middleware_send
    assert len(sent) == 4


async def call_into(middleware: SpangradMiddleware, body: object, sent: list[bytes]) -> None:
    raw = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    await middleware({"type": "http", "method": "POST", "path": CHAT_PATH, "headers": [], "app": middleware.app}, receive, send)


async def test_middleware_stream_of_one_chunk_has_field_once(
    vllm: Vllm, middleware: SpangradMiddleware, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"error": {"message": "broke"}}
    monkeypatch.setattr(vllm.engine, "chunks", lambda asked: [error])
    _, _, parts = await call(middleware, CHAT_PATH, {**ASKED, "stream": True})
    assert b"".join(parts) == event({**error, "spangrad": field(middleware, (0, 3))}) + b"data: [DONE]\n\n"


async def test_middleware_errors_and_other_paths_pass_unchanged(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    vllm.refuses = True
    assert (await call(middleware, CHAT_PATH, ASKED))[::2] == (400, [b'{"error":{}}'])
    assert (await call(middleware, "/tokenize", {}))[::2] == (500, [b"{}"])
    assert (await call(middleware, CHAT_PATH, b"[" * 100_000))[::2] == (400, [b'{"error":{}}'])


async def test_middleware_reads_long_body_in_linear_time(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    vllm.refuses = True
    count = 512  # uvicorn hands on what has arrived, 64 KiB at a time
    incoming = iter([{"type": "http.request", "body": bytes(2**16), "more_body": left > 0} for left in reversed(range(count))])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(incoming)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    size = str(count * 2**16).encode()
    scope = {"type": "http", "method": "POST", "path": CHAT_PATH, "query_string": b"", "headers": [(b"content-length", size)], "app": vllm}
    began = time.process_time()
    await middleware(scope, receive, send)

    assert sent[0]["status"] == 400
    assert time.process_time() - began < 1  # one by one, they cost 8 GiB of copies


async def test_middleware_with_lora_sends_calls_to_adapter(vllm: Vllm, plugin_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAD_ENGINE__LORA_RANK", "8")
    monkeypatch.setenv("SPANGRAD_ZERO_ADAPTER", "/bare")
    middleware = SpangradMiddleware(vllm)
    info = json.loads((await call(middleware, "/spangrad/info", method="GET"))[2][0])
    assert (info["lora_rank"], info["zero_adapter"], info["transfer"]) == (8, "/bare", "")
    unnamed = {name: value for name, value in ASKED.items() if name != "model"}
    for asked in (ASKED, unnamed, {**ASKED, "model": None}, {**ASKED, "model": "policy-base"}, {**ASKED, "model": "other"}):
        await call(middleware, CHAT_PATH, asked)
    assert [json.loads(one)["model"] for one in vllm.asked] == ["policy"] * 4 + ["other"]
    assert (await call(middleware, CHAT_PATH, {**ASKED, "model": ["policy"]}))[0] == 200, "vLLM's to refuse"


@pytest.mark.parametrize("headers", [{"host": "rebound.example"}, {"host": "127.0.0.1:8000", "origin": "http://evil.example"}])
async def test_middleware_without_token_refuses_foreign_sites(vllm: Vllm, middleware: SpangradMiddleware, headers: dict[str, str]) -> None:
    for path in ("/pause", "/collective_rpc", "/spangrad/warm", CHAT_PATH):
        assert (await call(middleware, path, ASKED, headers=headers))[0] == 401
    assert (vllm.asked, middleware.state.warm) == ([], False)
    assert (await call(middleware, CHAT_PATH, ASKED, headers={"host": "127.0.0.1:8000"}))[0] == 200


async def test_middleware_with_token_refuses_requests_without_it(
    vllm: Vllm, plugin_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPANGRAD_ENGINE__TOKEN", "secret")
    middleware = SpangradMiddleware(vllm)
    for path in ("/pause", "/collective_rpc", "/spangrad/warm", CHAT_PATH, "/metrics"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            assert (await call(middleware, path, ASKED, headers=headers))[0] == 401
    assert (vllm.asked, middleware.state.warm) == ([], False)
    assert (await call(middleware, "/health", method="GET"))[0] == 200
    assert (await call(middleware, CHAT_PATH, ASKED, headers={"authorization": "Bearer secret"}))[0] == 200
    closed: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        closed.append(message)

    await middleware({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)  # type: ignore[arg-type]
    assert closed == [{"type": "websocket.close", "code": 1008}]


async def test_middleware_load_inplace_is_cleared_after_load(vllm: Vllm, plugin_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAD_ENGINE__LORA_RANK", "8")
    middleware = SpangradMiddleware(vllm)
    order = {"lora_name": "policy", "lora_path": "/v1", "load_inplace": True}
    vllm.refuses = True
    assert ((await call(middleware, "/v1/load_lora_adapter", order))[0], ADAPTERS["policy"].load_inplace) == (500, True)
    vllm.refuses = False
    assert ((await call(middleware, "/v1/load_lora_adapter", order))[0], ADAPTERS["policy"].load_inplace) == (200, False)


async def test_middleware_version_changes_once_vllm_has_accepted(vllm: Vllm, middleware: SpangradMiddleware, tmp_path: Path) -> None:
    vllm.refuses = True
    await call(middleware, "/update_weight_version", {"new_version": "4"})
    assert middleware.state.version == 3
    assert json.loads((await call(middleware, "/spangrad/info", method="GET"))[2][0])["model"] == os.environ["SPANGRAD_ENGINE__MODEL"]
    vllm.refuses = False
    status, _, _ = await call(middleware, "/update_weight_version", {"new_version": "four"})
    assert (status, middleware.state.version) == (400, 3)
    await call(middleware, "/update_weight_version", {"new_version": "4"})
    expected = {
        "policy": "policy",
        "version": 4,
        "tokenizer_hash": tokenizer_hash(Path(os.environ["SPANGRAD_ENGINE__MODEL"])),
        "warm": False,
        "asleep": False,
        "model": "",
        "lora_rank": 0,
        "zero_adapter": "",
        "transfer": "",
        "dtype": "bfloat16",
        "checksum": "full",
        "capacity": 128,
        "topology": {"tensor": 2, "pipeline": 1, "data": 1, "api_servers": 1},
        "pid": os.getpid(),
        "shared_state": False,
        "started": 0,
    }
    assert json.loads((await call(middleware, "/spangrad/info", method="GET"))[2][0]) == expected
    await call(middleware, "/spangrad/warm", {})
    assert json.loads((await call(middleware, "/spangrad/info", method="GET"))[2][0]) == {**expected, "warm": True}


@pytest.fixture
def servers(vllm: Vllm, plugin_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SpangradMiddleware]:
    """The middlewares of two API servers of one vLLM, each of which stands for a process."""
    write_state(tmp_path / "state", 3)
    monkeypatch.setenv("SPANGRAD_ENGINE_STATE", str(tmp_path / "state"))
    return [SpangradMiddleware(vllm), SpangradMiddleware(vllm)]


async def test_middleware_orders_to_one_api_server_reach_the_other(servers: list[SpangradMiddleware], vllm: Vllm) -> None:
    first, other = servers
    await call(first, "/spangrad/warm", {})
    await call(first, "/pause?mode=keep")
    arriving = asyncio.create_task(call(other, CHAT_PATH, ASKED))
    await asyncio.wait({arriving}, timeout=0.05)
    assert not vllm.asked, "a call that arrives in the pause waits, whichever server it comes to"
    await call(first, "/update_weight_version", {"new_version": "7"})
    await call(first, "/resume")
    assert (await asyncio.wait_for(arriving, 30))[0] == 200
    info = json.loads((await call(other, "/spangrad/info", method="GET"))[2][0])
    assert (info["version"], info["warm"], info["model"], info["shared_state"]) == (7, True, "", True)
    await call(other, "/pause?mode=abort")
    assert json.loads((await call(first, CHAT_PATH, ASKED))[2][0]) == PAUSED, "calls would wait in vLLM for ever"
    await call(first, "/resume")
    assert (await call(other, CHAT_PATH, ASKED))[0] == 200
    await call(first, "/sleep?level=2")
    assert json.loads((await call(other, "/spangrad/info", method="GET"))[2][0])["asleep"]
    arriving = asyncio.create_task(call(other, CHAT_PATH, ASKED))
    await call(first, "/wake_up")
    await asyncio.wait({arriving}, timeout=0.1)
    assert not arriving.done(), "after a wake-up its weights may be none of the version's"
    await call(first, "/resume")
    assert (await asyncio.wait_for(arriving, 30))[0] == 200


async def test_middleware_orders_and_calls_end_with_a_dead_engine(
    middleware: SpangradMiddleware, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end with a dead engine; else vLLM's server, which waits for its connections, would never end and be restarted."""
    monkeypatch.setattr(middleware_module, "DEATH_SECONDS", 0.1)
    vllm.before_last.clear()
    running = [asyncio.create_task(call(middleware, CHAT_PATH, asked)) for asked in (ASKED, ASKED | {"stream": True})]
    await asyncio.wait(running, timeout=0.05)
    pause = asyncio.create_task(call(middleware, "/pause?mode=keep"))
    order = asyncio.create_task(call(middleware, "/sleep?level=1"))
    await asyncio.wait({pause, order}, timeout=0.05)
    waiting = asyncio.create_task(call(middleware, CHAT_PATH, ASKED))
    await asyncio.wait({waiting}, timeout=0.05)
    assert not any(task.done() for task in (*running, pause, order, waiting))
    vllm.state.engine_client.errored = True
    status, _, (body,) = await asyncio.wait_for(waiting, 30)
    assert (status, json.loads(body)) == (503, PAUSED)
    await asyncio.wait_for(asyncio.gather(pause, order), 30)
    whole, stream = await asyncio.wait_for(asyncio.gather(*running), 30)
    assert (whole[0], json.loads(whole[2][0])) == (500, {"error": "the engine has died"})
    assert stream[0] == 200
    assert b"[DONE]" not in b"".join(stream[2]), "a stream that has begun is cut short, as the client sees by its end"


async def test_middleware_state_of_an_engine_that_starts_again_is_new(servers: list[SpangradMiddleware], tmp_path: Path) -> None:
    await call(servers[0], "/update_weight_version", {"new_version": "7"})
    before = servers[1].state
    write_state(tmp_path / "state", 3)
    now = EngineState.of_file(tmp_path / "state")
    assert (now.version, before.version) == (3, 7), "one that still ends has the old one"
    assert now.started > before.started > 0


async def test_middleware_checksum_asks_every_replica(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    asked: list[Any] = []

    async def all_replicas(method: str, *arguments: object) -> list[list[str]]:
        asked.append((method, *arguments))
        return [['{"shards": []}', '{"shards": []}'], ['{"shards": [1]}']]

    vllm.state.engine_client.engine_core = SimpleNamespace(call_utility_all_async=all_replicas)
    status, _, (body,) = await call(middleware, "/spangrad/checksum", {"part": "adapter"})
    assert (status, json.loads(body)) == (200, {"replicas": [[{"shards": []}, {"shards": []}], [{"shards": [1]}]]})
    assert asked == [("collective_rpc", "spangrad_checksum", None, ("full", "adapter"), None)]

    async def failing(*_: object) -> None:
        raise RuntimeError("lm_head.weight has words beside the checkpoint's that are not zero")

    vllm.state.engine_client.engine_core.call_utility_all_async = failing
    status, _, (body,) = await call(middleware, "/spangrad/checksum", {})
    assert (status, "that are not zero" in json.loads(body)["error"]) == (500, True)


async def test_middleware_answer_across_reload_names_each_version_and_its_start(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    vllm.before_last.clear()
    asked = {**ASKED, "stream": True}
    answering = asyncio.create_task(call(middleware, CHAT_PATH, asked))
    await asyncio.wait({answering}, timeout=0.05)
    vllm_wait, vllm.before_last = vllm.before_last, asyncio.Event()
    vllm.before_last.set()
    await call(middleware, "/update_weight_version", {"new_version": "4"})
    vllm_wait.set()
    _, _, parts = await answering
    assert json.loads(b"".join(parts).split(b"\n\n")[-3][6:])["spangrad"] == field(middleware, (0, 3), (2, 4))


async def test_middleware_call_during_pause_starts_after_resume(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    await call(middleware, "/pause?mode=keep", {})
    answering = asyncio.create_task(call(middleware, CHAT_PATH, ASKED))
    await asyncio.wait({answering}, timeout=0.05)
    assert vllm.asked == []
    await call(middleware, "/update_weight_version", {"new_version": "4"})
    vllm.state.engine_client.first = "4"
    await call(middleware, "/resume", {})
    _, _, parts = await answering
    assert json.loads(parts[0])["spangrad"] == field(middleware, (0, 4))


async def test_middleware_pause_that_aborts_refuses_waiting_calls_until_resume(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    await call(middleware, "/pause?mode=keep", {})
    waiting = asyncio.create_task(call(middleware, CHAT_PATH, ASKED))
    await asyncio.wait({waiting}, timeout=0.05)
    await call(middleware, "/pause", {})
    refusal = (503, [json.dumps(PAUSED).encode()])
    assert [(await waiting)[::2], (await call(middleware, CHAT_PATH, ASKED))[::2]] == [refusal, refusal]
    await call(middleware, "/resume", {})
    assert (await call(middleware, CHAT_PATH, ASKED))[0] == 200


async def test_middleware_pause_refused_by_vllm_delays_no_call(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    vllm.refuses = True
    await call(middleware, "/pause?mode=keep", {})
    assert (await asyncio.wait_for(call(middleware, CHAT_PATH, ASKED), 30))[0] == 400


@pytest.mark.parametrize(
    ("path", "asked", "added"),
    [
        (CHAT_PATH, {}, {"return_token_ids": True, "logprobs": True}),
        (CHAT_PATH, {"logprobs": False, "return_token_ids": None}, {"return_token_ids": True, "logprobs": True}),
        (CHAT_PATH, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}),
        (CHAT_PATH, {"top_logprobs": 2}, {"return_token_ids": True}),
        (CHAT_PATH, {"use_beam_search": True}, {"return_token_ids": True}),
        (COMPLETIONS_PATH, {}, {"return_token_ids": True, "logprobs": 0}),
        (COMPLETIONS_PATH, {"logprobs": 3}, {"return_token_ids": True}),
        (COMPLETIONS_PATH, {"logprobs": 0}, {"return_token_ids": True}),
        # Asked for ids, vLLM would leave out the echo.
        (COMPLETIONS_PATH, {"echo": True}, {}),
        (RESPONSES_PATH, {}, {}),
        (MESSAGES_PATH, {}, {}),
    ],
)
def test_ask_adds_ids_and_logprobs_to_request(path: str, asked: dict[str, Any], added: dict[str, Any]) -> None:
    assert with_ids(path, asked) == {**asked, **added}
