"""HTTP routes of the pool for trainers and operators: backends, publications of weights, and the state of both.

In: HTTP requests. Out: JSON. Invariant: an order is carried out to its end even if the client that gave it disconnects, which must not
leave an engine half-way (`asyncio.shield`); no response holds a backend's key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from aiohttp import web
from pydantic import ValidationError

from gateway.metrics import GatewayMetrics
from gateway.pool.backend import Backend, EngineTopology
from gateway.pool.policy import Policy
from gateway.pool.pool import BackendPool, BackendRefusedError
from gateway.pool.registry import RegisteredBackend
from gateway.pool.sleeping import keep_policy_asleep, send_policy_to_sleep, send_to_sleep, wake_policy_up, wake_up
from gateway.pool.upstream import BackendStatus, Upstream, base_url
from gateway.proxy.http import error_response
from gateway.weights.publication import PublicationError
from gateway.weights.release import OrderRequest, Publication, PublicationRequest, promote, publish, roll_back
from spangrad.errors import JSON_ERRORS, EngineError
from spangrad.http.server import json_response

_T = TypeVar("_T")
_Handler = Callable[[web.Request], Awaitable[web.Response]]


class BackendRequest(RegisteredBackend, frozen=True, forbid_unknown_fields=True):
    """A backend to register."""

    renew: bool = False
    """True: an engine registers itself, and may be registered already."""
    again: bool = False
    """True: the engine was registered before; if it was removed since, it stays removed."""


class ServerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine to register, by ProRL Agent's name for it."""

    address: str
    """URL of the engine."""
    policy: str = ""
    """Empty: the policy of `gateway.policy`."""


class ClearRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order to remove all backends of a policy."""

    policy: str | None = None
    """None: the policy of `gateway.policy`."""
    now: bool = False
    """True if calls in flight are not waited for."""


class SleepRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sleep level that an engine is put to."""

    level: Literal[1, 2] = 1


class PolicySleepRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order to all engines of a policy to sleep while a trainer has their GPUs."""

    level: Literal[1, 2]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    """Time after which they are woken with the version that is served, unless more is asked for."""
    renew: bool = False
    """True to give engines that sleep more time; those that do not sleep stay awake."""


class BackendState(msgspec.Struct, frozen=True):
    """State of a backend."""

    name: str
    url: str
    policy: str
    kind: str
    status: BackendStatus
    reason: str
    version: int | None
    """None: it is no engine, or was never reached."""
    checksum: str
    """Checksum of what is compared of an engine's parameters; empty: nothing is, or they are not known."""
    uncompared: str
    """Parameters of an engine that are not compared with a version's, in words; empty: all are."""
    topology: EngineTopology | None
    """Processes that an engine consists of. None: it is no engine, or was never reached."""
    in_flight: int
    calls: int
    limit: int | None
    has_key: bool
    configured: bool
    """True if the gateway's settings name it."""


class CanaryState(msgspec.Struct, frozen=True):
    """Version that a share of the rollouts is served, and the backend that serves it."""

    backend: str
    version: int
    share: float


class PolicyState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a policy; fields at their defaults are left out."""

    policy: str
    version: int | None
    tokenizer_hash: str | None
    status: BackendStatus
    """The best status among the policy's backends."""
    reason: str = ""
    """Reason why calls are refused; empty: they are not."""
    waiting: int = 0
    engine_seconds: float = 0.0
    """Seconds that its engines have been in the pool, summed over engines."""
    busy_seconds: float = 0.0
    """Seconds of these in which the engine had a call in flight: the rest is idle."""
    before: int | None = None
    """The version that a rollback leads to. None: not known."""
    canary: CanaryState | None = None


