"""HTTP routes of rollouts as a service: requests for rollouts, demands for stored tasks, and trajectories.

In: JSON. Out: JSON when all has ended or the wait is over; JSON lines, one a trajectory as it is ready, where the client accepts
`application/x-ndjson`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web

from runner.process.openapi import DEMAND, LINES, PROCESS, TRAJECTORIES, UNAVAILABLE, description
from runner.process.processing import NO_GATEWAY, Processing
from runner.process.task_demands import rollout_ids
from runner.process.wire import ROLLOUTS_MOST, ProcessAnswer, ProcessRequest, Refusal, StreamEnd, TaskDemand, TrajectoriesQuery, Trajectory
from spangrad.errors import SettingsError, SpangradError, StoreError
from spangrad.http.server import body, json_response, refusal


class ProcessRoutes:
    """Handlers of the routes."""

    def __init__(self, processing: Processing) -> None:
        self._processing = processing
        self._decoder = msgspec.json.Decoder(ProcessRequest)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [
            web.post(PROCESS, self.process),
            web.get("/v1/openapi.json", self.describe),
            web.put(DEMAND, self.demand),
            web.get(DEMAND, self.demanded),
            web.delete(DEMAND, self.demand_no_more),
            web.get(TRAJECTORIES, self.of_tasks),
        ]

    async def process(self, request: web.Request) -> web.StreamResponse:
        """Enqueue rollouts, wait for their ends, and answer with their trajectories."""
        order = self._decoder.decode(await body(request))
        if sum(task.rollouts for task in order.tasks) > ROLLOUTS_MOST:
            return refusal(400, f"the tasks ask for more than {ROLLOUTS_MOST} rollouts. Send several requests, each with a key of its own.")
        try:
            ids = await self._processing.begin(order)
        except SettingsError as error:
            return refusal(UNAVAILABLE, str(error))
        return await self._answer(request, order.run_id, ids, order.wait_seconds)

    async def demand(self, request: web.Request) -> web.Response:
        """Record a demand for stored tasks, which the server enqueues."""
        demand = msgspec.json.decode(await body(request), type=TaskDemand)
        if not self._processing.may_sample(demand.sampling, demand.limits):
            return refusal(400, NO_GATEWAY)
        state = await self._processing.demands.want(*_named(request), demand)
        return json_response(state) if state else _no_tasks(request)

    async def demanded(self, request: web.Request) -> web.Response:
        """Return the demand for stored tasks."""
        state = await self._processing.demands.state(*_named(request))
        return json_response(state) if state else _no_tasks(request)

    async def demand_no_more(self, request: web.Request) -> web.Response:
        """End a demand for stored tasks; what is enqueued goes on."""
        state = await self._processing.demands.end(*_named(request))
        return json_response(state) if state else _no_tasks(request)

    async def of_tasks(self, request: web.Request) -> web.StreamResponse:
        """Answer with the trajectories of demanded groups of stored tasks."""
        run, name = _named(request)
        if (state := await self._processing.demands.state(run, name)) is None:
            return _no_tasks(request)
        most = max(1, ROLLOUTS_MOST // state.rollouts)
        query = msgspec.convert(dict(request.query), TrajectoriesQuery, strict=False)
        ids = rollout_ids(run, name, state, query.first, min(query.limit, most))
        return await self._answer(request, run, ids, query.wait)

    async def _answer(self, request: web.Request, run_id: str, ids: Sequence[str], wait_seconds: float) -> web.StreamResponse:
        trajectories = self._processing.trajectories(run_id, ids, wait_seconds, lambda: request.transport is None)
        try:
            if LINES in request.headers.get("Accept", ""):
                return await _stream(request, ids, trajectories)
            ended = {trajectory.rollout_id: trajectory async for trajectory in trajectories}
        except StoreError as error:
            response = refusal(UNAVAILABLE, f"the rollouts are enqueued, but their trajectories cannot be read: {error}")
            response.headers["Retry-After"] = "1"
            return response
        answer = ProcessAnswer(trajectories=[ended[id_] for id_ in ids if id_ in ended], pending=[id_ for id_ in ids if id_ not in ended])
        return json_response(answer)

    async def describe(self, request: web.Request) -> web.Response:
        """Answer with the description of the route."""
        return json_response(description())


def _named(request: web.Request) -> tuple[str, str]:
    return request.match_info["run"], request.match_info["name"]


def _no_tasks(request: web.Request) -> web.Response:
    run, name = _named(request)
    return refusal(404, f"run {run} has no demand for tasks of the name {name}. Upload the tasks, name them, and PUT a demand.")


async def _stream(request: web.Request, ids: Sequence[str], trajectories: AsyncIterator[Trajectory]) -> web.StreamResponse:
    """Answer with a line a trajectory, as it is ready; the last line says which are pending, or what went wrong."""
    response = web.StreamResponse(headers={"Content-Type": LINES})
    await response.prepare(request)
    pending = dict.fromkeys(ids)
    try:
        async for trajectory in trajectories:
            del pending[trajectory.rollout_id]
            await response.write(msgspec.json.encode(trajectory) + b"\n")
        last: StreamEnd | Refusal = StreamEnd(list(pending))
    except SpangradError as error:  # the store or the queue's database is away: this response has begun, and must end itself
        last = Refusal(f"the rollouts are enqueued, but their trajectories cannot be read: {error}")
    await response.write(msgspec.json.encode(last) + b"\n")
    return response
