"""`spangrad env serve`: sessions of one environment or several by OpenEnv's protocol, over WebSocket and HTTP.

In: requests of OpenEnv's clients. Out: responses. Invariant: as the sessions; each environment has sessions, processes and a capacity of
its own, and beyond loopback each request needs the token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from aiohttp import web

from runner.environments.server import address_of
from runner.sessions.games import Games
from runner.sessions.messages import ErrorCode, SessionError
from runner.sessions.metrics import SessionMetrics
from runner.sessions.routes import SessionRoutes, refuse
from runner.sessions.sessions import SessionTable
from runner.sessions.shards import ShardCommand, Shards
from runner.sessions.step_spans import PlayedSpans
from spangrad.http import server as http_server
from spangrad.http.metrics import metrics_route
from spangrad.http.server import json_response, json_server
from spangrad.settings import EnvironmentServiceSettings

log = logging.getLogger(__name__)


def serve(settings: EnvironmentServiceSettings, commands: Mapping[str, ShardCommand], shards: int, capacity: int) -> None:
    """Serve until SIGTERM or SIGINT, then close all environments; arguments as of `running`.

    Raises:
        SpangradError: the address may not be bound, or is in use; or no environment can be created.
    """
    address_of(settings).require_usable()

    def ready(url: str) -> None:
        for name in commands:
            place = url if len(commands) == 1 else f"{url}/{name}"
            log.info("environment %s ready: %s, %d sessions in %d processes", name, place, capacity, shards)

    http_server.serve(lambda: running(settings, commands, shards, capacity), ready)


@asynccontextmanager
async def running(
    settings: EnvironmentServiceSettings, commands: Mapping[str, ShardCommand], shards: int, capacity: int
) -> AsyncGenerator[str]:
    """Serve environments, by name, for as long as the block; a single one at the root as well. Yield the URL.

    `shards` is the number of processes of each environment, `capacity` the largest number of its sessions.

    Raises:
        EnvironmentsError: an environment cannot be created.
    """
    served = {name: ServedEnvironment(settings, command, shards, capacity) for name, command in commands.items()}
    routes = [metrics_route(SessionMetrics({name: environment.processes.counts for name, environment in served.items()}))]
    for name, environment in served.items():
        routes += [*environment.routes.below(f"/{name}"), *_health_routes(f"/{name}", [environment])]
    routes += _health_routes("", served.values())
    if len(served) == 1:
        routes += next(iter(served.values())).routes.below("")
    routes.append(web.route("*", "/{path:.*}", partial(_refuse_unknown, list(served))))
    async with AsyncExitStack() as stack:
        for environment in served.values():
            stack.push_async_callback(environment.stop)
        starts = await asyncio.gather(*(environment.processes.start() for environment in served.values()), return_exceptions=True)
        if failed := [error for error in starts if error is not None]:
            raise failed[0]
        for environment in served.values():
            watching = asyncio.create_task(environment.table.watch())
            stack.callback(watching.cancel)
        server = await stack.enter_async_context(json_server(address_of(settings), routes))
        for environment in served.values():
            stack.push_async_callback(environment.routes.close)
        yield server.url


class ServedEnvironment:
    """One environment of a server: its processes, its sessions and its routes."""

    def __init__(self, settings: EnvironmentServiceSettings, command: ShardCommand, shards: int, capacity: int) -> None:
        self.processes = Shards(command, shards, settings.operation_seconds)
        self.table = SessionTable(self.processes, capacity, settings)
        self._spans = PlayedSpans(command.variables)
        self.routes = SessionRoutes(self.table, Games(self.table, settings, self._spans), self.processes, settings)

    async def stop(self) -> None:
        """End the processes, and send the spans that are left."""
        await self.processes.stop()
        await asyncio.to_thread(self._spans.close)


async def _refuse_unknown(names: list[str], request: web.Request) -> web.StreamResponse:
    """Refuse a path that names none of the environments, over HTTP or as a message of a session."""
    path = request.match_info["path"]
    name, below, rest = path.partition("/")
    if len(names) == 1 and not below and name not in names:
        name, rest = names[0], path
    if name in names:
        sentence = f"environment {name} has no path /{rest} for {request.method}. See docs/guides/environments.md"
    else:
        sentence = f"/{path} names no environment. This server has {', '.join(names)}: add /NAME to its URL"
    if request.headers.get("Upgrade", "").lower() != "websocket":
        return json_response({"error": sentence}, 404)
    connection = web.WebSocketResponse(timeout=1.0)
    await connection.prepare(request)
    await refuse(connection, SessionError(ErrorCode.SESSION_ERROR, sentence, environments=names))
    return connection


def _health_routes(prefix: str, served: Collection[ServedEnvironment]) -> list[web.RouteDef]:
    """Return the health routes below a path: environments are healthy while each has at least one process that serves."""

    def serves_all() -> bool:
        return all(environment.processes.serving_processes for environment in served)

    async def health(request: web.Request) -> web.Response:
        return json_response({"status": "healthy" if serves_all() else "unhealthy"})

    async def ready(request: web.Request) -> web.Response:
        if not serves_all():
            raise http_server.BusyError("an environment has no process that serves yet")
        return web.Response(text="ok\n")

    return [web.get(f"{prefix}/health", health), web.get(f"{prefix}/readyz", ready)]
