"""Spans on their way to the store: kept until the store has them.

In: serialized spans. Out: OTLP/HTTP requests of up to BATCH_BYTES, one at a time, each repeated until it is
acknowledged. Invariant: a span leaves the queue only when the store has acknowledged it, or refuses it for what it is
(then it is named in the log); the queue is bounded, and while it is full, calls wait rather than go unrecorded.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from dataclasses import dataclass

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from gateway.record import attribute
from spangrad import __version__, semconv
from spangrad.settings import Settings

log = logging.getLogger(__name__)

BATCH_BYTES = 4 * 2**20
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
REQUEST_SECONDS = 60
SPLIT_STATUSES = frozenset({400, 413})
"""The store will not take this body, ever: its spans are tried one by one."""


@dataclass(frozen=True, slots=True)
class _Queued:
    span: bytes
    due: float
    """Time (monotonic) before which it is held back."""


class SpanExporter:
    """A queue and the task that empties it."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession, instance_id: str) -> None:
        self._url = f"{settings.store.otlp_endpoint.rstrip('/')}/v1/traces"
        token = settings.store.token
        self._headers = {"Content-Type": "application/x-protobuf"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token.get_secret_value()}"
        self._session = session
        self._limit = settings.gateway.export_bytes
        self._delay = settings.gateway.export_delay_seconds
        self._resource = Resource(
            attributes=[attribute("service.name", "spangrad-gateway"), attribute("service.instance.id", instance_id)]
        ).SerializeToString()
        self._scope = InstrumentationScope(name=semconv.GATEWAY_SCOPE, version=__version__).SerializeToString()
        self._queue: deque[_Queued] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name="span exporter")

    @property
    def waiting(self) -> int:
        """Spans that are not acknowledged yet."""
        return len(self._queue)

    async def room(self) -> None:
        """Wait until the queue has room; every call does before it begins."""
        await self._room.wait()

    def put(self, span: bytes) -> None:
        """Queue a span. Calls that began while there was room may overshoot the bound, by one span each."""
        self._queue.append(_Queued(span, time.monotonic() + self._delay))
        self._bytes += len(span)
        self._filled.set()
        if self._bytes >= self._limit and self._room.is_set():
            self._room.clear()
            log.warning("%d bytes of spans wait for the store at %s: calls wait until it takes them", self._bytes, self._url)

    async def stop(self, seconds: float) -> int:
        """Send what is left, held back or not, for at most `seconds`; give the number of spans that are lost."""
        self._stopping.set()
        self._filled.set()
        try:
            await asyncio.wait_for(self.task, seconds)
        except TimeoutError:
            pass  # what is left is counted and reported by the caller
        return self.waiting

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            if not self._queue:
                if self._stopping.is_set():
                    return
                self._filled.clear()
                continue
            held = self._queue[0].due - time.monotonic()
            if held > 0 and not self._stopping.is_set():
                await self._pause(held)
                continue
            await self._deliver(self._batch())

    async def _pause(self, seconds: float) -> None:
        """Sleep, or until the order to stop."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            pass  # nobody stopped us: the time is over

    def _batch(self) -> list[bytes]:
        """The spans at the head of the queue that are due, and that fit into a request."""
        now = time.monotonic()
        batch: list[bytes] = []
        size = 0
        for queued in self._queue:
            size += len(queued.span)
            if batch and (size > BATCH_BYTES or (queued.due > now and not self._stopping.is_set())):
                break
            batch.append(queued.span)
        return batch

    async def _deliver(self, batch: list[bytes]) -> None:
        """Send the head of the queue until it is acknowledged, then drop it from the queue."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            refusal, permanent = await self._send(batch)
            if not refusal:
                break
            if permanent and len(batch) == 1:
                log.error("a span is lost: the store at %s refuses it: %s", self._url, refusal)
                break
            if permanent:
                for span in batch:
                    await self._deliver([span])
                return
            log.warning("the store at %s does not take spans (%s): %d wait, next try in %.1f s", self._url, refusal, self.waiting, pause)
            if self._stopping.is_set():
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            else:
                await self._pause(pause * random.uniform(0.5, 1))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        for span in batch:
            self._queue.popleft()
            self._bytes -= len(span)
        if self._bytes < self._limit:
            self._room.set()

    async def _send(self, batch: list[bytes]) -> tuple[str, bool]:
        """Send once. Gives the reason why it was not taken (empty: it was), and whether that will not change."""
        try:
            timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
            async with self._session.post(self._url, data=self._request(batch), headers=self._headers, timeout=timeout) as answer:
                body = await answer.read()
                if answer.status // 100 == 2:
                    self._report_rejected(body)
                    return "", False
                return f"{answer.status} {body[:200].decode(errors='replace')}".strip(), answer.status in SPLIT_STATUSES
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__, False

    def _report_rejected(self, body: bytes) -> None:
        """Name the spans of a request that were refused while the rest was taken."""
        try:
            rejected = ExportTraceServiceResponse.FromString(body).partial_success
        except DecodeError:
            return  # not OTLP's answer, but a 2xx: the request was taken
        if rejected.rejected_spans:
            log.error("%d spans are lost: the store at %s refuses them: %s", rejected.rejected_spans, self._url, rejected.error_message)

    def _request(self, batch: list[bytes]) -> bytes:
        """An ExportTraceServiceRequest around spans that are serialized already (field numbers of trace.proto)."""
        spans = b"".join(_message(2, span) for span in batch)
        return _message(1, _message(1, self._resource) + _message(2, _message(1, self._scope) + spans))


def _message(number: int, body: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return bytes([number << 3 | 2]) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
