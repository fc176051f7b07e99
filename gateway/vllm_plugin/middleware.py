"""Lets vLLM tell, in every answer, which tokens it read and sampled, and which weights and tokenizer did so.

In: requests to vLLM's OpenAI server. Out: the same requests asking for token ids and logprobs; answers with the
top-level field `spangrad` {"policy", "version_start", "version_end", "tokenizer_hash"}. A stream carries it in its
first data chunk (without version_end, which is not known yet) and, complete, in the last one before [DONE].
Invariant: version_start and version_end are equal only if no other weights can have sampled a token of the answer.

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

from gateway.vllm_plugin.asking import CHAT_PATH, COMPLETIONS_PATH, ask
from spangrad.semconv import ANSWER_FIELD
from spangrad.weights import tokenizer_hash

POLICY_VARIABLE = "SPANGRAD_GATEWAY__POLICY"
VERSION_VARIABLE = "SPANGRAD_ENGINE__VERSION"
MODEL_VARIABLE = "SPANGRAD_ENGINE__MODEL"
"""The environment's names of the settings that the middleware reads, set by `spangrad engine`."""

PAUSED = {"error": {"message": "the engine is paused, and holds no weights that it may answer with", "type": "engine_paused", "code": 503}}

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
        self.tokenizer_hash = tokenizer_hash(Path(os.environ[MODEL_VARIABLE]))
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
            case "POST", path if path in (CHAT_PATH, COMPLETIONS_PATH):
                await self._answer(scope, receive, send)
            case _:
                await self.app(scope, receive, send)

    def info(self) -> dict[str, Any]:
        """What is served."""
        return {"policy": self.policy, "version": self.version, "tokenizer_hash": self.tokenizer_hash, "warm": self.warm}

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
                    self.version = version
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
        if isinstance(request, dict):
            body = json.dumps(ask(scope["path"], request)).encode()
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self.app(scope, _replay(body, receive), _AnswerSender(self, send))


class _AnswerSender:
    """Adds the field to one answer on its way out."""

    def __init__(self, middleware: SpangradMiddleware, send: Send) -> None:
        self.middleware = middleware
        self.send = send
        self.start_version = middleware.version
        self.kind = ""
        self.start: Message = {}
        self.buffer = b""
        self.started = False
        self.held = b""
        """An event of a stream that may be its last: it waits for the next, which follows at once."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if kind.startswith(b"text/event-stream"):
                self.kind = "stream"
            elif kind.startswith(b"application/json") and message["status"] == 200:
                self.kind = "whole"
                self.start = message
                return
            await self.send(message)
        elif message["type"] != "http.response.body" or not self.kind:
            await self.send(message)
        elif self.kind == "whole":
            await self._whole(message)
        else:
            await self._stream(message)

    async def _whole(self, message: Message) -> None:
        self.buffer += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self._add(self.buffer, complete=True)
        headers = [(name, value) for name, value in self.start["headers"] if name != b"content-length"]
        await self.send({**self.start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self.send({"type": "http.response.body", "body": body})

    async def _stream(self, message: Message) -> None:
        *events, self.buffer = (self.buffer + message.get("body", b"")).split(b"\n\n")
        out = b"".join(self._event(event) for event in events)
        if not message.get("more_body"):
            out += self.held + self.buffer
        elif not out:
            return
        await self.send({**message, "body": out})

    def _event(self, event: bytes) -> bytes:
        """What may leave now that `event` has come."""
        held, self.held = self.held, b""
        if event == b"data: [DONE]":
            return (self._finish(held) if held else b"") + event + b"\n\n"
        if not event.startswith(b"data: {"):
            self.held = held
            return event + b"\n\n"
        if not self.started:
            self.started = True
            event = self._add(event, complete=False)
        event += b"\n\n"
        if b'"finish_reason":null' in event:
            return held + event
        # The end of a choice, a usage chunk or an error.
        self.held = event
        return held

    def _finish(self, event: bytes) -> bytes:
        """Add the complete field to an event, over the first chunk's where both are one."""
        event = event[:-2]
        incomplete = b"," + self._field(complete=False) + b"}"
        if event.endswith(incomplete):
            event = event[: -len(incomplete)] + b"}"
        return self._add(event, complete=True) + b"\n\n"

    def _add(self, text: bytes, *, complete: bool) -> bytes:
        """Put the field at the end of a JSON object, without parsing it."""
        return text.rstrip()[:-1] + b"," + self._field(complete=complete) + b"}"

    def _field(self, *, complete: bool) -> bytes:
        facts: dict[str, Any] = {"policy": self.middleware.policy, "version_start": self.start_version}
        if complete:
            facts["version_end"] = self.middleware.version
        facts["tokenizer_hash"] = self.middleware.tokenizer_hash
        return b'"%s":%s' % (ANSWER_FIELD.encode(), json.dumps(facts, separators=(",", ":")).encode())


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
