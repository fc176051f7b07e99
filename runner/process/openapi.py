"""Description of the routes of rollouts as a service, in OpenAPI's form.

In: the messages of `runner.process.wire`. Out: JSON. Invariant: schemas are derived from the types by which requests are read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runner.process.wire import ProcessAnswer, ProcessRequest, Refusal, TaskDemand, TaskDemandState, TrajectoriesQuery, Trajectory

PROCESS = "/v1/process"
DEMAND = "/v1/runs/{run}/tasks/{name}/demand"
TRAJECTORIES = "/v1/runs/{run}/tasks/{name}/trajectories"
LINES = "application/x-ndjson"
"""Media type of answers with a line of JSON a trajectory."""
UNAVAILABLE = 503
_FAILURES = {400: "it cannot be read", 401: "no token", 413: "it is too large", UNAVAILABLE: "database or store is away"}
_NO_TASKS = {404: "the run has stored no tasks of this name, or they are not demanded"}


def description() -> dict[str, Any]:
    """Return the description of all routes."""
    types = (ProcessRequest, ProcessAnswer, Trajectory, TaskDemand, TaskDemandState, Refusal)
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    request, answer, line, demand, state, refused = references
    trajectories = _answer("Trajectories; as JSON lines where these are accepted, each as soon as it is ready.", answer, lines=line)
    demanded = _answer("State of the demand.", state)
    refusals = _refusals(refused, _FAILURES)
    of_tasks = {**refusals, **_refusals(refused, _NO_TASKS)}
    named = [_parameter(name, "path", {"type": "string"}) for name in ("run", "name")]
    properties = msgspec.json.schema(TrajectoriesQuery)["$defs"][TrajectoriesQuery.__name__]["properties"]
    query = [_parameter(name, "query", schema) for name, schema in properties.items()]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollouts as a service", "version": "1"},
        "paths": {
            PROCESS: {
                "post": {
                    "summary": "Enqueue rollouts, wait for their ends, and return their trajectories.",
                    "requestBody": _body(request),
                    "responses": {**trajectories, **refusals},
                    "callbacks": {
                        "trajectory": {
                            "{$request.body#/callback}": {
                                "post": {
                                    "summary": "Take a trajectory that is ready; signed in the form of Standard Webhooks.",
                                    "requestBody": _body(line),
                                    "responses": {"2XX": {"description": "It is taken, and not posted again."}},
                                }
                            }
                        }
                    },
                }
            },
            DEMAND: {
                "parameters": named,
                "put": {
                    "summary": "Demand rollouts of stored tasks, which the server enqueues by itself.",
                    "requestBody": _body(demand),
                    "responses": {**demanded, **of_tasks},
                },
                "get": {"summary": "Return the demand for stored tasks.", "responses": {**demanded, **of_tasks}},
                "delete": {"summary": "Demand no more; what is enqueued goes on.", "responses": {**demanded, **of_tasks}},
            },
            TRAJECTORIES: {
                "parameters": named,
                "get": {
                    "summary": "Return the trajectories of demanded groups, from the group `first` on.",
                    "parameters": query,
                    "responses": {**trajectories, **of_tasks},
                },
            },
        },
        "components": {"schemas": components},
    }


def _body(schema: Any) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _answer(text: str, schema: Any, *, lines: Any = None) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}, **({} if lines is None else {LINES: {"schema": lines}})}
    return {"200": {"description": text, "content": content}}


def _refusals(schema: Any, texts: dict[int, str]) -> dict[str, Any]:
    return {str(status): {"description": text, "content": {"application/json": {"schema": schema}}} for status, text in texts.items()}


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
