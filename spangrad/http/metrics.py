"""Route `/metrics` in Prometheus' text format, from a collector of a service's own.

In: a prometheus_client collector. Out: a handler. Invariant: nothing that other code registers in the process shows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

disable_created_metrics()  # a second series a counter, with the time at which it began


def metrics_route(collector: Collector, refresh: Callable[[], Awaitable[None]] | None = None) -> web.RouteDef:
    """Return the route `/metrics` of a collector; `refresh` is awaited before each scrape."""

    async def handle(request: web.Request) -> web.Response:
        if refresh is not None:
            await refresh()
        return web.Response(body=generate_latest(collector), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return web.get("/metrics", handle)
