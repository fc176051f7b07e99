"""Sender that adds our field to answers on their way out of vLLM.

In: the ASGI messages of an answer, whole or a stream. Out: the same with the top-level field `spangrad` {"policy",
"versions", "tokenizer_hash", "sampling"}. "versions" has a list for each choice, of pairs: the output token at which a
policy version begins, and the version; the first begins at 0, and an empty list says that they are not known. "sampling"
holds the parameters in effect, vLLM's defaults applied, and whether tokens were masked ("constrained"). A stream carries
the field in its first event (without "versions" and "sampling", which are not known yet) and, complete, in the last one
that holds data. Of the routes that are tapped, it has "generations" too: [{"prompt_token_ids", "token_ids", "logprobs",
"finish_reason"}], one for each request to the engine, and a stream has it in each event after which there are
new tokens, with those alone. Invariant: nothing else of an answer changes, and an event leaves as soon as it has come;
but one that may be the last waits for the next, which follows at once.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.vllm_plugin.tap import Tap
from spangrad.semconv import ANSWER_FIELD

LAST_EVENTS = (b"event: message_stop", b"event: response.completed")

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Facts = Callable[[bool], dict[str, Any]]
"""Function that returns the field's content, given whether the answer is complete or has only begun."""


class AnswerSender:
    """ASGI sender that adds the field to one answer."""

    def __init__(self, facts: Facts, send: Send) -> None:
        self.facts = facts
        self.send = send
        self.kind = ""
        self.start: Message = {}
        self.buffer = b""
        self.started = False
        self.held = b""
        """Event of a stream that may be its last: it waits for the next one, which follows at once."""

    async def __call__(self, message: Message) -> None:
        """Process one ASGI message of the answer."""
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
        """Return the bytes that may be sent now that `event` has come."""
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
        """Add the complete field to an event; it replaces the first chunk's field where that is the same event."""
        event = event[:-2]
        incomplete = b"," + self._field(complete=False) + b"}"
        if event.endswith(incomplete):
            event = event[: -len(incomplete)] + b"}"
        return self._add(event, complete=True) + b"\n\n"

    def _add(self, text: bytes, *, complete: bool) -> bytes:
        """Append the field to a JSON object, without parsing it."""
        return text.rstrip()[:-1] + b"," + self._field(complete=complete) + b"}"

    def _field(self, *, complete: bool) -> bytes:
        facts = self.facts(complete) | self._more()
        return b'"%s":%s' % (ANSWER_FIELD.encode(), json.dumps(facts, separators=(",", ":")).encode())

    def _more(self) -> dict[str, Any]:
        """Return further entries of the field."""
        return {}


class FieldSender(AnswerSender):
    """ASGI sender that adds the field, with the engine's generations, to one answer."""

    def __init__(self, facts: Facts, send: Send, tap: Tap) -> None:
        super().__init__(facts, send)
        self.tap = tap

    def _event(self, event: bytes) -> bytes:
        name, _, data = event.partition(b"data: ")
        last = name.strip() in LAST_EVENTS
        if not data.startswith(b"{") or (self.started and not last and not self.tap.has_unread()):
            return event + b"\n\n"
        self.started = True
        return self._add(event, complete=last) + b"\n\n"

    def _more(self) -> dict[str, Any]:
        generations = self.tap.take()
        return {"generations": generations} if generations else {}
