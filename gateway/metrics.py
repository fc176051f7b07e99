"""Metrics of the gateway, in Prometheus' text format.

In: ends of calls, deliveries of spans, publications; at each scrape, queue lengths and the backends' states. Out: the text of `/metrics`.
Invariant: counting costs a call less than 5 us and waits for nothing; labels are names that we or the settings give, never a client's own.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.pool.backend import Backend
from gateway.pool.pool import BackendPool
from gateway.recorder.exporter import SpanExporter

FIRST_BYTE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WHOLE_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PUBLICATION_SECONDS = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PREFIX = "spangrad_gateway_"
_BACKEND = ["backend", "policy"]


class GatewayMetrics(Collector):
    """Metrics of the gateway, in a registry of their own: events are counted as they happen, states are asked at each scrape."""

    def __init__(self, pool: BackendPool, exporter: SpanExporter) -> None:
        self._pool, self._exporter = pool, exporter
        self.in_flight = 0
        self.followers: Callable[[], int] = int
        self.controller_up: Callable[[], bool] = lambda: True
        self._events = CollectorRegistry(auto_describe=False)
        labels = ("policy", "dialect")
        self._calls = self._counter("calls", "Policy calls that ended.", *labels, "status", "error_type")
        self._refused_late = self._counter("calls_refused_late", "Calls refused because their attempt had ended.")
        self._tokens_in = self._counter("tokens_in", "Tokens of prompts.", *labels)
        self._tokens_out = self._counter("tokens_out", "Tokens of answers.", *labels)
        self._first_byte = self._histogram(
            "first_byte_seconds", "From a call's beginning to its answer's first byte.", FIRST_BYTE_SECONDS, *labels
        )
        self._whole = self._histogram("call_seconds", "From a call's beginning to its end.", WHOLE_SECONDS, *labels)
        self._recorded = self._counter("spans_recorded", "Spans written to the spill file.")
        self._publications = self._histogram("publication_seconds", "Publications, by outcome.", PUBLICATION_SECONDS, "policy", "outcome")
        self._dropped_followers = self._counter("followers_dropped", "Followers that were disconnected since they did not confirm a state.")
        # To find the children of labels takes longer than to count.
        self._calls_of, self._children = cache(self._calls.labels), cache(self._of_policy)

    def began(self) -> None:
        """Count an accepted call."""
        self.in_flight += 1

    def ended(
        self,
        policy: str,
        dialect: str,
        status: str,
        error: str,
        *,
        tokens_in: int,
        tokens_out: int,
        first_byte_seconds: float | None,
        seconds: float,
    ) -> None:
        """Count a call that has ended, and whose span is recorded.

        `policy` answered or was to answer; `dialect` is its path; `error` is the span's `error.type`. Texts are empty where there is no
        such thing. Tokens are those of all prompts and choices; seconds count from the call's beginning. None: no byte of an answer came.
        """
        self.in_flight -= 1
        self._recorded.inc()
        self._calls_of(policy, dialect, status, error).inc()
        tokens_in_counter, tokens_out_counter, first_byte, whole = self._children(policy, dialect)
        tokens_in_counter.inc(tokens_in)
        tokens_out_counter.inc(tokens_out)
        if first_byte_seconds is not None:
            first_byte.observe(first_byte_seconds)
        whole.observe(seconds)

    def refused_late_call(self) -> None:
        """Count a call that was refused because its attempt had ended."""
        self._refused_late.inc()

    def published(self, policy: str, outcome: str, seconds: float) -> None:
        """Count a publication that has ended, with outcome `ok` or `failed`."""
        self._publications.labels(policy, outcome).observe(seconds)

    def dropped_follower(self) -> None:
        """Count a follower that was disconnected."""
        self._dropped_followers.inc()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus_client calls this at each scrape."""
        yield from self._events.collect()
        spans = self._exporter
        yield _gauge("calls_in_flight", "Policy calls that were accepted and have not ended.", self.in_flight)
        yield _gauge("calls_waiting", "Of those, calls that wait for a backend.", self._pool.waiting)
        yield _counter("spans_delivered", "Spans that the store acknowledged.", spans.delivered)
        yield _counter("spans_refused", "Spans that the store refused for what they are: they are lost.", spans.refused)
        yield _gauge("spans_waiting_bytes", "Bytes of spans in the spill file that the store has not acknowledged.", spans.waiting_bytes)
        yield _gauge("spans_memory_bytes", "Of those, bytes that are in memory as well.", spans.memory_bytes)
        yield _gauge("followers", "Gateways that follow this one.", self.followers())
        yield _gauge("controller_up", "0 while this gateway follows another one that is away, else 1.", self.controller_up())
        yield from self._of_backends()

    def _of_policy(self, policy: str, dialect: str) -> tuple[Counter, Counter, Histogram, Histogram]:
        labels = (policy, dialect)
        return (
            self._tokens_in.labels(*labels),
            self._tokens_out.labels(*labels),
            self._first_byte.labels(*labels),
            self._whole.labels(*labels),
        )

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, help_text, labels, registry=self._events)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, help_text, labels, registry=self._events, buckets=buckets)

    def _of_backends(self) -> Iterator[Metric]:
        backends = self._pool.backends
        by_status = GaugeMetricFamily(_PREFIX + "backends", "Backends, by status.", labels=["policy", "status"])
        for (policy, status), count in collections.Counter((backend.policy, backend.status) for backend in backends).items():
            by_status.add_metric((policy, status), count)
        in_flight = GaugeMetricFamily(_PREFIX + "backend_in_flight", "Calls that a backend is answering.", labels=_BACKEND)
        busy = CounterMetricFamily(_PREFIX + "backend_busy_seconds", "Seconds in which a backend had a call in flight.", labels=_BACKEND)
        version = GaugeMetricFamily(_PREFIX + "backend_version", "The policy version that a backend serves.", labels=_BACKEND)
        for backend in backends:
            in_flight.add_metric((backend.name, backend.policy), backend.in_flight)
            busy.add_metric((backend.name, backend.policy), backend.busy_seconds)
            if isinstance(backend, Backend) and backend.info:
                version.add_metric((backend.name, backend.policy), backend.info.version)
        yield from (by_status, in_flight, busy, version)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, help_text, value=value)
