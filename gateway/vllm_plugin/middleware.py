"""Middleware by which vLLM reports, in every answer, the tokens that it read and sampled, and the weights and tokenizer that it used.

In: requests to vLLM's OpenAI server. Out: the same requests asking for token ids and logprobs; answers with the
top-level field `spangrad` (`gateway.vllm_plugin.sender`). Invariant: a token that the field assigns to a policy version was
sampled by the weights of that version; a token whose version is not certain is assigned to none.

Runs inside vLLM's process: `vllm serve --middleware gateway.vllm_plugin.middleware.SpangradMiddleware`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from gateway.vllm_plugin.continuation import REPORT, REQUEST_FIELD, Continued
from gateway.vllm_plugin.request_fields import CHAT_PATH, COMPLETIONS_PATH, TAPPED_PATHS, with_ids
from gateway.vllm_plugin.sender import AnswerSender, FieldSender
from gateway.vllm_plugin.state import STATE_VARIABLE, EngineState, Gate
from gateway.vllm_plugin.tap import Labels, Tap, open_tap
from spangrad.errors import JSON_ERRORS
from spangrad.http.foreign_sites import foreign_problem
from spangrad.sampling import is_constrained
from spangrad.weights.checksums import tokenizer_hash
from spangrad.weights.shards import ChecksumScope

POLICY_VARIABLE = "SPANGRAD_GATEWAY__POLICY"
VERSION_VARIABLE = "SPANGRAD_ENGINE__VERSION"
MODEL_VARIABLE = "SPANGRAD_ENGINE__MODEL"
RANK_VARIABLE = "SPANGRAD_ENGINE__LORA_RANK"
ZERO_ADAPTER_VARIABLE = "SPANGRAD_ZERO_ADAPTER"
TRANSFER_VARIABLE = "SPANGRAD_ENGINE__TRANSFER"
CHECKSUM_VARIABLE = "SPANGRAD_ENGINE__CHECKSUM"
TOKEN_VARIABLE = "SPANGRAD_ENGINE__TOKEN"
"""Environment variables of the settings that the middleware reads, set by `spangrad engine`; of the last five, those
that it needs."""

UNLABELLED = "default"
"""vLLM's label of the weights that it was started with."""
ADAPTER_PATH = "/v1/load_lora_adapter"
CHECKSUM_PATH = "/spangrad/checksum"
CHECKSUM_METHOD = "spangrad_checksum"
POLL_SECONDS = 0.002
"""Time between two looks at a gate that another API server opens."""
DEATH_SECONDS = 0.5
"""Time between two looks at whether the engine lives, and that requests have to end by themselves once it has died."""
_ANSWERED = TAPPED_PATHS | {CHAT_PATH, COMPLETIONS_PATH}
"""Paths of the routes that have the policy generate."""

