"""Export of spans that loses none while the span store is down, and that does not slow down the agent.

In: spans that ended, from the OpenTelemetry SDK. Out: OTLP/HTTP requests (protobuf) of bounded size.
Invariant: a span leaves the queue when the endpoint has acknowledged it (2xx), and otherwise only counted as lost: refused
for good (4xx), not sendable, without room in a full queue, or without time at the process's end. No caller waits longer
than the limits below.

Used inside of agents' processes, by the runner and by the trainer, so it imports the standard library, OpenTelemetry
and `spangrad.agent` only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import sys
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, cast

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.util.re import parse_env_headers

from span_processors.context import rollout_attributes
from span_processors.otlp_http import Poster
from spangrad.semconv import PROCESS_ID, SEQ

_UNLIMITED = SpanLimits(
    max_events=SpanLimits.UNSET,
    max_links=SpanLimits.UNSET,
    max_span_attributes=SpanLimits.UNSET,
    max_event_attributes=SpanLimits.UNSET,
    max_link_attributes=SpanLimits.UNSET,
    max_attribute_length=SpanLimits.UNSET,
    max_span_attribute_length=SpanLimits.UNSET,
)
"""No limits: OpenTelemetry's defaults, or those in the environment for an agent's own provider, drop what is over them in silence."""

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 2.0

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def traces_url(endpoint: str) -> str:
    """Return the URL for spans of an OTLP/HTTP endpoint such as `http://127.0.0.1:4318`."""
    return endpoint.rstrip("/") + "/v1/traces"


def parse_headers(text: str) -> dict[str, str]:
    """Parse headers in the form of OTEL_EXPORTER_OTLP_HEADERS: `key=value,key=value`, percent-encoded."""
    return dict(parse_env_headers(text, liberal=True))


def _after_fork_in_child(method: Callable[[], None]) -> None:
    """Call a bound method in each forked child for as long as its object lives."""
    if hasattr(os, "register_at_fork"):
        weak = weakref.WeakMethod(method)

        def call() -> None:
            if alive := weak():
                alive()

        os.register_at_fork(after_in_child=call)


class ProcessSequence:
    """Id of this process and counter of its spans in the order of their starts; both are renewed after a fork."""

    def __init__(self) -> None:
        self._renew()
        _after_fork_in_child(self._renew)

    def _renew(self) -> None:
        self._process_id = uuid.uuid4().hex
        self._counter = itertools.count()

    def next(self) -> dict[str, str | int]:
        """Return the attributes of a span that starts: the process's id and the next number."""
        return {PROCESS_ID: self._process_id, SEQ: next(self._counter)}


SEQUENCE = ProcessSequence()
"""Sequence of the whole process, shared so that numbers of two providers do not collide."""


