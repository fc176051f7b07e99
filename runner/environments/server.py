"""`spangrad environments`: instances of the user's class, leased over HTTP.

In: JSON objects (`wire.py`). Out: JSON objects. Invariant: as the pool: an instance serves one attempt at a time, and is reset before each;
beyond loopback each request needs the token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runner.environments.instance import Factory
from runner.environments.pool import InstancePool, NoFreeInstanceError, PreparationError
from runner.environments.wire import ExpiredLeases, InstanceHeartbeat, InstanceRequest, InstanceState, InstanceStatuses, Released
from spangrad.http import server as http_server
from spangrad.http.metrics import metrics_route
from spangrad.http.server import Address, BusyError, body, json_response, json_server
from spangrad.settings import EnvironmentServiceSettings

log = logging.getLogger(__name__)

_PREFIX = "spangrad_environments_"
_LEASES = ("leased", "released", "reclaimed", "refused", "unbegun")
_INSTANCES = ("made", "discarded")


def address_of(settings: EnvironmentServiceSettings) -> Address:
    """Return the address at which the service listens."""
    return Address("environments", "docs/guides/environments.md", settings.host, settings.port, settings.token)


def serve(settings: EnvironmentServiceSettings, factory: Factory, count: int) -> None:
    """Serve until SIGTERM or SIGINT, then close all instances.

    Raises:
        SpangradError: the address may not be bound, or is in use; or the first instance cannot be created.
    """
    address_of(settings).require_usable()
    http_server.serve(lambda: running(settings, factory, count), lambda url: log.info("environments ready: %s, %d instances", url, count))


@asynccontextmanager
async def running(settings: EnvironmentServiceSettings, factory: Factory, count: int) -> AsyncGenerator[str]:
    """Serve for as long as the block; yield its URL.

    Raises:
        EnvironmentsError: the first instance cannot be created.
    """
    pool = InstancePool(factory, count, lease_seconds=settings.lease_seconds, seconds=settings.operation_seconds)
    answers = EnvironmentRoutes(pool)
    routes = [
        web.post("/v1/leases", answers.lease),
        web.post("/v1/leases/heartbeat", answers.beat),
        web.delete("/v1/leases/{lease}", answers.release),
        web.get("/v1/instances", answers.instances),
        web.get("/readyz", answers.ready),
        metrics_route(EnvironmentMetrics(pool)),
    ]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        await pool.start()
        watching = asyncio.create_task(pool.watch())
        stack.callback(watching.cancel)
        server = await stack.enter_async_context(json_server(address_of(settings), routes))
        yield server.url


class EnvironmentRoutes:
    """HTTP handlers of the service."""

    def __init__(self, pool: InstancePool) -> None:
        self._pool = pool

    async def lease(self, request: web.Request) -> web.Response:
        """Lease an instance."""
        ask = msgspec.json.decode(await body(request), type=InstanceRequest)
        try:
            return json_response(await self._pool.lease(ask))
        except NoFreeInstanceError as error:
            raise BusyError(str(error)) from None
        except PreparationError as error:
            return json_response({"error": str(error)}, 500)

    async def beat(self, request: web.Request) -> web.Response:
        """Renew leases."""
        heartbeat = msgspec.json.decode(await body(request), type=InstanceHeartbeat)
        return json_response(ExpiredLeases(over=self._pool.beat(heartbeat.leases)))

    async def release(self, request: web.Request) -> web.Response:
        """Release a lease."""
        return json_response(Released(released=self._pool.release(request.match_info["lease"])))

    async def instances(self, request: web.Request) -> web.Response:
        """List the state of each instance."""
        return json_response(InstanceStatuses(instances=self._pool.statuses(), waiting=self._pool.waiting))

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 once an instance exists, in use or free."""
        if all(status.state is InstanceState.MAKING for status in self._pool.statuses()):
            raise BusyError("no instance is made yet")
        return web.Response(text="ok\n")


class EnvironmentMetrics(Collector):
    """Prometheus metrics of the pool, computed at each scrape; label values are fixed names."""

    def __init__(self, pool: InstancePool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client."""
        statuses = self._pool.statuses()
        instances = GaugeMetricFamily(_PREFIX + "instances", "Instances, by state.", labels=["state"])
        for state in InstanceState:
            instances.add_metric([state.value], sum(status.state is state for status in statuses))
        yield instances
        yield GaugeMetricFamily(_PREFIX + "waiting", "Requests in line.", value=self._pool.waiting)
        for name, what, labels in (
            ("leases", "What became of requests and leases, since the server began.", _LEASES),
            ("instances_changed", "Instances that were made, and that were discarded.", _INSTANCES),
        ):
            counter = CounterMetricFamily(_PREFIX + name, what, labels=["event"])
            for label in labels:
                counter.add_metric([label], self._pool.counts[label])
            yield counter
