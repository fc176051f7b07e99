"""Metrics of `spangrad build --follow`, in Prometheus' text format.

Invariant: a scrape asks the store nothing, label values are the names of modes, and beyond loopback a scrape needs a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spangrad.errors import SettingsError
from spangrad.http.tokens import credential, is_token
from spangrad.processes import LOOPBACK

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


def serve_metrics(address: str, lags: Callable[[], Lags], tokens: Sequence[str | None]) -> None:
    """Serve `/metrics` in a thread, as long as the process runs; beyond loopback to those who show one of the tokens.

    Raises:
        SettingsError: the address cannot be bound, or is beyond loopback and there is no token.
    """
    host, _, port = address.rpartition(":")
    if host not in LOOPBACK and not any(tokens):
        raise SettingsError(
            f"builder.metrics_address = {address!r} would listen beyond this machine without a token. Set store.token, which it asks for "
            "there, or bind 127.0.0.1."
        )
    registry = CollectorRegistry(auto_describe=False)
    try:
        server, _ = start_http_server(int(port), host, registry)
    except (OSError, OverflowError) as error:  # the latter: a port above 65535
        raise SettingsError(f"builder.metrics_address = {address!r} cannot be bound ({error}). Choose another address.") from error
    answer: Any = server.get_app()

    def guarded(environ: Mapping[str, Any], respond: Callable[..., object]) -> Any:
        shown = credential(environ.get("HTTP_AUTHORIZATION", ""))
        if host in LOOPBACK or any(is_token(shown, token) for token in tokens if token):
            return answer(environ, respond)
        respond("401 Unauthorized", [("Content-Type", "text/plain")])
        return [b"The builder's metrics ask for the store's token: send `Authorization: Bearer` with store.token or store.read_token.\n"]

    server.set_app(guarded)
    registry.register(BuilderMetrics(lags))  # not before the token is asked for
