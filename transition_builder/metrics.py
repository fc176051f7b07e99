"""Metrics of `spangrad build --follow`, in Prometheus' text format.

Invariant: a scrape asks the store nothing, and label values are the names of modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spangrad.errors import SettingsError

_PREFIX = "spangrad_builder_"
Lags = Mapping[str, tuple[float, int]]
"""Age in seconds of the oldest rollout that ended and is not built, and the number of those, by mode."""


class BuilderMetrics(Collector):
    """Metrics of the rollouts that wait, computed at each scrape."""

    def __init__(self, lags: Callable[[], Lags]) -> None:
        self._lags = lags

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client."""
        lag = GaugeMetricFamily(
            _PREFIX + "lag_seconds", "Age of the oldest rollout that has ended and is not built; 0 where there is none.", labels=["mode"]
        )
        waiting = GaugeMetricFamily(_PREFIX + "waiting_rollouts", "Rollouts that have ended and are not built.", labels=["mode"])
        for mode, (seconds, rollouts) in self._lags().items():
            lag.add_metric([mode], seconds)
            waiting.add_metric([mode], rollouts)
        yield lag
        yield waiting


def serve_metrics(address: str, lags: Callable[[], Lags]) -> None:
    """Serve `/metrics` in a thread, as long as the process runs.

    Raises:
        SettingsError: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BuilderMetrics(lags))
    try:
        start_http_server(int(port), host, registry)
    except (OSError, OverflowError) as error:  # the latter: a port above 65535
        raise SettingsError(f"builder.metrics_address = {address!r} cannot be bound ({error}). Choose another address.") from error