_CONTROLS = {"/pause", "/resume", "/update_weight_version", "/sleep", "/wake_up"}
_WAITING = {Gate.WAIT, Gate.ASLEEP}
PAUSED_TYPE = "engine_paused"
PAUSED = {
    "type": "error",
    "error": {"message": "the engine is paused, and holds no weights that it may answer with", "type": PAUSED_TYPE, "code": 503},
}
"""Error of a call that is refused in a pause, in a form that is both OpenAI's and Anthropic's."""

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class SpangradMiddleware:
    """A pure ASGI middleware, so that streams pass chunk by chunk."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.policy = os.environ[POLICY_VARIABLE]
        self.first_version = int(os.environ[VERSION_VARIABLE])
        """Policy version of the weights that vLLM was started with."""
        path = os.environ.get(STATE_VARIABLE)
        self.state = EngineState.of_file(Path(path)) if path else EngineState(version=self.first_version)
        self.model = os.environ[MODEL_VARIABLE]
        """Directory of the weights that vLLM was started with."""
        self.tokenizer_hash = tokenizer_hash(Path(self.model))
        self.checksum = ChecksumScope(os.environ.get(CHECKSUM_VARIABLE, ChecksumScope.FULL))
        """Part of the parameters that is compared after a publication."""
        self.lora_rank = int(os.environ.get(RANK_VARIABLE, "0"))
        """Largest rank of the adapters that it takes. 0: it takes none."""
        self.zero_adapter = os.environ.get(ZERO_ADAPTER_VARIABLE, "")
        """Directory of the adapter that changes nothing; empty where it takes none. Calls always have an adapter then."""
        self.transfer = os.environ.get(TRANSFER_VARIABLE, "")
        """Transport by which it takes weights from a trainer; empty: it takes none."""
        self._token = os.environ.get(TOKEN_VARIABLE, "").encode()
        """Token that requests must carry. Empty: none is required."""
        self._opening: asyncio.Task[None] | None = None
        """Waits for the end of a pause, for all calls that have arrived in it."""
        self._death: asyncio.Task[None] | None = None
        """Waits for the engine's death, for all requests; begins with the first."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if not self._may_pass(scope):
            await _refuse(scope, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        match scope["method"], scope["path"]:
            case "GET", "/spangrad/info":
                await _respond(send, 200, self.info(scope))
            case "POST", "/spangrad/warm":
                self.state.warm = True
                await _respond(send, 200, self.info(scope))
            case "POST", path:
                await self._while_alive(self._handler(path), scope, receive, send)
            case _:
                await self.app(scope, receive, send)

    def _handler(self, path: str) -> App:
        """Return what answers a request that vLLM's engine has a part in."""
        if path == CHECKSUM_PATH:
            return self._report
        if path in _CONTROLS:
            return self._control
        if path == ADAPTER_PATH and self.lora_rank:
            return self._load_adapter
        return self._answer if path in _ANSWERED else self.app

    async def _while_alive(self, handler: App, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a request, and give it up once the engine has died.

        vLLM's client would wait for the dead engine's answer for ever, and its server, which ends then, for the client.
        """
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        if self._death is None:
            self._death = asyncio.create_task(_until_dead(scope["app"].state.engine_client))
        handled = asyncio.ensure_future(handler(scope, receive, watch))
        try:
            await asyncio.wait({handled, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not handled.done():
                self.state.gate = Gate.REFUSE
                await asyncio.wait({handled}, timeout=DEATH_SECONDS)
            if handled.done():
                await handled
            elif not begun:
                await _respond(send, 500, {"error": "the engine has died"})
        finally:
            handled.cancel()

    def _may_pass(self, scope: Message) -> bool:
        """Return whether a request carries the token, or needs none: anyone may ask whether the engine lives.

        Where none is needed, requests of foreign sites' pages are refused.
        """
        if not self._token:
            return not foreign_problem(_header(scope, b"host"), _header(scope, b"origin"))
        if scope["type"] == "http" and scope["path"] == "/health":
            return True
        sent = (_header(scope, b"authorization") or "").encode("latin-1")
        return hmac.compare_digest(sent, b"Bearer " + self._token)

    def info(self, scope: Message) -> dict[str, Any]:
        """Describe what the engine serves, and which weights it can take."""
        parallel = scope["app"].state.vllm_config.parallel_config
        capacity = parallel.data_parallel_size * scope["app"].state.vllm_config.scheduler_config.max_num_seqs
        return {
            "policy": self.policy,
            "version": self.state.version,
            "tokenizer_hash": self.tokenizer_hash,
            "warm": self.state.warm,
            "asleep": self.state.gate == Gate.ASLEEP,
            "model": "" if self.state.replaced else self.model,
            "dtype": str(scope["app"].state.vllm_config.model_config.dtype).removeprefix("torch."),
            "checksum": self.checksum,
            "lora_rank": self.lora_rank,
            "zero_adapter": self.zero_adapter,
            "transfer": self.transfer,
            "capacity": capacity,
            "topology": {
                "tensor": parallel.tensor_parallel_size,
                "pipeline": parallel.pipeline_parallel_size,
                "data": parallel.data_parallel_size,
                "api_servers": parallel._api_process_count,
            },
            "pid": os.getpid(),
            "shared_state": self.state.shared,
            "started": self.state.started,
        }

    def facts(self, tap: Tap | None, constrained: bool, complete: bool) -> dict[str, Any]:
        """Describe the policy that gave an answer and, once it is complete, the weights that sampled its tokens, and the sampling."""
        facts: dict[str, Any] = {"policy": self.policy, "tokenizer_hash": self.tokenizer_hash}
        if complete and tap is not None and tap.sampling is not None:
            facts["versions"] = [self._versions(labels) for labels in tap.labels]
            facts["sampling"] = {**tap.sampling, "constrained": constrained or tap.sampling["constrained"]}
            if tap.rendered is not None:
                facts[REPORT] = astuple(tap.rendered)
        return facts

    def _versions(self, labels: Labels) -> list[tuple[int, int]]:
        """Return the policy versions of a choice's tokens; empty where a label is none of ours."""
        versions: list[tuple[int, int]] = []
        for start, label in labels:
            version = self._version(label)
            if version is None:
                return []
            if not versions or versions[-1][1] != version:
                versions.append((start, version))
        return versions

    def _version(self, label: str) -> int | None:
        """Return the policy version that vLLM's label of weights stands for. None: the label was not set by the gateway."""
        if label == UNLABELLED:
            return self.first_version
        return int(label) if label.isascii() and label.isdigit() else None

    async def _control(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on an order to vLLM, whose client gives it to every engine core, and record its pause or version for all API servers."""
        path = scope["path"]
        body = await _read(receive)
        version = self.first_version
        if path == "/update_weight_version":
            try:
                version = int(json.loads(body)["new_version"])
            except (ValueError, TypeError, KeyError):
                await _respond(send, 400, {"error": "new_version must be a policy version: a whole number, as a string"})
                return
        aborts = path == "/pause" and parse_qs(scope["query_string"].decode()).get("mode", ["abort"]) == ["abort"]
        if path == "/pause" and not aborts:
            # Calls that arrive from now on wait here, so that the version they start with is read after the reload.
            self.state.gate = Gate.WAIT
        elif path == "/sleep":
            self.state.gate = Gate.ASLEEP

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                succeeded = message["status"] == 200
                if path == "/update_weight_version" and succeeded:
                    self.state.version, self.state.replaced = version, True
                elif path == "/wake_up" and succeeded:
                    self.state.gate = Gate.WAIT
                elif (
                    (path == "/resume" and succeeded)
                    or (path == "/sleep" and not succeeded)
                    or (path == "/pause" and (aborts or not succeeded))
                ):
                    self.state.gate = Gate.REFUSE if aborts and succeeded else Gate.OPEN
            await send(message)

        await self.app(scope, _replay(body, receive), watch)

    async def _report(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer with the reports of the workers of every data-parallel replica; vLLM's own route gives those of the first alone."""
        part = json.loads(await _read(receive) or b"{}").get("part", "all")
        try:
            arguments = (CHECKSUM_METHOD, None, (self.checksum, part), None)
            replicas = await scope["app"].state.engine_client.engine_core.call_utility_all_async("collective_rpc", *arguments)
        except Exception as error:  # a worker's error is vLLM's to choose; the gateway reports it
            await _respond(send, 500, {"error": str(error)})
            return
        await _respond(send, 200, {"replicas": [[json.loads(worker) for worker in workers] for workers in replicas]})

    async def _until_open(self) -> None:
        """Wait for the end of a pause, whichever API server was told of it, or for the engine's."""
        if self.state.gate not in _WAITING:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._poll_gate())
        await asyncio.shield(self._opening)

    async def _poll_gate(self) -> None:
        while True:
            if self.state.gate not in _WAITING:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _load_adapter(self, scope: Message, receive: Receive, send: Send) -> None:
        """Have vLLM load an adapter in place once, instead of at each of its steps.

        It keeps the order to load in place with the adapter, gives it to every call, and its workers obey each time: they would read the
        files at each step, and go back to the older adapter's as long as a call that began with that one is in flight.
        """

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                for adapter in scope["app"].state.openai_serving_models.lora_requests.values():
                    adapter.load_inplace = False
            await send(message)

        await self.app(scope, _replay(await _read(receive), receive), watch)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        await self._until_open()
        if self.state.gate == Gate.REFUSE:
            await _respond(send, 503, PAUSED)
            return
        try:
            request = json.loads(body)
        except JSON_ERRORS:
            request = None
        if not isinstance(request, dict):
            await self.app(scope, _replay(body, receive), AnswerSender(partial(self.facts, None, False), send))
            return
        try:
            continued = Continued.of_field(request[REQUEST_FIELD]) if REQUEST_FIELD in request else None
        except (KeyError, TypeError, ValueError) as error:
            await _respond(send, 400, {"error": f"{REQUEST_FIELD} is malformed ({error!r}); the gateway alone sends it"})
            return
        client_request = {name: value for name, value in request.items() if name != REQUEST_FIELD} if continued else request
        engine_request = with_ids(scope["path"], self._named(client_request))
        if engine_request is not request:
            body = json.dumps(engine_request).encode()
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        tap = None
        if not request.get("use_beam_search"):  # a search has no sampling distribution
            tap = open_tap(scope["app"].state.engine_client, reads_ids=scope["path"] in TAPPED_PATHS, continued=continued)
        facts = partial(self.facts, tap, is_constrained(request))
        sender = FieldSender(facts, send, tap) if tap and tap.reads_ids else AnswerSender(facts, send)
        await self.app(scope, _replay(body, receive), sender)

    def _named(self, request: dict[str, Any]) -> dict[str, Any]:
        """Name the policy in a call that names no model or the base: it is answered with the adapter, whose version the answer bears."""
        if self.lora_rank and request.get("model") in (None, "", base_name(self.policy)):
            return {**request, "model": self.policy}
        return request


def base_name(policy: str) -> str:
    """Return vLLM's name of the base model in an engine that takes adapters, where the policy's name is the adapter's."""
    return f"{policy}-base"


async def _until_dead(engine_client: Any) -> None:
    """Return once the engine has died, which vLLM's client tells to who asks it."""
    while True:
        if engine_client.errored:
            return
        await asyncio.sleep(DEATH_SECONDS)


def _header(scope: Message, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), None)


async def _refuse(scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _respond(send, 401, {"error": "the engine requires the token of engine.token: go through the gateway, or ask 127.0.0.1"})


async def _read(receive: Receive) -> bytes:
    """Return the whole body of a request, or the part that arrived before the client disconnected."""
    pieces: list[bytes] = []  # added to one another, each would cost a copy of all before it
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive that gives the body that was already read, and then the client's next messages."""
    pending = [body]

    async def again() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return again


async def _respond(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
