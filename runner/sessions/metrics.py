"""Metrics of sessions and their episodes, in Prometheus' text format.

Invariant: label values are fixed names and those of the environments, never the name of a run or an episode; counting costs a step
microseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PREFIX = "spangrad_sessions_"
_SECONDS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 60.0)
_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
_RETURNS = (-10.0, -1.0, -0.5, 0.0, 0.5, 1.0, 10.0, 100.0)
_ENDS = ("refused", "failed", "closed", "expired", "lost")
_EPISODE_ENDS = ("done", "abandoned")


class SessionCounts:
    """Counts of resets, steps and episodes since the server began."""

    def __init__(self) -> None:
        self.resets = 0
        self.steps = 0
        self.errors = 0
        """Requests that were answered with an error."""
        self.episodes: Counter[str] = Counter()
        """Episodes that ended, by how: done, or abandoned by their user."""
        self.reset_seconds = 0.0
        self.returns = 0.0
        """Sum of the returns of the episodes that were done."""
        self.registry = CollectorRegistry()
        lengths, returns = "Steps of the episodes that were done.", "Returns of the episodes that were done: sums of their rewards."
        self._lengths = Histogram(_PREFIX + "episode_steps", lengths, buckets=_LENGTHS, registry=self.registry)
        self._returns = Histogram(_PREFIX + "episode_return", returns, buckets=_RETURNS, registry=self.registry)
        self._step_seconds = Histogram(_PREFIX + "step_seconds", "Time of a step.", buckets=_SECONDS, registry=self.registry)

    def reset(self, seconds: float) -> None:
        """Count a reset."""
        self.resets += 1
        self.reset_seconds += seconds

    def step(self, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self._step_seconds.observe(seconds)

    def end_episode(self, how: str, steps: int, total: float) -> None:
        """Count an episode that has ended; lengths and returns of those that are done."""
        self.episodes[how] += 1
        if how == "done":
            self._lengths.observe(steps)
            self._returns.observe(total)
            self.returns += total


@dataclass(frozen=True, slots=True)
class SessionsNow:
    """State of the sessions at the time of a scrape."""

    sessions: int
    capacity: int
    shards: int
    """Number of processes that serve."""
    restarts: int
    ends: Counter[str]


class SessionMetrics(Collector):
    """Prometheus metrics of a server."""

    def __init__(self, environments: Mapping[str, tuple[SessionCounts, Callable[[], SessionsNow]]]) -> None:
        """Report, by environment, counts as they are, and the state that the function returns."""
        self._environments = environments

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client."""
        families: dict[str, Metric] = {}
        for environment, (counts, now) in self._environments.items():
            for metric in _metrics(counts, now()):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [sample._replace(labels={"environment": environment, **sample.labels}) for sample in metric.samples]
        yield from families.values()


def _metrics(counts: SessionCounts, now: SessionsNow) -> Iterator[Metric]:
    """Yield the metrics of one environment."""
    for name, text, value in (
        ("open", "Sessions.", now.sessions),
        ("capacity", "Largest number of sessions.", now.capacity),
        ("shards", "Processes that serve.", now.shards),
        ("episode_returns", "Sum of the returns of the episodes that were done.", counts.returns),
    ):
        yield GaugeMetricFamily(_PREFIX + name, text, value=value)
    for name, text, number in (
        ("shard_restarts", "Processes that had to be started again.", now.restarts),
        ("resets", "Resets.", counts.resets),
        ("steps", "Steps, each counted once.", counts.steps),
        ("errors", "Requests that were answered with an error.", counts.errors),
        ("reset_seconds", "Time in resets.", counts.reset_seconds),
    ):
        yield CounterMetricFamily(_PREFIX + name, text, value=number)
    yield _by("ended", "Sessions that were refused, and that ended, by how.", _ENDS, now.ends)
    yield _by("episodes", "Episodes that ended, by how.", _EPISODE_ENDS, counts.episodes)
    yield from counts.registry.collect()


def _by(name: str, text: str, values: Sequence[str], counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=["end"])
    for value in values:
        family.add_metric([value], counts[value])
    return family
