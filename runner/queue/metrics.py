"""Metrics of the queue in Prometheus' text format.

Invariant: label values are fixed names, never the name of a run or a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runner.queue.service import Service
from runner.queue.wire import RolloutState

_PREFIX = "spangrad_queue_"


class QueueMetrics(Collector):
    """Prometheus metrics of the service, computed at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._states: Counter[RolloutState] = Counter()

    async def count(self) -> None:
        """Count the rollouts by state, before a scrape."""
        counted: Counter[RolloutState] = Counter()
        for run in await self._service.counts():
            counted.update(run.states)
        self._states = counted

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client."""
        rollouts = GaugeMetricFamily(_PREFIX + "rollouts", "Rollouts, by state.", labels=["state"])
        for state in RolloutState:
            rollouts.add_metric([state.value], self._states[state])
        yield rollouts
        ended = CounterMetricFamily(_PREFIX + "attempts", "Attempts that ended, by how, since the server began.", labels=["end"])
        for end, count in self._service.ended.items():
            ended.add_metric([end], count)
        yield ended
        yield GaugeMetricFamily(_PREFIX + "attempts_in_flight", "Attempts that are under way.", value=self._service.in_flight)
        writer = self._service.writer
        yield CounterMetricFamily(_PREFIX + "transactions", "Transactions that wrote.", value=writer.transactions)
        yield CounterMetricFamily(_PREFIX + "requests", "Requests that those answered.", value=writer.requests)
        yield CounterMetricFamily(_PREFIX + "transaction_seconds", "Time in those transactions.", value=writer.seconds)
