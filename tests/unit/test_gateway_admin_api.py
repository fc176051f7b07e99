"""The gateway's admin API under generated requests: it answers each as its description says, and continues to carry calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, assume, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.followers.controller import Followers, FollowerState
from gateway.pool.admin_pool import (
    BackendRequest,
    BackendState,
    ClearRequest,
    OrderRequest,
    PolicySleepRequest,
    PolicyState,
    PoolAdmin,
    ServerRequest,
    SleepRequest,
)
from gateway.proxy.admin import Admin
from gateway.proxy.auth import STATE_PATH
from gateway.weights.release import Publication, PublicationRequest
from spangrad.http.announcements import AnnouncementRequest, ClosingRequest, CountedAttempts, CountRequest, StageRequest
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import ASKED, staged
from tests.support.processes import fetch

EXAMPLES = 25
"""A operation; of odd bodies as many again."""


class _Error(msgspec.Struct):
    message: str
    type: str
    code: int


class _Failure(msgspec.Struct):
    error: _Error


class _Backends(msgspec.Struct):
    backends: list[BackendState]


class _Policies(msgspec.Struct):
    policies: list[PolicyState]


class _Followers(msgspec.Struct):
    followers: list[FollowerState]


class _Removed(msgspec.Struct):
    name: str
    status: str


class _Cleared(msgspec.Struct):
    removed: list[str]


class _Status(msgspec.Struct):
    status: str


BODIES = (
    BackendRequest, SleepRequest, PolicySleepRequest, PublicationRequest, OrderRequest, AnnouncementRequest, StageRequest, CountRequest,
    ClosingRequest, ServerRequest, ClearRequest,
)  # fmt: skip
ANSWERS = (
    _Failure, _Followers, _Backends, BackendState, _Removed, _Policies, PolicyState, Publication, _Status, CountedAttempts, _Cleared,
)  # fmt: skip
BACKEND = {"backend": {"type": "string", "minLength": 1}}
POLICY = {"policy": {"type": "string", "enum": ["policy", "other"]}}
OPERATIONS: list[tuple[str, str, dict[str, Any], type | None, type, list[int]]] = [
    ("get", "/admin/backends", {}, None, _Backends, [200]),
    ("post", "/admin/backends", {}, BackendRequest, BackendState, [201, 400, 409]),
    ("delete", "/admin/backends/{backend}", BACKEND, None, _Removed, [200, 404]),
    ("post", "/admin/backends/{backend}/sleep", BACKEND, SleepRequest, BackendState, [200, 400, 404, 409, 502]),
    ("post", "/admin/backends/{backend}/wake_up", BACKEND, None, BackendState, [200, 404, 409, 502]),
    ("post", "/add_llm_server", {}, ServerRequest, BackendState, [201, 400, 409]),
    ("post", "/clear_llm_server", {}, ClearRequest, _Cleared, [200, 400, 404]),
    ("get", "/admin/policies", {}, None, _Policies, [200]),
    ("get", "/admin/policies/{policy}", POLICY, None, PolicyState, [200, 404]),
    ("post", "/admin/policies/{policy}/versions", POLICY, PublicationRequest, Publication, [200, 400, 404, 409, 502]),
    ("post", "/admin/policies/{policy}/sleep", POLICY, PolicySleepRequest, PolicyState, [200, 400, 404, 409, 502, 503]),
    ("post", "/admin/policies/{policy}/wake_up", POLICY, None, PolicyState, [200, 404, 502]),
    ("post", "/admin/policies/{policy}/promote", POLICY, OrderRequest, Publication, [200, 400, 404, 409, 502]),
    ("post", "/admin/policies/{policy}/rollback", POLICY, OrderRequest, Publication, [200, 400, 404, 409, 502]),
    ("get", "/admin/followers", {}, None, _Followers, [200]),
    ("post", "/attempts", {}, AnnouncementRequest, _Status, [200, 400]),
    ("post", "/attempts/stages", {}, StageRequest, _Status, [200, 400]),
    ("post", "/attempts/calls", {}, CountRequest, CountedAttempts, [200, 400]),
    ("post", "/attempts/close", {}, ClosingRequest, _Status, [200, 400]),
    ("get", "/healthz", {}, None, _Status, [200]),
    ("get", "/readyz", {}, None, _Status, [200, 503]),
]
"""Method, path, the path's parameters, body, answer, statuses."""