class RolloutSpanProcessor(SpanProcessor):
    """Writes `spangrad.process.id`, `spangrad.seq` and the attributes of its rollout on every span as it starts."""

    def __init__(self, process: Mapping[str, object]) -> None:
        """`process` is the baggage that the process was started with, which a span's own context goes before."""
        self._process = dict(process)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Stamp the span, which starts all the same where its context cannot be read."""
        try:
            span.set_attributes(SEQUENCE.next())
            span.set_attributes(rollout_attributes(parent_context, self._process))
        except Exception as error:  # an agent's context may hold anything
            _logger.warning("a span starts without the attributes of its context: %s", error)


class LosslessQueue(ABC, Generic[_T]):
    """Queue for ended spans, bounded by bytes, that sends them until they are acknowledged.

    Args:
        url: URL to which requests are posted, `/v1/traces` included.
        headers: headers of each request.
        certificate: file of certificate authorities for https. None: the system's.
        queue_bytes: size limit of the spans held, those in flight included, in bytes.
        batch_bytes: size of a request's spans at which it is closed, in bytes.
        delay_seconds: time that a span waits for others, in seconds.
        full_wait_seconds: time that the first span that finds the queue full waits for room, in seconds; the following ones do not
            wait until there has been room again.
        shutdown_seconds: time limit of `shutdown` for the queue to empty, in seconds.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        certificate: str | None = None,
        queue_bytes: int = 64 * 2**20,
        batch_bytes: int = 2**20,
        delay_seconds: float = 0.2,
        full_wait_seconds: float = 0.25,
        shutdown_seconds: float = 10,
    ) -> None:
        self.url = url
        self._post = Poster(url, headers or {}, certificate)
        self._queue_bytes = queue_bytes
        self._batch_bytes = batch_bytes
        self._delay_seconds = delay_seconds
        self._full_wait_seconds = full_wait_seconds
        self._shutdown_seconds = shutdown_seconds
        self._reset()
        _after_fork_in_child(self._reset)

    def _reset(self) -> None:
        """Start empty; after a fork the parent's spans, thread and lock stay with the parent."""
        # A condition's lock is re-entrant, so a signal handler may flush while the interrupted code holds it.
        self._changed = threading.Condition()
        self._queue: deque[tuple[_T, int]] = deque()
        self._held_bytes = 0
        self._in_flight = 0
        self._accepted = 0
        self._settled = 0
        self._flush_to = 0
        self.lost = 0
        """Number of spans lost so far: refused, not sendable, without room, or without time."""
        self.lost_because = ""
        """Reason for the last loss, for users; empty while there is none."""
        self._saturated = False
        self._closing = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._post.forget_connection()

    def put(self, span: _T, size: int) -> None:
        """Queue a span of so many bytes; wait a bounded time when the queue is full, then count it as lost."""
        with self._changed:
            has_room = self._room_for(size)
            newly_full = not has_room and not self._saturated
            self._saturated = not has_room
            if not self._closed and has_room and self._start_thread():
                self._queue.append((span, size))
                self._held_bytes += size
                self._accepted += 1
                if len(self._queue) == 1 or self._held_bytes >= self._batch_bytes:
                    self._changed.notify_all()
                return
            self._lose(1, "there was no room for them, or no time")
        if newly_full:  # not under the lock: a handler of logging may wait for a thread that ends a span
            _logger.warning("the queue for %s is full (%d bytes): spans are dropped until there is room", self.url, self._held_bytes)

    def _room_for(self, size: int) -> bool:
        def room() -> bool:
            return self._closed or self._held_bytes == 0 or self._held_bytes + size <= self._queue_bytes

        return room() or (not self._saturated and self._changed.wait_for(room, self._full_wait_seconds))

    def _start_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="spangrad-spans", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down, or the process may have no more threads
                return False
            self._thread = thread
        return True

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Wait until every span that ended before this call is settled; concurrent callers share the requests.

        Returns:
            False if the time limit was exceeded first.
        """
        with self._changed:
            target = self._accepted
            self._flush_to = max(self._flush_to, target)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._settled >= target, timeout_millis / 1000)

    def shutdown(self) -> None:
        """Send what is queued, for a bounded time, then report lost spans on stderr, if any."""
        with self._changed:
            if self._closed:
                return
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or not (self._queue or self._in_flight), self._shutdown_seconds)
            if self._closed:  # a signal handler that ran while we waited has finished this
                return
            self._closed = True
            if left := len(self._queue) + self._in_flight:
                self._lose(left, "there was no time")
            self._changed.notify_all()
        if self.lost:
            print(f"spangrad: {self.lost} spans were not delivered to {self.url} and are lost.", file=sys.stderr, flush=True)

    def _work(self) -> None:
        with suppress_instrumentation():
            while batch := self._next_batch():
                self._send([span for span, _ in batch])
                with self._changed:
                    self._held_bytes -= sum(size for _, size in batch)
                    self._settled += len(batch)
                    self._in_flight = 0
                    self._changed.notify_all()

    def _send(self, spans: Sequence[_T]) -> None:
        """Deliver spans, or count them as lost; nothing that is raised ends the thread."""
        left = len(spans)
        try:
            for body, count in self.encode(spans):
                self._deliver(body, count)
                left -= count
        except Exception as error:  # without the thread every later span would be lost, and every flush would wait in vain
            self._lose(left, f"{type(error).__name__} while they were sent")
            with contextlib.suppress(Exception):  # a handler of logging may be what failed
                _logger.error("%d spans for %s are lost: %s while they were sent", left, self.url, type(error).__name__)

    def _next_batch(self) -> list[tuple[_T, int]]:
        """Wait for spans, then for others to join them; empty when there will be none."""
        with self._changed:
            # Until it is closed, not only closing: spans may end while `shutdown` waits for others.
            self._changed.wait_for(lambda: bool(self._queue) or self._closed)
            self._changed.wait_for(self._urgent, self._delay_seconds)
            batch: list[tuple[_T, int]] = []
            size = 0
            while self._queue and not self._closed and (not batch or size + self._queue[0][1] <= self._batch_bytes):
                batch.append(self._queue.popleft())
                size += batch[-1][1]
            self._in_flight = len(batch)
            return batch

    def _urgent(self) -> bool:
        return self._closing or self._held_bytes >= self._batch_bytes or self._settled < self._flush_to

    @abstractmethod
    def encode(self, spans: Sequence[_T]) -> Iterator[tuple[bytes, int]]:
        """Yield request bodies with their numbers of spans."""

    def _deliver(self, body: bytes, count: int) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        waiting = False
        while True:
            answer = self._post(body)
            if isinstance(answer, int):
                if answer:
                    _logger.error("%s rejected %d of %d spans", self.url, answer, count)
                    self._lose(answer, f"{answer} of {count} spans were rejected")
                elif waiting:
                    _logger.info("%s takes spans again", self.url)
                return
            if not answer.retry:
                _logger.error("%s refused %d spans for good: %s", self.url, count, answer.reason)
                self._lose(count, answer.reason)
                return
            if not waiting:
                _logger.warning("%s does not take spans (%s): trying again until it does", self.url, answer.reason)
                waiting = True
            with self._changed:
                # While closing there is little time: retry often, whatever wait the endpoint requests.
                wait = _FIRST_BACKOFF_SECONDS if self._closing else answer.after_seconds or backoff * random.uniform(0.5, 1)
                closing = self._closing
                self._changed.wait_for(lambda closing=closing: self._closed or self._closing != closing, wait)
                if self._closed:
                    return
            backoff = min(backoff * 2, _LONGEST_BACKOFF_SECONDS)

    def _lose(self, count: int, because: str) -> None:
        with self._changed:
            self.lost += count
            self.lost_because = because


class LosslessSpanProcessor(LosslessQueue[ReadableSpan], SpanProcessor):
    """Queue of the spans of OpenTelemetry's SDK."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span."""
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        try:
            size = approximate_bytes(span)
        except Exception:  # an agent may name a span anything: that is for the encoder to refuse
            size = self._batch_bytes
        self.put(span, size)

    def encode(self, spans: Sequence[ReadableSpan]) -> Iterator[tuple[bytes, int]]:
        """Yield one body, unless a span that cannot be encoded must be separated."""
        try:
            yield encode_spans(spans).SerializeToString(), len(spans)
        except Exception as error:  # an attribute may hold anything
            if len(spans) > 1:
                for span in spans:
                    yield from self.encode([span])
            else:
                _logger.error("span %r cannot be encoded and is dropped: %s", spans[0].name, error)
                self._lose(1, f"span {spans[0].name!r} cannot be encoded: {error}")