class PoolAdmin:
    """Handlers of the pool's routes."""

    def __init__(self, pool: BackendPool, metrics: GatewayMetrics) -> None:
        self._pool = pool
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [
            web.get("/admin/backends", self.backends),
            web.post("/admin/backends", _errors_as_json(self.add)),
            web.delete("/admin/backends/{backend}", _errors_as_json(self.remove)),
            web.post("/admin/backends/{backend}/sleep", _errors_as_json(self.sleep)),
            web.post("/admin/backends/{backend}/wake_up", _errors_as_json(self.wake)),
            web.post("/add_llm_server", _errors_as_json(self.add_server)),
            web.post("/clear_llm_server", _errors_as_json(self.clear_servers)),
            web.get("/admin/policies", self.policies),
            web.get("/admin/policies/{policy}", _errors_as_json(self.policy)),
            web.post("/admin/policies/{policy}/versions", _errors_as_json(self.publish)),
            web.post("/admin/policies/{policy}/sleep", _errors_as_json(self.sleep_all)),
            web.post("/admin/policies/{policy}/wake_up", _errors_as_json(self.wake_all)),
            web.post("/admin/policies/{policy}/promote", _errors_as_json(self.promote)),
            web.post("/admin/policies/{policy}/rollback", _errors_as_json(self.roll_back)),
        ]

    async def backends(self, request: web.Request) -> web.Response:
        """Answer with the state of all backends."""
        return json_response({"backends": [_backend_state(backend) for backend in self._pool.backends]})

    async def add(self, request: web.Request) -> web.Response:
        """Register a backend."""
        fields = await _read(request, BackendRequest, "a backend is JSON with url, and maybe policy, kind, key, limit and model")
        return self._registered(fields)

    async def add_server(self, request: web.Request) -> web.Response:
        """Register an engine; one that is registered already stays as it is."""
        server = await _read(request, ServerRequest, "a server is JSON with address, and maybe policy")
        return self._registered(BackendRequest(url=server.address, policy=server.policy, renew=True))

    async def clear_servers(self, request: web.Request) -> web.Response:
        """Remove all backends of a policy, each when its calls have ended, or at once."""
        order = await _read(request, ClearRequest, "an order to clear is JSON with policy and now, or empty")
        policy = self._policy_named(order.policy or self._pool.default)
        backends = list(policy.backends)
        await asyncio.shield(asyncio.gather(*(self._pool.remove(backend, now=order.now) for backend in backends)))
        return json_response({"removed": [backend.name for backend in backends]})

    def _registered(self, fields: BackendRequest) -> web.Response:
        try:
            settings = msgspec.structs.replace(fields, policy=fields.policy or self._pool.default).settings
        except ValidationError as error:
            first = error.errors()[0]
            raise PublicationError(400, f"the backend's {'.'.join(map(str, first['loc']))} cannot be right: {first['msg']}") from None
        return json_response(_backend_state(self._pool.register(settings, renew=fields.renew, again=fields.again)), 201)

    async def remove(self, request: web.Request) -> web.Response:
        """Remove a backend when its calls have ended, or at once; not where the request names the URL of another one."""
        backend = self._backend(request)
        url = request.query.get("url", backend.url)
        if base_url(url) != backend.url:
            raise PublicationError(409, f"backend {backend.name} is at {backend.url}, not at {url}. See GET /admin/backends for its name.")
        now = request.query.get("now", "false")
        if now not in {"true", "false"}:
            raise PublicationError(400, f"now = {now!r} is neither true nor false.")
        await asyncio.shield(self._pool.remove(backend, now=now == "true"))
        return json_response({"name": backend.name, "status": "removed"})

    async def sleep(self, request: web.Request) -> web.Response:
        """Have an engine free its GPU memory for the trainer."""
        backend = self._engine(request)
        order = await _read(request, SleepRequest, "an order to sleep is JSON with level 1 or 2, or empty")
        await asyncio.shield(send_to_sleep(backend, order.level))
        return json_response(_backend_state(backend))

    async def wake(self, request: web.Request) -> web.Response:
        """Have an engine take its memory back."""
        backend = self._engine(request)
        await asyncio.shield(wake_up(backend, self._pool.policies[backend.policy]))
        return json_response(_backend_state(backend))

    async def sleep_all(self, request: web.Request) -> web.Response:
        """Have all engines of a policy free their GPU memory for the trainer."""
        policy = self._policy(request)
        order = await _read(request, PolicySleepRequest, "an order to sleep is JSON with level 1 or 2, seconds, and maybe renew")
        if order.renew:
            keep_policy_asleep(policy, order.seconds)
        else:
            await asyncio.shield(send_policy_to_sleep(policy, order.level, order.seconds))
        return json_response(policy_state(policy))

    async def wake_all(self, request: web.Request) -> web.Response:
        """Have all engines of a policy take their memory back."""
        policy = self._policy(request)
        await asyncio.shield(wake_policy_up(policy))
        return json_response(policy_state(policy))

    async def policies(self, request: web.Request) -> web.Response:
        """Answer with the state of all policies."""
        return json_response({"policies": [policy_state(policy) for policy in self._pool.policies.values()]})

    async def policy(self, request: web.Request) -> web.Response:
        """Answer with the state of one policy."""
        return json_response(policy_state(self._policy(request)))

    async def publish(self, request: web.Request) -> web.Response:
        """Serve a new version."""
        form = "a publication is JSON with version, path and checksum, and maybe order, in_flight, drain_seconds, canary and again"
        return await self._counted(request, publish, await _read(request, PublicationRequest, form))

    async def promote(self, request: web.Request) -> web.Response:
        """Serve the canary's version everywhere."""
        form = "a promotion is JSON with order, in_flight and drain_seconds, or empty"
        return await self._counted(request, promote, await _read(request, OrderRequest, form))

    async def roll_back(self, request: web.Request) -> web.Response:
        """Serve the version before."""
        form = "a rollback is JSON with order, in_flight and drain_seconds, or empty"
        return await self._counted(request, roll_back, await _read(request, OrderRequest, form))

    async def _counted(self, request: web.Request, change: Callable[[Policy, _T], Awaitable[Publication]], order: _T) -> web.Response:
        """Have a policy serve another version, and count that as a publication."""
        policy = self._policy(request)

        async def publication() -> Publication:
            began, outcome = time.monotonic(), "failed"
            try:
                published = await change(policy, order)
                outcome = "ok"
                return published
            finally:
                self._metrics.published(policy.name, outcome, time.monotonic() - began)

        return json_response(await asyncio.shield(publication()))

    def _policy(self, request: web.Request) -> Policy:
        return self._policy_named(request.match_info["policy"])

    def _policy_named(self, name: str) -> Policy:
        policy = self._pool.policies.get(name)
        if policy is None:
            served = ", ".join(map(repr, self._pool.policies)) or "none"
            raise PublicationError(404, f"policy {name!r} is not served here. This gateway serves {served}.")
        return policy

    def _backend(self, request: web.Request) -> Upstream:
        name = request.match_info["backend"]
        backend = self._pool.find(name)
        if backend is None:
            known = ", ".join(backend.name for backend in self._pool.backends) or "none"
            raise PublicationError(404, f"there is no backend {name!r}. There are: {known}.")
        return backend

    def _engine(self, request: web.Request) -> Backend:
        backend = self._backend(request)
        if not isinstance(backend, Backend):
            raise PublicationError(409, f"backend {backend.name} is of kind {backend.kind!r}, and takes no orders.")
        return backend


