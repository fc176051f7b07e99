"""The road of a policy call: from the agent to the engine and back, its span on the way to the store.

In: chat requests. Out: answers. Invariant: a call is counted when it is accepted, is one span when it ends, and only
then is no longer in flight; the engine stops generating as soon as the agent has left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from itertools import count

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from gateway.admin import error_response, url_attempt
from gateway.backend import Backend, BackendDownError, unreachable
from gateway.chat import CHAT_PATH, StreamReader, parse_request, read_answer
from gateway.context import Attempt, attempt_of, call_context, parse_baggage
from gateway.counts import Counts
from gateway.exporter import SpanExporter
from gateway.record import CallFacts, build_span
from spangrad.settings import Settings

MODELS_PATH = "/v1/models"
ATTEMPT_PREFIX = r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}"
ERROR_BYTES = 2000
"""How much of an error's body goes into the span's status."""

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# Credentials and trace context end here; the engine gets the call's own span as its parent.
_NOT_FORWARDED = _HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "baggage",
    "content-length",
    "cookie",
    "host",
    "traceparent",
    "tracestate",
}
_NOT_RETURNED = _HOP_BY_HOP | {"content-length", "date", "server"}


@dataclass(slots=True)
class _Exchange:
    """A call while it lasts."""

    request: web.Request
    facts: CallFacts
    stream: web.StreamResponse | None = None
    """None: no part of a stream has gone to the client."""


class _ClientLeftError(Exception):
    """The client closed its connection."""


class Calls:
    """The routes that agents use."""

    def __init__(
        self,
        settings: Settings,
        session: aiohttp.ClientSession,
        backend: Backend,
        exporter: SpanExporter,
        counts: Counts,
        process_id: str,
    ) -> None:
        self._session = session
        self._backend = backend
        self._exporter = exporter
        self._counts = counts
        self._process_id = process_id
        self._seconds = settings.gateway.request_timeout_seconds
        self._seq = count()

    def routes(self) -> list[web.RouteDef]:
        """What aiohttp registers."""
        return [
            web.post(CHAT_PATH, self.chat),
            web.post(ATTEMPT_PREFIX + CHAT_PATH, self.chat),
            web.get(MODELS_PATH, self.models),
            web.get(ATTEMPT_PREFIX + MODELS_PATH, self.models),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """The engine's models, as it lists them."""
        try:
            async with self._session.get(self._backend.url + MODELS_PATH) as upstream:
                body = await upstream.read()
                return web.Response(body=body, status=upstream.status, headers=_returned(upstream.headers))
        except (aiohttp.ClientError, OSError) as error:
            return error_response(502, unreachable(self._backend.url, error), "engine_unreachable")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One policy call."""
        try:
            asked = parse_request(await request.read())
        except ValueError as error:
            return error_response(400, f"the request is not a JSON object: {error}", "invalid_request_error")
        await self._exporter.room()
        baggage = parse_baggage(request.headers.get("baggage"))
        attempt = attempt_of(_url_attempt(request), baggage)
        context = call_context(attempt, self._counts.announced(attempt), baggage, request.headers.get("traceparent"))
        facts = CallFacts(context, asked, next(self._seq), time.time_ns())
        exchange = _Exchange(request, facts)
        self._counts.begin(attempt)
        try:
            return await self._answered(exchange)
        except asyncio.CancelledError:
            facts.aborted = True
            raise
        except _ClientLeftError:
            facts.aborted = True
            return exchange.stream or web.Response()  # nobody reads it
        finally:
            try:
                self._exporter.put(build_span(facts, self._process_id, time.time_ns()))
            finally:
                self._counts.end(attempt)

    async def _answered(self, exchange: _Exchange) -> web.StreamResponse:
        """Answer a call; what can go wrong with the engine becomes an answer and a fact."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._backend.admit_call()
                return await self._forward(exchange)
        except BackendDownError as error:
            return _failed(exchange, 503, "engine_down", str(error))
        except TimeoutError:
            message = f"no whole answer within gateway.request_timeout_seconds = {self._seconds:g}."
            return _failed(exchange, 504, "timeout", message)
        except aiohttp.ClientError as error:
            return _failed(exchange, 502, "engine_unreachable", unreachable(self._backend.url, error))

    async def _forward(self, exchange: _Exchange) -> web.StreamResponse:
        request, facts = exchange.request, exchange.facts
        headers = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED)
        headers["traceparent"] = facts.context.span.header()
        url = self._backend.url + CHAT_PATH
        async with self._session.post(url, data=facts.request.for_engine(), headers=headers) as upstream:
            facts.http_status = upstream.status
            if upstream.content_type == "text/event-stream":
                return await self._stream(exchange, upstream)
            body = await upstream.read()
            if upstream.status == 200:
                body = _read_whole(facts, body)
            else:
                facts.answer.json = body
                facts.error_type = str(upstream.status)
                facts.error_message = body[:ERROR_BYTES].decode(errors="replace")
            return web.Response(body=body, status=upstream.status, headers=_returned(upstream.headers))

    async def _stream(self, exchange: _Exchange, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        facts = exchange.facts
        reader = StreamReader(facts.request)
        facts.answer = reader.answer
        response = web.StreamResponse(status=upstream.status, headers=_returned(upstream.headers))
        await _to_client(response.prepare(exchange.request))
        exchange.stream = response
        async for data in upstream.content.iter_any():
            events = reader.feed(data)
            if events:
                await _to_client(response.write(events))
        await _to_client(response.write_eof(reader.rest()))
        if reader.answer.failed:
            facts.error_type, facts.error_message = "engine_error", "the stream held an error, or something that is no chunk of an answer"
        _note_abort(facts)
        return response


def _read_whole(facts: CallFacts, body: bytes) -> bytes:
    """Keep what a whole answer says; what the client gets of it."""
    try:
        facts.answer, body = read_answer(body, facts.request)
    except ValueError as error:
        facts.answer.json = body
        facts.error_type, facts.error_message = "malformed_answer", str(error)
    _note_abort(facts)
    return body


def _note_abort(facts: CallFacts) -> None:
    """The engine ends calls with `abort` when its operator, or a failed publication, cuts them."""
    facts.aborted = any(choice.finish_reason == "abort" for choice in facts.answer.choices.values())


def _failed(exchange: _Exchange, status: int, kind: str, message: str) -> web.StreamResponse:
    """Answer with an error, or cut a stream that has begun: only a broken connection says that this was not all."""
    exchange.facts.error_type, exchange.facts.error_message = kind, message
    if exchange.stream is None:
        exchange.facts.http_status = status
        return error_response(status, message, kind)
    if exchange.request.transport is not None:
        exchange.request.transport.abort()
    return exchange.stream


async def _to_client(writing: Awaitable[object]) -> None:
    """Write to the client.

    Raises:
        _ClientLeftError: it is gone (the engine's broken connections raise errors of the same classes).
    """
    try:
        await writing
    except ConnectionResetError as error:
        raise _ClientLeftError from error


def _url_attempt(request: web.Request) -> Attempt | None:
    return url_attempt(request) if "rollout" in request.match_info else None


def _returned(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The engine's headers that the client gets."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_RETURNED)
