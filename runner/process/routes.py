"""HTTP routes of rollouts as a service: POST /v1/process, and its description in OpenAPI's form.

In: JSON. Out: JSON when all has ended or the wait is over; JSON lines, one a trajectory as it is ready, where the client accepts
`application/x-ndjson`. Invariant: the description is made from the types that the handlers read and write.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from runner.process.processing import Processing
from runner.process.wire import ROLLOUTS_MOST, ProcessAnswer, ProcessRequest, Trajectory
from spangrad.errors import SettingsError, StoreError
from spangrad.http.server import body, json_response, refusal

LINES = "application/x-ndjson"
PATH = "/v1/process"
_UNAVAILABLE = 503


class Refusal(msgspec.Struct, frozen=True):
    """Response to a request that is refused, and the last line of a stream that ends early."""

    error: str
    """Sentence that says what is wrong."""


class StreamEnd(msgspec.Struct, frozen=True):
    """Last line of a stream."""

    pending: list[str]
    """Ids of the rollouts that have not ended: send the same request again."""


class ProcessRoutes:
    """Handlers of the routes."""

    def __init__(self, processing: Processing) -> None:
        """Answer requests from the service."""
        self._processing = processing
        self._decoder = msgspec.json.Decoder(ProcessRequest)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [web.post(PATH, self.process), web.get("/v1/openapi.json", self.describe)]

    async def process(self, request: web.Request) -> web.StreamResponse:
        """Enqueue rollouts, wait for their ends, and answer with their trajectories."""
        order = self._decoder.decode(await body(request))
        if sum(task.rollouts for task in order.tasks) > ROLLOUTS_MOST:
            return refusal(400, f"the tasks ask for more than {ROLLOUTS_MOST} rollouts. Send several requests, each with a key of its own.")
        try:
            ids = await self._processing.begin(order)
        except SettingsError as error:
            return refusal(_UNAVAILABLE, str(error))
        trajectories = self._processing.trajectories(order.run_id, ids, order.wait_seconds, lambda: request.transport is None)
        try:
            if LINES in request.headers.get("Accept", ""):
                return await _stream(request, ids, trajectories)
            ended = {trajectory.rollout_id: trajectory async for trajectory in trajectories}
        except StoreError as error:
            response = refusal(_UNAVAILABLE, f"the rollouts are enqueued, but their trajectories cannot be read: {error}")
            response.headers["Retry-After"] = "1"
            return response
        answer = ProcessAnswer(trajectories=[ended[id_] for id_ in ids if id_ in ended], pending=[id_ for id_ in ids if id_ not in ended])
        return json_response(answer)

    async def describe(self, request: web.Request) -> web.Response:
        """Answer with the description of the route."""
        return json_response(description())


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
    except StoreError as error:
        last = Refusal(f"the rollouts are enqueued, but their trajectories cannot be read: {error}")
    await response.write(msgspec.json.encode(last) + b"\n")
    return response


def description() -> dict[str, Any]:
    """Return the route's description in OpenAPI's form."""
    types = (ProcessRequest, ProcessAnswer, Trajectory, Refusal)
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    request, answer, line, refused = references
    failures = {400: "it cannot be read", 401: "no token", 413: "it is too large", _UNAVAILABLE: "database or store is away"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollouts as a service", "version": "1"},
        "paths": {
            PATH: {
                "post": {
                    "summary": "Enqueue rollouts, wait for their ends, and return their trajectories.",
                    "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
                    "responses": {
                        "200": {
                            "description": "Trajectories; as JSON lines where these are accepted, each as soon as it is ready.",
                            "content": {"application/json": {"schema": answer}, LINES: {"schema": line}},
                        },
                        **{
                            str(status): {"description": text, "content": {"application/json": {"schema": refused}}}
                            for status, text in failures.items()
                        },
                    },
                    "callbacks": {
                        "trajectory": {
                            "{$request.body#/callback}": {
                                "post": {
                                    "summary": "Take a trajectory that is ready; signed in the form of Standard Webhooks.",
                                    "requestBody": {"required": True, "content": {"application/json": {"schema": line}}},
                                    "responses": {"2XX": {"description": "It is taken, and not posted again."}},
                                }
                            }
                        }
                    },
                }
            }
        },
        "components": {"schemas": components},
    }
