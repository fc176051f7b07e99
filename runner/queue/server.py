"""`spangrad queue`: the queue of rollouts over HTTP.

In: JSON objects (`wire.py`). Out: JSON objects; a change is durable before it is answered. Invariant: beyond loopback each request needs
the token, and a request that is refused has changed nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from runner.process.processing import Processing
from runner.process.routes import ProcessRoutes
from runner.queue import rows
from runner.queue.client import default_url
from runner.queue.metrics import QueueMetrics
from runner.queue.prompts.answers import PROMPT_PATHS, PromptAnswers
from runner.queue.purge import purge_periodically
from runner.queue.rows import Defaults
from runner.queue.service import Service
from runner.queue.stopped_attempts import GatewayOrders
from runner.queue.tables import QueueDatabase
from runner.queue.task_data import NamedTasks, TaskData, UploadPart
from runner.queue.wire import LIST_MOST, LeaseRequest, RolloutSelector, RolloutState, Runs
from spangrad.errors import QueueError
from spangrad.http import server as http_server
from spangrad.http.metrics import metrics_route
from spangrad.http.queue_messages import DemandRequest, Name
from spangrad.http.server import Address, Handler, body, json_response, json_server, refusal
from spangrad.settings import QueueSettings, Settings

log = logging.getLogger(__name__)

WAIT_MOST = 60.0
"""Longest wait for new rollouts, in seconds."""
DAY_SECONDS = 86400.0
_DIGITS_MOST = 18
"""Digits of the largest number that the database can store."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; requests that arrived by then are answered.

    Raises:
        SpangradError: the address may not be bound, or is in use.
        QueueError: the database is invalid, does not answer, or has another server.
    """
    address_of(settings.queue).require_usable()

    def ready(service: Service) -> None:
        log.info("queue ready: %s, database %s, %d in flight", default_url(settings.queue), service.database.shown, service.in_flight)

    http_server.serve(lambda: running(settings), ready, lambda service: [service.taken])


def address_of(settings: QueueSettings) -> Address:
    """Return the address at which the queue listens."""
    return Address("queue", "docs/guides/queue.md", settings.host, settings.port, settings.token, "queue")


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[Service]:
    """Serve the queue for as long as the block.

    Raises:
        QueueError: the database is invalid, does not answer, or has another server.
    """
    orders = GatewayOrders.of(settings)
    service = Service(QueueDatabase(settings.queue.db.get_secret_value()), Defaults.of(settings), orders)
    processing = Processing(service, settings)
    server = json_server(
        address_of(settings.queue),
        [*routes(service), *ProcessRoutes(processing).routes()],
        cancels=False,
        smaller="Send fewer rollouts at once.",
        busy=QueueError,
        agents_read=PROMPT_PATHS,
    )
    tasks = [asyncio.create_task(service.watch()), *([asyncio.create_task(orders.run())] if orders else [])]
    if settings.queue.keep_days is not None:
        tasks.append(asyncio.create_task(purge_periodically(service.purge, settings.queue.keep_days * DAY_SECONDS)))
    try:
        await server.start()
        await processing.resume()
        yield service
    finally:
        for task in tasks:
            task.cancel()
        service.stop_waiting()
        processing.stop_waiting()
        await server.stop()
        await processing.close()
        await service.close()


def routes(service: Service) -> list[web.RouteDef]:
    """Return the routes of the queue."""
    metrics = QueueMetrics(service)
    answers = QueueRoutes(service)
    return [
        *[web.post(path, _change(kind, work)) for path, (kind, work) in service.changes.items()],
        web.get("/v1/rollouts", answers.rollouts),
        web.get("/v1/rollouts/{rollout}", answers.rollout),
        web.get("/v1/runs", answers.runs),
        web.get("/v1/runs/{run}", answers.run),
        web.get("/v1/runs/{run}/ended", answers.ended),
        web.get("/v1/runs/{run}/demand", answers.demand),
        web.put("/v1/runs/{run}/demand", answers.want),
        web.post("/v1/tasks", _change(UploadPart, answers.task_data.keep)),
        web.get("/v1/tasks/{digest}", answers.tasks),
        web.get("/v1/runs/{run}/tasks/{name}", answers.named_tasks),
        web.put("/v1/runs/{run}/tasks/{name}", answers.name_tasks),
        *PromptAnswers(service).routes(),
        web.get("/readyz", answers.ready),
        metrics_route(metrics, metrics.count),
    ]


class QueueRoutes:
    """HTTP handlers of requests with a path and a query."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.task_data = TaskData(service)

    async def rollouts(self, request: web.Request) -> web.Response:
        """List rollouts in order of arrival; with `order=newest` the newest first."""
        query = request.query
        state = RolloutState(query["state"]) if "state" in query else None
        order = query.get("order", "oldest")
        if order not in {"oldest", "newest"}:
            raise ValueError(f"order={order[:80]!r} is neither oldest nor newest.")
        which = {"run_id": query.get("run"), "state": state, "group_id": query.get("group")}
        place = {"after": _whole(query, "after", 0), "limit": _limit(request), "newest_first": order == "newest"}
        return json_response(await self._service.read(partial(rows.listed, **which, **place)))

    async def rollout(self, request: web.Request) -> web.Response:
        """Return one rollout, with its attempts."""
        name = request.match_info["rollout"]
        rollout = await self._service.read(partial(rows.rollout, rollout_id=name))
        return json_response(rollout) if rollout else refusal(404, f"the queue has no rollout {name}.")

    async def runs(self, request: web.Request) -> web.Response:
        """Count the rollouts of each run, by state."""
        return json_response(Runs(runs=await self._service.counts()))

    async def run(self, request: web.Request) -> web.Response:
        """Count the rollouts of one run, by state."""
        return json_response(await self._service.run(request.match_info["run"]))

    async def ended(self, request: web.Request) -> web.Response:
        """List a run's rollouts in the order in which they ended."""
        run, after = request.match_info["run"], _whole(request.query, "after", 0)
        return json_response(await self._service.ends(run, after=after, limit=_limit(request), wait_seconds=_wait(request)))

    async def demand(self, request: web.Request) -> web.Response:
        """Return the demand for a run."""
        above = _whole(request.query, "above", 0)
        return json_response(await self._service.demand(request.match_info["run"], above=above, wait_seconds=_wait(request)))

    async def want(self, request: web.Request) -> web.Response:
        """Set the demand of a branch."""
        branch_demand = msgspec.json.decode(await body(request), type=DemandRequest)
        return json_response(await self._service.want(_name(request, "run"), branch_demand))

    async def tasks(self, request: web.Request) -> web.Response:
        """List stored tasks in their order."""
        return json_response(await self.task_data.page(request.match_info["digest"], _whole(request.query, "first", 0), _limit(request)))

    async def named_tasks(self, request: web.Request) -> web.Response:
        """Return the tasks that a name of a run refers to."""
        run, name = request.match_info["run"], request.match_info["name"]
        kept = await self.task_data.named(run, name)
        return json_response(kept) if kept else refusal(404, f"run {run} has no tasks of the name {name}.")

    async def name_tasks(self, request: web.Request) -> web.Response:
        """Set the tasks that a name of a run refers to."""
        kept = msgspec.json.decode(await body(request), type=NamedTasks)
        stored = await self.task_data.name(_name(request, "run"), _name(request, "name"), kept)
        if stored != kept.tasks:
            return refusal(409, f"of {kept.tasks} tasks {stored} are there. Upload them all before they are given a name.")
        return json_response(kept)

    async def ready(self, request: web.Request) -> web.Response:
        """Answer that the database responds as well."""
        await self._service.counts("")
        return web.Response(text="ok\n")