def policy_state(policy: Policy) -> PolicyState:
    """Return the state of a policy."""
    canary = policy.canary
    return PolicyState(
        policy=policy.name,
        version=policy.version,
        tokenizer_hash=next((engine.info.tokenizer_hash for engine in policy.engines if engine.info), None),
        status=policy.status,
        reason=policy.why_down() if policy.status is BackendStatus.DOWN else "",
        waiting=policy.waiting + policy.waiting_elsewhere,
        engine_seconds=sum(engine.seconds_in_pool for engine in policy.engines),
        busy_seconds=sum(engine.busy_seconds for engine in policy.engines),
        before=policy.releases[-2].version if len(policy.releases) > 1 else None,
        canary=CanaryState(canary.backend.name, canary.release.version, canary.share) if canary else None,
    )


def _backend_state(backend: Upstream) -> BackendState:
    engine = backend if isinstance(backend, Backend) else None
    return BackendState(
        name=backend.name,
        url=backend.url,
        policy=backend.policy,
        kind=backend.kind,
        status=backend.status,
        reason=backend.reason,
        version=engine.info.version if engine and engine.info else None,
        checksum=engine.checksum if engine else "",
        uncompared=engine.uncompared if engine else "",
        topology=engine.info.topology if engine and engine.info else None,
        in_flight=backend.load,
        calls=backend.calls,
        limit=backend.limit,
        has_key=bool(backend.headers),
        configured=backend.configured,
    )


def _errors_as_json(handler: _Handler) -> _Handler:
    async def answer(request: web.Request) -> web.Response:
        try:
            return await handler(request)
        except PublicationError as error:
            return error_response(error.status, str(error))
        except BackendRefusedError as error:
            return error_response(409, str(error))
        except EngineError as error:
            return error_response(502, str(error))

    return answer


async def _read(request: web.Request, kind: type[_T], form: str) -> _T:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except JSON_ERRORS as error:
        raise PublicationError(400, f"{form}: {error}") from None