def approximate_bytes(span: ReadableSpan) -> int:
    """Return the approximate size of a span in bytes: its texts, arrays and maps count, its fixed fields are a constant."""
    records = (span, *span.events, *span.links)
    return 200 + len(span.name) + sum(_value_bytes(record.attributes or {}) for record in records)


def _value_bytes(value: object) -> int:
    if isinstance(value, int | float):  # first: most values are items of arrays of token ids and logprobs
        return 0
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + 8 + _value_bytes(item) for key, item in cast("Mapping[str, object]", value).items())
    if isinstance(value, Sequence):
        return sum(8 + _value_bytes(item) for item in cast("Sequence[object]", value))
    return 0


def tracer_provider(service_name: str, endpoint: str, headers: Mapping[str, str] | None = None) -> TracerProvider:
    """Return a provider of the process's own, not the global one, whose spans go whole to an OTLP/HTTP endpoint and are never sampled out.

    Spans name the rollout of the context in which they start. The endpoint is a base URL, without `/v1/traces`; headers are those of each
    request, such as `bearer(token)`.
    """
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource.create({SERVICE_NAME: service_name}),
        span_limits=_UNLIMITED,
    )
    provider.add_span_processor(RolloutSpanProcessor({}))
    provider.add_span_processor(LosslessSpanProcessor(traces_url(endpoint), headers))
    return provider
