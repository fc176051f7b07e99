"""Exporter of spans to the store: each span is kept on disk until the store has acknowledged it.

In: serialized spans. Out: OTLP/HTTP requests of up to BATCH_BYTES, one at a time, in order, each repeated until it is
acknowledged. Invariant: a span is on disk when `put` returns, and stays there until the store has acknowledged it, or
refuses it because of its content (which is logged); memory and disk are bounded, and while the disk's limit is reached,
new calls wait rather than go unrecorded.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from gateway.recorder.spill import Spill, SpilledSpan
from spangrad import __version__, semconv
from spangrad.encoding import otlp
from spangrad.http.service import bearer
from spangrad.settings import Settings

log = logging.getLogger(__name__)

BATCH_BYTES = 4 * 2**20
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
REQUEST_SECONDS = 60
DISK_PAUSE_SECONDS = 0.5
"""Pause between two tries to write to, or to read from, a disk that fails."""
QUICK_READ_BYTES = 2**18
"""Most bytes that are read back in the event loop; more are read in a thread, during which further spans may come."""
SPLIT_STATUSES = frozenset({400, 413})
"""HTTP statuses by which the store refuses a body for good: its spans are then sent one by one."""


class SpanExporter:
    """A queue on disk, whose head is in memory as well, and the task that empties it."""

    def __init__(
        self,
        settings: Settings,
        session: aiohttp.ClientSession,
        instance_id: str,
        complete: Callable[[Sequence[bytes]], list[bytes]] | None = None,
    ) -> None:
        """Take over the spill with what an earlier gateway left, and begin to send.

        `complete` adds to spans before they are sent, in a thread. None: they are sent unchanged.

        Raises:
            GatewayError: another gateway owns `gateway.spill_path`, or it cannot be written.
        """
        self._url = f"{settings.store.otlp_endpoint.rstrip('/')}/v1/traces"
        self._headers = {"Content-Type": "application/x-protobuf", **bearer(settings.store.token)}
        self._session = session
        self._path = settings.gateway.spill_path
        self._spill = Spill(self._path)
        self._disk_limit = settings.gateway.spill_bytes
        self._memory_limit = settings.gateway.export_bytes
        self._delay = settings.gateway.export_delay_seconds
        self._resource = otlp.resource({"service.name": "spangrad-gateway", "service.instance.id": instance_id})
        self._scope = otlp.scope(semconv.GATEWAY_SCOPE, __version__)
        self._queue: deque[SpilledSpan] = deque()
        self.memory_bytes = 0
        """Bytes of the spans in the queue."""
        self._read = self._spill.begin
        """Offset in the spill up to which spans are, or were, in the queue."""
        self._unwritten: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        """Spans that could not be written to disk, and the futures of the calls that wait for them."""
        self._writer: asyncio.Task[None] | None = None
        self._filled = asyncio.Event()
        self._filled.set()
        self._room = asyncio.Event()
        self._update_backpressure()
        self._stopping = asyncio.Event()
        self._complete = complete
        self.delivered = 0
        """Number of spans that the store has acknowledged."""
        self.refused = 0
        """Number of spans that the store has refused because of their content."""
        if self.waiting_bytes:
            log.info("%d bytes of spans that an earlier gateway left in %s go to the store now", self.waiting_bytes, self._path)
        self.task = asyncio.create_task(self._run(), name="span exporter")

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of spans that are not acknowledged yet."""
        return self._spill.waiting_bytes

    async def room(self) -> None:
        """Wait until the disk has room; every call does before it begins."""
        await self._room.wait()

    async def put(self, span: bytes) -> None:
        """Write a span to the spill, and return when it is there. Calls that began below the limit may exceed it by one span each.

        A caller that is cancelled while the disk is full leaves the span here: it is written when the disk takes it.
        """
        if not self._unwritten and self._append(span):
            return
        written = asyncio.get_running_loop().create_future()
        self._unwritten.append((span, written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_later(), name="span writer")
        await written

    async def stop(self, seconds: float) -> int:
        """Send all remaining spans, due or not, for at most `seconds`; those not acknowledged stay on disk for the next gateway.

        Returns:
            The number of spans that are lost, because they could not be written to disk.
        """
        self._stopping.set()
        self._filled.set()
        try:
            await asyncio.wait_for(self.task, seconds)
        except TimeoutError:
            pass  # what is left stays on disk
        if self._writer is not None:
            self._writer.cancel()
        self._write_again()
        if self.waiting_bytes:
            log.warning("%d bytes of spans wait in %s for the next gateway: the store did not take them", self.waiting_bytes, self._path)
        self._spill.close()
        return len(self._unwritten)

    def _append(self, span: bytes) -> bool:
        """Write a span to the spill, and queue it if the queue reaches the spill's end; return whether it was written."""
        begin = self._spill.end
        try:
            end = self._spill.append(span)
        except OSError as error:
            if self._room.is_set():
                log.error("spans cannot be written to %s (%s): calls wait until they can", self._path, error.strerror)
            self._room.clear()
            return False
        if self._read == begin and self.memory_bytes < self._memory_limit:
            self._queue.append(SpilledSpan(span, end, time.monotonic() + self._delay if self._delay else 0))
            self.memory_bytes += len(span)
            self._read = end
        self._filled.set()
        if self._spill.waiting_bytes >= self._disk_limit and self._room.is_set():
            self._room.clear()
            log.warning("%d bytes of spans wait for the store at %s: calls wait until it takes them", self.waiting_bytes, self._url)
        return True

    async def _write_later(self) -> None:
        """Retry writing the spans that could not be written to disk, until all are."""
        while self._unwritten:
            await asyncio.sleep(DISK_PAUSE_SECONDS)
            self._write_again()
        self._writer = None
        log.info("spans can be written to %s again", self._path)
        self._update_backpressure()

    def _write_again(self) -> None:
        while self._unwritten and self._append(self._unwritten[0][0]):
            _, written = self._unwritten.popleft()
            if not written.done():
                written.set_result(None)

    def _update_backpressure(self) -> None:
        """Let calls begin if no span waits to be written, and the spill is below its limit."""
        if not self._unwritten and self._spill.waiting_bytes < self._disk_limit:
            self._room.set()

    async def _run(self) -> None:
        while True:
            if not self._queue:
                if self._read < self._spill.end:
                    await self._read_back()
                elif self._stopping.is_set():
                    return
                else:
                    self._filled.clear()
                    await self._filled.wait()
                continue
            held = self._queue[0].due - time.monotonic()
            if held > 0 and not self._stopping.is_set():
                await self._pause(held)
                continue
            await self._deliver(self._batch())

    async def _read_back(self) -> None:
        """Fill the empty queue from the disk."""
        extent = self._spill.extent(self._read)
        try:
            if extent.end - extent.begin <= QUICK_READ_BYTES:
                piece = extent.read(QUICK_READ_BYTES)
            else:
                piece = await asyncio.to_thread(extent.read, BATCH_BYTES)
        except OSError as error:
            log.error("%s cannot be read (%s): its spans wait", extent.path, error.strerror)
            await self._pause(DISK_PAUSE_SECONDS)
            return
        if piece.damaged:
            log.error("%d bytes of %s are no whole spans, and left out", piece.damaged, extent.path)
        self._queue.extend(piece.spans)
        self.memory_bytes = sum(len(stored.span) for stored in piece.spans)
        self._read = piece.end
        if not piece.spans:
            self._release(piece.end)

    async def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the exporter is stopped."""
        if self._stopping.is_set():
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
            return
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            pass  # the time is over

    def _batch(self) -> list[SpilledSpan]:
        """Return the spans at the head of the queue that are due and fit into one request."""
        now = time.monotonic()
        batch: list[SpilledSpan] = []
        size = 0
        for queued in self._queue:
            size += len(queued.span)
            if batch and (size > BATCH_BYTES or (queued.due > now and not self._stopping.is_set())):
                break
            batch.append(queued)
        return batch

    async def _deliver(self, batch: list[SpilledSpan]) -> None:
        """Send the head of the queue until it is acknowledged, then drop it from the queue and the disk."""
        pause = FIRST_PAUSE_SECONDS
        spans = [queued.span for queued in batch]
        if self._complete is not None:
            spans = await asyncio.to_thread(self._complete, spans)
        while True:
            refusal, permanent = await self._send(spans)
            if not refusal:
                self.delivered += len(batch)
                break
            if permanent and len(batch) == 1:
                self.refused += 1
                log.error("a span is lost: the store at %s refuses it: %s", self._url, refusal)
                break
            if permanent:
                for queued in batch:
                    await self._deliver([queued])
                return
            log.warning(
                "the store at %s does not take spans (%s): %d bytes wait, next try in %.1f s", self._url, refusal, self.waiting_bytes, pause
            )
            await self._pause(pause * random.uniform(0.5, 1))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        for queued in batch:
            self._queue.popleft()
            self.memory_bytes -= len(queued.span)
        self._release(batch[-1].end)

    def _release(self, end: int) -> None:
        self._spill.release(end)
        self._update_backpressure()

    async def _send(self, spans: list[bytes]) -> tuple[str, bool]:
        """Send spans once; return the reason why the store did not take them (empty: it did), and whether the failure is permanent."""
        try:
            timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
            async with self._session.post(
                self._url, data=otlp.request(self._resource, self._scope, spans), headers=self._headers, timeout=timeout
            ) as answer:
                body = await answer.read()
                if answer.status // 100 == 2:
                    self._report_rejected(body)
                    return "", False
                return f"{answer.status} {body[:200].decode(errors='replace')}".strip(), answer.status in SPLIT_STATUSES
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__, False

    def _report_rejected(self, body: bytes) -> None:
        """Count and log the spans of a request that the store refused while it took the rest."""
        try:
            rejected = ExportTraceServiceResponse.FromString(body).partial_success
        except DecodeError:
            return  # not OTLP's answer, but a 2xx: the request was taken
        if rejected.rejected_spans:
            self.refused += rejected.rejected_spans
            self.delivered -= rejected.rejected_spans
            log.error("%d spans are lost: the store at %s refuses them: %s", rejected.rejected_spans, self._url, rejected.error_message)