def description() -> dict[str, Any]:
    """The API in OpenAPI's form, with the very types that the gateway reads and writes."""
    types = (*BODIES, *ANSWERS)
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, references, strict=True))
    # Whoever is registered is asked how he is: nobody is there.
    components["BackendRequest"]["properties"]["url"] = {"type": "string", "enum": [f"http://127.0.0.1:{port}" for port in range(1, 9)]}
    components["ServerRequest"]["properties"]["address"] = components["BackendRequest"]["properties"]["url"]
    components["ClearRequest"]["properties"]["policy"] = {"type": "string", "enum": ["other"]}
    components["PublicationRequest"]["properties"]["path"] = {"type": "string", "pattern": "^/nowhere/[a-z]{1,8}$"}
    paths: dict[str, Any] = {}
    for method, path, parameters, body, answer, statuses in OPERATIONS:
        paths.setdefault(path, {})[method] = {
            "parameters": [{"name": name, "in": "path", "required": True, "schema": one} for name, one in parameters.items()],
            **({"requestBody": {"required": True, "content": {"application/json": {"schema": schemas[body]}}}} if body else {}),
            "responses": {
                str(status): {
                    "description": "",
                    "content": {"application/json": {"schema": schemas[answer if status < 400 else _Failure]}},
                }
                for status in statuses
            },
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "spangrad gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


SCHEMA = schemathesis.openapi.from_dict(description())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a gateway with an engine, in a thread of its own."""
    loop = asyncio.new_event_loop()
    addresses: list[str] = []
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with staged(FakeEngine()) as stage:
            await stage.readiness("serving")
            addresses.append(str(stage.client._base_url))  # pyright: ignore[reportPrivateUsage]
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield addresses[0].rstrip("/")
    loop.call_soon_threadsafe(done.set)
    thread.join(60)
    loop.close()


def test_admin_api_every_route_is_described() -> None:
    pool: Any = SimpleNamespace()
    routes = [*Admin(pool, pool, pool).routes(), *PoolAdmin(pool, pool).routes(), *Followers(pool, pool, pool).routes()]
    known = {(route.method.lower(), _plain(route)) for route in routes if route.path != STATE_PATH}
    assert known == {(method, path) for method, path, *_ in OPERATIONS}


@SCHEMA.parametrize()  # pyright: ignore[reportUntypedFunctionDecorator]
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
def test_admin_api_any_request_is_answered_as_described(case: schemathesis.Case[Any], url: str) -> None:
    # A path with a line break matches no route, not even the last: aiohttp itself answers.
    assume(not any("\n" in str(value) for value in case.path_parameters.values()))
    assume(not clears_default(case))
    checks = [
        not_a_server_error_but_for_the_engines,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
        negative_data_rejection,
    ]
    case.call_and_validate(base_url=url, checks=checks, excluded_checks=[not_a_server_error])


def clears_default(case: schemathesis.Case[Any]) -> bool:
    """Return whether a request removes the backends of the default policy, which the next test needs."""
    body: Any = case.body
    names_policy = isinstance(body, dict) and bool(cast(dict[str, Any], body).get("policy"))
    return case.path == "/clear_llm_server" and not names_policy


def not_a_server_error_but_for_the_engines(ctx: Any, response: Any, case: Any) -> None:
    """The gateway itself never fails: 502 and 503 tell of engines."""
    assert response.status_code < 500 or response.status_code in (502, 503), response.text


def test_admin_api_after_any_requests_gateway_answers_calls(url: str) -> None:
    fetch(f"{url}/admin/backends", {"url": "http://127.0.0.1:9"})  # whatever the requests before have registered and removed
    backends = fetch(f"{url}/admin/backends")["backends"]
    assert len(backends) > 1
    assert [one["status"] for one in backends if one["calls"] or one["version"] is not None] == ["serving"]
    assert fetch(f"{url}/v1/chat/completions", ASKED)["choices"][0]["message"]["content"] == "weather rome"


def _plain(route: web.RouteDef) -> str:
    """A route's path without the patterns of its parameters."""
    return "/".join("{" + part[1:-1].partition(":")[0] + "}" if part.startswith("{") else part for part in route.path.split("/"))
