"""Metrics of sessions and their episodes, in Prometheus' text format.

Invariant: label values are fixed names and those of the environments, never the name of a run or an episode; counting costs a step
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_PREFIX = "spangrad_sessions_"
_SECONDS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 60.0)
_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
_RETURNS = (-10.0, -1.0, -0.5, 0.0, 0.5, 1.0, 10.0, 100.0)


class SessionCounts:
    """Metrics of one environment, counted since the server began."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # The server says how to get the first three at each scrape.
        self.open = self._gauge("open", "Sessions.")
        self.capacity = self._gauge("capacity", "Largest number of sessions.")
        self.shards = self._gauge("shards", "Processes that serve.")
        self._episode_returns = self._gauge("episode_returns", "Sum of the returns of the episodes that were done.")
        self.restarts = self._counter("shard_restarts", "Processes that had to be started again.")
        self._resets = self._counter("resets", "Resets.")
        self._steps = self._counter("steps", "Steps, each counted once.")
        self.errors = self._counter("errors", "Requests that were answered with an error.")
        self._reset_seconds = self._counter("reset_seconds", "Time in resets.")
        ends = ("refused", "failed", "closed", "expired", "lost")
        self.ended = self._counter("ended", "Sessions that were refused, and that ended, by how.", *ends)
        self._episodes = self._counter("episodes", "Episodes that ended, by how.", "done", "abandoned")
        self._lengths = self._histogram("episode_steps", "Steps of the episodes that were done.", _LENGTHS)
        self._returns = self._histogram("episode_return", "Returns of the episodes that were done: sums of their rewards.", _RETURNS)
        self._step_seconds = self._histogram("step_seconds", "Time of a step.", _SECONDS)

    def reset(self, seconds: float) -> None:
        """Count a reset."""
        self._resets.inc()
        self._reset_seconds.inc(seconds)

    def step(self, seconds: float) -> None:
        """Count a step."""
        self._steps.inc()
        self._step_seconds.observe(seconds)

    def end_episode(self, how: str, steps: int, total: float) -> None:
        """Count an episode that has ended; lengths and returns of those that are done."""
        self._episodes.labels(how).inc()
        if how == "done":
            self._lengths.observe(steps)
            self._returns.observe(total)
            self._episode_returns.inc(total)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, registry=self.registry)

    def _counter(self, name: str, text: str, *ends: str) -> Counter:
        """Return a counter, by the ends that it counts where there are any."""
        counter = Counter(_PREFIX + name, text, ["end"] if ends else (), registry=self.registry)
        for end in ends:
            counter.labels(end)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)


class SessionMetrics(Collector):
    """Prometheus metrics of a server: those of its environments, with a label for their names."""

    def __init__(self, environments: Mapping[str, SessionCounts]) -> None:
        self._environments = environments

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client."""
        families: dict[str, Metric] = {}
        for environment, counts in self._environments.items():
            for metric in counts.registry.collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [sample._replace(labels={"environment": environment, **sample.labels}) for sample in metric.samples]
        yield from families.values()
