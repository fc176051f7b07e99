"""Metrics of the gateway, in Prometheus' text format.

In: ends of calls, deliveries of spans, publications; at each scrape, queue lengths and the backends' states. Out: the text of `/metrics`.
Invariant: counting costs a call less than 2 us and never waits; labels are names that we or the settings give, never a client's own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

FIRST_BYTE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WHOLE_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PUBLICATION_SECONDS = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PREFIX = "spangrad_gateway_"
_BACKEND = ["backend", "policy"]


@dataclass(frozen=True, slots=True)
class BackendSample:
    """A backend at the time of a scrape."""

    name: str
    policy: str
    status: str
    version: int | None
    """None: not known, or it has none."""
    in_flight: int


@dataclass(frozen=True, slots=True)
class SpanState:
    """State of the span exporter at the time of a scrape."""

    delivered: int = 0
    """Spans that the store has acknowledged."""
    refused: int = 0
    """Spans that the store has refused because of their content."""
    waiting_bytes: int = 0
    """Bytes of the spans that the store has not acknowledged; all of them are in the spill file."""
    memory_bytes: int = 0
    """Bytes of those spans that are in memory as well."""


@dataclass(slots=True)
class Histogram:
    """Counts of the values up to each bound, and the sum of all values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets' bounds and cumulative counts, as Prometheus expects them."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return [(name, float(sum(self.counts[: place + 1]))) for place, name in enumerate(names)]


@dataclass(slots=True)
class _PolicyTally:
    """Tokens and durations of one policy's calls in one dialect."""

    first_byte: Histogram = field(default_factory=lambda: Histogram(FIRST_BYTE_SECONDS))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE_SECONDS))
    tokens_in: int = 0
    tokens_out: int = 0


class GatewayMetrics(Collector):
    """Counters, gauges and histograms of the gateway: plain numbers, put into Prometheus' form at each scrape."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.spans_recorded = 0
        # Asked at each scrape.
        self.backends: Callable[[], Iterable[BackendSample]] = tuple
        self.spans: Callable[[], SpanState] = SpanState
        self.calls_waiting: Callable[[], int] = int
        self._calls: Counter[tuple[str, str, str, str]] = Counter()
        self._tallies: dict[tuple[str, str], _PolicyTally] = {}
        self._publications: dict[tuple[str, str], Histogram] = {}
        # Of our own: nothing that other code registers in this process shows here.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

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

        Args:
            policy: that answered, or was to answer; empty where none is known by the asked name.
            dialect: its path.
            status: of the answer; empty where the client left before one.
            error: `error.type` of its span; empty where there is none.
            tokens_in: of its prompts.
            tokens_out: of all its choices.
            first_byte_seconds: from the beginning to the answer's first byte. None: there was none.
            seconds: from beginning to end.
        """
        self.in_flight -= 1
        self.spans_recorded += 1
        self._calls[policy, dialect, status, error] += 1
        tally = self._tallies.get((policy, dialect))
        if tally is None:
            tally = self._tallies[policy, dialect] = _PolicyTally()
        tally.tokens_in += tokens_in
        tally.tokens_out += tokens_out
        if first_byte_seconds is not None:
            tally.first_byte.observe(first_byte_seconds)
        tally.whole.observe(seconds)

    def published(self, policy: str, outcome: str, seconds: float) -> None:
        """Count a publication that has ended, with outcome `ok` or `failed`."""
        self._publications.setdefault((policy, outcome), Histogram(PUBLICATION_SECONDS)).observe(seconds)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer `/metrics`."""
        return web.Response(body=self.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus_client calls this at each scrape."""
        spans = self.spans()
        calls = CounterMetricFamily(_PREFIX + "calls", "Policy calls that ended.", labels=["policy", "dialect", "status", "error_type"])
        for labels, count in self._calls.items():
            calls.add_metric(labels, count)
        yield calls
        yield _gauge("calls_in_flight", "Policy calls that were accepted and have not ended.", self.in_flight)
        yield _gauge("calls_waiting", "Of those, calls that wait for a backend.", self.calls_waiting())
        yield from self._of_policies()
        yield _counter("spans_recorded", "Spans written to the spill file.", self.spans_recorded)
        yield _counter("spans_delivered", "Spans that the store acknowledged.", spans.delivered)
        yield _counter("spans_refused", "Spans that the store refused for what they are: they are lost.", spans.refused)
        yield _gauge("spans_waiting_bytes", "Bytes of spans in the spill file that the store has not acknowledged.", spans.waiting_bytes)
        yield _gauge("spans_memory_bytes", "Of those, bytes that are in memory as well.", spans.memory_bytes)
        yield from self._of_backends()
        publications = HistogramMetricFamily(_PREFIX + "publication_seconds", "Publications, by outcome.", labels=["policy", "outcome"])
        for labels, histogram in self._publications.items():
            publications.add_metric(labels, histogram.buckets(), histogram.total)
        yield publications

    def _of_policies(self) -> Iterator[Metric]:
        labels = ["policy", "dialect"]
        tokens_in = CounterMetricFamily(_PREFIX + "tokens_in", "Tokens of prompts.", labels=labels)
        tokens_out = CounterMetricFamily(_PREFIX + "tokens_out", "Tokens of answers.", labels=labels)
        first = HistogramMetricFamily(_PREFIX + "first_byte_seconds", "From a call's beginning to its answer's first byte.", labels=labels)
        whole = HistogramMetricFamily(_PREFIX + "call_seconds", "From a call's beginning to its end.", labels=labels)
        for values, tally in self._tallies.items():
            tokens_in.add_metric(values, tally.tokens_in)
            tokens_out.add_metric(values, tally.tokens_out)
            first.add_metric(values, tally.first_byte.buckets(), tally.first_byte.total)
            whole.add_metric(values, tally.whole.buckets(), tally.whole.total)
        yield from (tokens_in, tokens_out, first, whole)

    def _of_backends(self) -> Iterator[Metric]:
        states = list(self.backends())
        by_status = GaugeMetricFamily(_PREFIX + "backends", "Backends, by status.", labels=["policy", "status"])
        for (policy, status), count in Counter((state.policy, state.status) for state in states).items():
            by_status.add_metric((policy, status), count)
        in_flight = GaugeMetricFamily(_PREFIX + "backend_in_flight", "Calls that a backend is answering.", labels=_BACKEND)
        version = GaugeMetricFamily(_PREFIX + "backend_version", "The policy version that a backend serves.", labels=_BACKEND)
        for state in states:
            in_flight.add_metric((state.name, state.policy), state.in_flight)
            if state.version is not None:
                version.add_metric((state.name, state.policy), state.version)
        yield from (by_status, in_flight, version)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, help_text, value=value)
