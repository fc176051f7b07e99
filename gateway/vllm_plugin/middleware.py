"""Lets vLLM tell, in every answer, which tokens it read and sampled, and which weights and tokenizer did so.

In: requests to vLLM's OpenAI server. Out: the same requests asking for token ids and logprobs; answers with the
top-level field `spangrad` (`gateway.vllm_plugin.sender`). Invariant: version_start and version_end are equal only if no
other weights can have sampled a token of the answer.

Runs inside vLLM's process: `vllm serve --middleware gateway.vllm_plugin.middleware.SpangradMiddleware`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from gateway.vllm_plugin.asking import CHAT_PATH, COMPLETIONS_PATH, TAPPED_PATHS, ask
from gateway.vllm_plugin.sender import AnswerSender, TappedSender
from gateway.vllm_plugin.tap import open_tap
from spangrad.weights import tokenizer_hash

POLICY_VARIABLE = "SPANGRAD_GATEWAY__POLICY"
VERSION_VARIABLE = "SPANGRAD_ENGINE__VERSION"
MODEL_VARIABLE = "SPANGRAD_ENGINE__MODEL"
"""The environment's names of the settings that the middleware reads, set by `spangrad engine`."""

_ANSWERED = TAPPED_PATHS | {CHAT_PATH, COMPLETIONS_PATH}
"""The routes that have the policy generate."""

PAUSED = {
    "type": "error",
    "error": {"message": "the engine is paused, and holds no weights that it may answer with", "type": "engine_paused", "code": 503},
}
"""In OpenAI's form and in Anthropic's."""

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class SpangradMiddleware:
    """A pure ASGI middleware, so that streams pass chunk by chunk."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.policy = os.environ[POLICY_VARIABLE]
        self.version = int(os.environ[VERSION_VARIABLE])
        self.model = os.environ[MODEL_VARIABLE]
        """Directory of the weights that vLLM was started with; empty once it has others."""
        self.tokenizer_hash = tokenizer_hash(Path(self.model))
        self.warm = False
        self._moving = asyncio.Event()
        """Not set in a pause that keeps calls: those that arrive wait for its end."""
        self._moving.set()
        self._refusing = False
        """Whether a pause has ended all calls: those that arrive are refused until vLLM is resumed."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Take one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        match scope["method"], scope["path"]:
            case "GET", "/spangrad/info":
                await _respond(send, 200, self.info())
            case "POST", "/spangrad/warm":
                self.warm = True
                await _respond(send, 200, self.info())
            case "POST", "/pause" | "/resume" | "/update_weight_version":
                await self._control(scope, receive, send)
            case "POST", path if path in _ANSWERED:
                await self._answer(scope, receive, send)
            case _:
                await self.app(scope, receive, send)

    def info(self) -> dict[str, Any]:
        """What is served."""
        return {**self.facts(), "warm": self.warm, "model": self.model}

    def facts(self) -> dict[str, Any]:
        """What an answer says of who gave it."""
        return {"policy": self.policy, "version": self.version, "tokenizer_hash": self.tokenizer_hash}

    async def _control(self, scope: Message, receive: Receive, send: Send) -> None:
        """Learn pauses and versions from the orders that pass by, once vLLM has obeyed."""
        path = scope["path"]
        body = await _read(receive)
        version = self.version
        if path == "/update_weight_version":
            try:
                version = int(json.loads(body)["new_version"])
            except (ValueError, TypeError, KeyError):
                await _respond(send, 400, {"error": "new_version must be a policy version: a whole number, as a string"})
                return
        aborts = path == "/pause" and parse_qs(scope["query_string"].decode()).get("mode", ["abort"]) == ["abort"]
        if path == "/pause" and not aborts:
            # Calls that arrive from now on wait here, so that the version they start with is read after the reload.
            self._moving.clear()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                obeyed = message["status"] == 200
                if path == "/update_weight_version" and obeyed:
                    self.version, self.model = version, ""
                elif (path == "/resume" and obeyed) or (path == "/pause" and (aborts or not obeyed)):
                    self._refusing = aborts and obeyed
                    self._moving.set()
            await send(message)

        await self.app(scope, _replay(body, receive), watch)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        await self._moving.wait()
        if self._refusing:
            await _respond(send, 503, PAUSED)
            return
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        asked = ask(scope["path"], request) if isinstance(request, dict) else request
        if asked is not request:
            body = json.dumps(asked).encode()
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        if scope["path"] in TAPPED_PATHS:
            sender = TappedSender(self.facts, send, open_tap(scope["app"].state.engine_client))
        else:
            sender = AnswerSender(self.facts, send)
        await self.app(scope, _replay(body, receive), sender)


async def _read(receive: Receive) -> bytes:
    """The whole body of a request; what came of it when the client leaves."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body that was read already, and then what the client does next."""
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