def _change(kind: type[Any], work: Callable[..., Coroutine[Any, Any, msgspec.Struct]]) -> Handler:
    """Build a handler that decodes a body, and answers the result of the service."""
    decoder = msgspec.json.Decoder(kind)

    async def handle(request: web.Request) -> web.Response:
        message = decoder.decode(await body(request))
        if isinstance(message, RolloutSelector) and (problem := _unclear(message)):
            return refusal(400, problem)
        return json_response(await (work(message, lambda: request.transport is None) if kind is LeaseRequest else work(message)))

    return handle


def _unclear(which: RolloutSelector) -> str | None:
    """Return why the selection is ambiguous. None: it is not."""
    if (which.rollout_ids is None) == (which.run_id is None):
        return "name either rollout_ids, or run_id (and group_id)."
    if which.group_id is not None and which.run_id is None:
        return "group_id needs the run_id that it belongs to."
    return None


def _name(request: web.Request, part: str) -> str:
    """Return a name in a path that is to be stored.

    Raises:
        ValueError: it is longer than requests may hold: PostgreSQL might not index it, and all requests that share its transaction fail.
    """
    return msgspec.convert(request.match_info[part], Name)


def _whole(query: Any, name: str, otherwise: int) -> int:
    """Read a whole number from a query.

    Raises:
        ValueError: it is not a whole number.
    """
    text = query.get(name, str(otherwise))
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS_MOST:
        raise ValueError(f"{name}={text!r} is no whole number of at most {_DIGITS_MOST} digits.")
    return int(text)


def _limit(request: web.Request) -> int:
    return max(1, min(_whole(request.query, "limit", 100), LIST_MOST))


def _wait(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    if not (seconds := float(text)) >= 0:  # as NaN is not
        raise ValueError(f"wait={text!r} is no number of seconds from 0 on.")
    return min(seconds, WAIT_MOST)
