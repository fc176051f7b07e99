"""Forwarding of a policy call from the agent to the engine and back, and its span to the exporter.

In: requests in one of the dialects. Out: answers. Invariant: a call is counted when it is accepted, is one span when it ends, and only
then is no longer in flight; the span is on disk before the agent has the last of the answer; the engine stops generating as
soon as the agent has left, or the attempt has ended, whose later calls are refused and not counted.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import aiohttp
from aiohttp import web

from gateway.dialects import DIALECTS, Dialect
from gateway.dialects.answer import EngineAnswer
from gateway.dialects.base import ClientRequest
from gateway.metrics import GatewayMetrics
from gateway.pool.policy import NOTHING, RETRY_AFTER_SECONDS, PoolFullError
from gateway.pool.pool import BackendLease, BackendPool
from gateway.pool.upstream import BackendDownError, Scrubber, unreachable
from gateway.proxy.context import attempt_of, call_context, parse_baggage
from gateway.proxy.continued_calls import ContinuedCalls
from gateway.proxy.counts import Counts
from gateway.proxy.headers import forwarded, returned
from gateway.proxy.http import error_response, url_attempt
from gateway.proxy.passthrough import pass_through
from gateway.proxy.redaction import Redactor
from gateway.proxy.relax import relax
from gateway.recorder.exporter import SpanExporter
from gateway.recorder.record import GATEWAY_ERROR, CallFacts, bare_span, build_span
from gateway.vllm_plugin.middleware import PAUSED_TYPE
from spangrad.agent.failures import names_context_overflow
from spangrad.errors import JSON_ERRORS
from spangrad.http.announcements import AttemptKey
from spangrad.http.server import json_response
from spangrad.settings import Settings
from spangrad.types import Mode

log = logging.getLogger(__name__)

ATTEMPT_PREFIX = r"/rollout/{rollout}/attempt/{attempt:\d{1,4}}"

ATTEMPT_CLOSED = "attempt_closed"
"""Type of the errors that calls of an ended attempt are answered with."""
_LAST_EVENT = re.compile(rb"data: ?\[DONE\]|event: ?(message_stop|response\.(completed|incomplete|failed))")


@dataclass(slots=True)
class _Exchange:
    """State of a call in progress."""

    request: web.Request
    facts: CallFacts
    stream: web.StreamResponse | None = None
    """The streamed response. None: no part of a stream has gone to the client."""
    recorded: bool = False
    """True once its span is written."""
    ended: bool = False
    """True once the client was sent the event that ends a stream."""
    began: float = field(default_factory=time.perf_counter)
    first_byte: float | None = None
    """Time (`perf_counter`) at which the client was sent the first part of a stream. None: it was not."""


class _ClientLeftError(Exception):
    """The client closed its connection."""


class _EnginePausedError(Exception):
    """The engine refused a call because it is paused; nothing was sampled."""


class Calls:
    """Handlers of the routes that agents use."""

    def __init__(
        self,
        settings: Settings,
        session: aiohttp.ClientSession,
        pool: BackendPool,
        exporter: SpanExporter,
        counts: Counts,
        process_id: str,
        metrics: GatewayMetrics,
        redactor: Redactor | None,
    ) -> None:
        self._session = session
        self._pool = pool
        self._exporter = exporter
        self._counts = counts
        self._redactor = redactor
        self._process_id = process_id
        self._metrics = metrics
        self._seconds = settings.gateway.request_timeout_seconds
        self._relaxations = settings.gateway.relax
        self._seq = count()
        self._continued = ContinuedCalls()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        calls = [(prefix + path, partial(self.call, dialect)) for prefix in ("", ATTEMPT_PREFIX) for path, dialect in DIALECTS.items()]
        passed = [web.route("*", prefix + "/v1/{rest:.*}", self.pass_through) for prefix in ("", ATTEMPT_PREFIX)]
        return [*(web.post(path, handler) for path, handler in calls), *passed]

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """Pass on a request that is no policy call (models, embeddings and the like), unrecorded; an alias becomes the engine's model."""
        attempt = attempt_of(url_attempt(request), parse_baggage(request.headers.get("baggage")))
        if closed := self._counts.closed(attempt):
            return error_response(410, closed.message(), ATTEMPT_CLOSED)
        try:
            async with self._counts.limit(attempt, self._seconds):
                return await pass_through(request, self._session, self._pool, attempt)
        except TimeoutError:
            return error_response(*self._time_over(attempt))

    async def call(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Forward and record one policy call."""
        try:
            client_request = dialect.parse(await request.read())
        except ValueError as error:
            message = f"the request is not a JSON object: {error}"
            return json_response(dialect.error(400, message, "invalid_request_error"), 400)
        await self._exporter.room()
        baggage = parse_baggage(request.headers.get("baggage"))
        attempt = attempt_of(url_attempt(request), baggage)
        if closed := self._counts.begin(attempt):
            self._metrics.refused_late_call()
            return json_response(dialect.error(410, closed.message(), ATTEMPT_CLOSED), 410)
        context = call_context(attempt, self._counts.announced(attempt), baggage, request.headers.get("traceparent"))
        facts = CallFacts(context, client_request, next(self._seq), time.time_ns())
        exchange = _Exchange(request, facts)
        self._metrics.began()
        try:
            return await self._answered(exchange)
        except asyncio.CancelledError:
            facts.aborted = True
            raise
        except _ClientLeftError:
            facts.aborted = True
            return exchange.stream or web.Response()  # the client is gone
        except Exception:
            # A fault of ours: the client gets aiohttp's 500, and the span says so.
            facts.error_type = facts.error_type or GATEWAY_ERROR
            raise
        finally:
            await self._record(exchange)

    async def _record(self, exchange: _Exchange) -> None:
        """Write the call's span, once; what happens to the call from then on is not recorded."""
        if exchange.recorded:
            return
        exchange.recorded = True
        self._continued.keep(exchange.facts)
        try:
            # By the monotonic clock: the other may have been set meanwhile, and a call ends after its beginning.
            seconds = time.perf_counter() - exchange.began
            await self._exporter.put(self._span(exchange.facts, exchange.facts.started_ns + int(seconds * 1e9)))
        finally:
            facts = exchange.facts
            # A stream's refers to the answer: until a collection, which is rare here, both would stay, with all token ids.
            facts.answer.whole = None
            self._counts.end(
                facts.context.attempt,
                overflowed=facts.http_status == 400 and names_context_overflow(facts.error_message),
                tokens_out=facts.answer.tokens_out,
            )
            # After the answer's last byte: metrics are worth no wait.
            asyncio.get_running_loop().call_soon(self._count, exchange, time.perf_counter())

    def _span(self, facts: CallFacts, ended_ns: int) -> bytes:
        """Return the call's serialized span; if it cannot be built, a bare one, so that every counted call is recorded."""
        try:
            return build_span(facts, self._process_id, ended_ns, self._redactor)
        except Exception as fault:
            log.exception("a call could not be recorded whole: %s", facts.context.ids.traceparent)
            return bare_span(facts, self._process_id, ended_ns, fault)

    def _count(self, exchange: _Exchange, now: float) -> None:
        facts = exchange.facts
        answer = facts.answer
        self._metrics.ended(
            answer.engine.policy if answer.engine else self._named(facts.request.model),
            facts.request.dialect.path,
            str(facts.http_status or ""),
            facts.error_type or ("aborted" if facts.aborted else ""),
            tokens_in=sum(map(len, answer.prompts)) or _used(answer, "prompt_tokens", "input_tokens"),
            tokens_out=answer.tokens_out or _used(answer, "completion_tokens", "output_tokens"),
            first_byte_seconds=(exchange.first_byte or now) - exchange.began if answer.choices else None,
            seconds=now - exchange.began,
        )

    def _named(self, model: str | None) -> str:
        """Return the policy that a model names; empty for unknown names, which would make unbounded label values."""
        return self._pool.policy_of(model).name if model in self._pool.names else ""

    async def _answered(self, exchange: _Exchange) -> web.StreamResponse:
        """Answer a call; failures of the engine become error responses, and errors in the span."""
        try:
            async with self._counts.limit(exchange.facts.context.attempt, self._seconds):
                return await self._by_any_backend(exchange)
        except BackendDownError as error:
            return _failed(exchange, 503, "engine_down", str(error))
        except PoolFullError as error:
            response = _failed(exchange, 503, "pool_full", str(error))
            response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
            return response
        except TimeoutError:
            status, message, kind = self._time_over(exchange.facts.context.attempt)
            exchange.facts.aborted = kind == ATTEMPT_CLOSED
            return _failed(exchange, status, kind, message)

    def _time_over(self, attempt: AttemptKey | None) -> tuple[int, str, str]:
        """Return status, message and type of the error for a request whose time limit is over."""
        if closed := self._counts.closed(attempt):
            return 410, closed.message(), ATTEMPT_CLOSED
        return 504, f"no whole answer within gateway.request_timeout_seconds = {self._seconds:g}.", "timeout"

    async def _by_any_backend(self, exchange: _Exchange) -> web.StreamResponse:
        """Forward to a backend; try another one only where nothing was sent to the first."""
        facts, avoid = exchange.facts, NOTHING
        while True:
            async with self._pool.lease(facts.request.model, facts.context.attempt, avoid) as lease:
                try:
                    return await self._forward(exchange, lease)
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                    others = lease.failed_to_connect(error)
                    if others is None:
                        return _failed(exchange, 502, "engine_unreachable", unreachable(lease.backend, error))
                    avoid = others
                except _EnginePausedError:
                    facts.http_status = None  # the client has no response yet; the backend is closed to calls for now
                except aiohttp.ClientError as error:
                    return _failed(exchange, 502, "engine_unreachable", unreachable(lease.backend, error))

    async def _forward(self, exchange: _Exchange, lease: BackendLease) -> web.StreamResponse:
        request, facts, backend = exchange.request, exchange.facts, lease.backend
        facts.provider, facts.backend = backend.provider, backend.name
        if backend.is_engine:
            facts.request = facts.request.sampled(self._counts.announced(facts.context.attempt).sampling)
        if backend.is_engine and facts.context.mode == Mode.GREEDY:
            facts.request = facts.request.greedy()  # recorded as it is answered
        if backend.is_engine and facts.context.mode == Mode.TRAIN:
            facts.request, relaxed = relax(facts.request, self._relaxations)
            facts.relaxed = facts.relaxed or relaxed  # another backend may have been tried before
        if backend.is_engine and (left := self._counts.tokens_left(facts.context.attempt)) is not None:
            facts.request = facts.request.limited(left)
        refusal = backend.refusal(facts.request.engine_path)
        if refusal:
            return _failed(exchange, 400, "invalid_request_error", refusal)
        headers = forwarded(request.headers)
        if backend.is_engine:
            headers["traceparent"] = facts.context.ids.traceparent
        backend.add_headers(headers)
        url = backend.url + facts.request.engine_path
        # Not followed: the key and the conversation are for this upstream alone.
        sent = _request_body(facts.request, lease, self._continued.fields(request.headers, facts.context.attempt))
        async with self._session.post(url, data=sent, headers=headers, allow_redirects=False) as upstream:
            facts.http_status = upstream.status
            if upstream.status == 200 and upstream.content_type == "text/event-stream":
                return await self._stream(exchange, upstream, backend.scrubber())
            body = backend.scrub(await upstream.read())
            if upstream.status == 503 and backend.is_engine and PAUSED_TYPE.encode() in body and backend.refused_call():
                raise _EnginePausedError
            if upstream.status == 200:
                body = _read_whole(facts, body)
            else:
                facts.answer.json = body
                facts.error_type = str(upstream.status)
                facts.error_message = body.decode(errors="replace")
            return web.Response(body=body, status=upstream.status, headers=returned(upstream.headers))

    async def _stream(self, exchange: _Exchange, upstream: aiohttp.ClientResponse, scrubber: Scrubber) -> web.StreamResponse:
        facts = exchange.facts
        reader = facts.request.dialect.stream(facts.request)
        facts.answer = reader.answer
        response = web.StreamResponse(status=upstream.status, headers=returned(upstream.headers))
        await _to_client(response.prepare(exchange.request))
        exchange.stream = response
        async for data in upstream.content.iter_any():
            events = reader.feed(scrubber.feed(data))
            is_end = _is_end(events)
            if is_end:
                await self._record_stream(exchange)
            if events:
                exchange.first_byte = exchange.first_byte or time.perf_counter()
                await _to_client(response.write(events))
            exchange.ended |= is_end
        await self._record_stream(exchange)
        await _to_client(response.write_eof(reader.rest() + scrubber.rest()))
        return response

    async def _record_stream(self, exchange: _Exchange) -> None:
        """Write the span of a stream that has arrived whole."""
        facts = exchange.facts
        if facts.answer.failed:
            facts.error_type, facts.error_message = "engine_error", "the stream held an error, or something that is no part of an answer"
        _note_abort(facts)
        await self._record(exchange)


def _used(answer: EngineAnswer, *names: str) -> int:
    """Return the number of tokens that the upstream reports as usage, for answers without ids; 0 where it reports none."""
    counts = [(answer.usage or {}).get(name) for name in names]
    return next((count for count in counts if isinstance(count, int)), 0)


def _is_end(events: bytes) -> bool:
    """Return whether the last of these events marks the end of the answer for the client."""
    last = events.replace(b"\r\n", b"\n").removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    return _LAST_EVENT.match(last) is not None


def _request_body(request: ClientRequest, lease: BackendLease, more: Mapping[str, Any]) -> bytes:
    """Return the body of a request to a backend: with its own name of the model, and for an engine with further fields, also for ids."""
    if lease.model is not None and lease.model != request.model:
        request = request.changed({"model": lease.model})
    return request.for_engine(more) if lease.backend.is_engine else request.raw


def _read_whole(facts: CallFacts, body: bytes) -> bytes:
    """Read a whole answer; return what the client gets of it."""
    try:
        facts.answer, body = facts.request.dialect.read(body, facts.request)
    except JSON_ERRORS as error:
        facts.answer.json = body
        facts.error_type, facts.error_message = "malformed_answer", str(error)
    _note_abort(facts)
    return body


def _note_abort(facts: CallFacts) -> None:
    """Mark the call as aborted where the engine ended it with `abort`, by order of its operator or after a failed publication."""
    facts.aborted = any(choice.finish_reason == "abort" for choice in facts.answer.choices.values())


def _failed(exchange: _Exchange, status: int, kind: str, message: str) -> web.StreamResponse:
    """Answer with an error, or break the connection of a stream that has begun: nothing else shows that it is incomplete."""
    if exchange.stream is not None and exchange.ended:
        return exchange.stream  # it is complete: the call's own tokens may have ended the attempt, say
    exchange.facts.error_type, exchange.facts.error_message = kind, message
    if exchange.stream is None:
        exchange.facts.http_status = status
        return json_response(exchange.facts.request.dialect.error(status, message, kind), status)
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
