"""All backends, by the policies whose calls they answer.

In: settings, backends registered and removed at run time, calls by the model that they ask for. Out: for each call a lease of a
backend. Invariant: every lease is given back exactly once, however the call ends; engines are watched as long as they are here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Set
from contextlib import asynccontextmanager
from itertools import count

import aiohttp
from pydantic import ValidationError

from gateway.pool.backend import Backend
from gateway.pool.policy import NOTHING, Policy
from gateway.pool.registry import BackendRegistry
from gateway.pool.upstream import BackendStatus, FrozenUpstream, Upstream, base_url
from gateway.pool.watch import watch
from spangrad.errors import GatewayError, SettingsError
from spangrad.http.announcements import AttemptKey
from spangrad.settings import BackendSettings, Settings

log = logging.getLogger(__name__)


class BackendRefusedError(GatewayError):
    """A backend cannot be registered."""


class BackendLease:
    """A backend for the time of a call."""

    def __init__(self, policy: Policy, backend: Upstream, model: str | None, attempt: AttemptKey | None, avoid: Set[str]) -> None:
        self.backend = backend
        self.model = model
        """Model name to send to the backend. None: the one that the client sent."""
        self._policy = policy
        self._attempt = attempt
        self._avoid = avoid

    def failed_to_connect(self, error: Exception) -> Set[str] | None:
        """Report that no connection was made, and nothing sent; return the backends to avoid next. None: there is no other to try."""
        self.backend.could_not_connect(error)
        avoid = self._avoid | {self.backend.name}
        return avoid if self._policy.may_become_free(self._attempt, avoid) else None


class OtherGateways:
    """Gateways that send calls to the same backends: none."""

    def changed(self) -> None:
        """Handle a change of the pool."""

    async def wait_idle(self, backend: Upstream) -> None:
        """Wait until they send a backend no calls, and none of theirs is in flight."""


class BackendPool:
    """All backends of the gateway, and their watchers."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession) -> None:
        self.policies: dict[str, Policy] = {}
        self.default = settings.gateway.policy
        """Policy that answers for models that name no policy."""
        self.models = settings.gateway.models
        """Alias of a policy -> name of the policy."""
        self.others = OtherGateways()
        self._session = session
        self._queue_limit = settings.gateway.queue_limit
        self._call_seconds = settings.gateway.request_timeout_seconds
        self._start_seconds = settings.engine.start_timeout_seconds
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._registry = BackendRegistry(settings.gateway.spill_path)
        self._registered: dict[str, BackendSettings] = {}
        """Settings of the backends that were registered at run time, by their names."""
        self._removed: set[tuple[str, str]] = set()
        """URLs and policies of backends that were removed; an engine that runs on does not register itself again."""
        configured = _configured(settings)
        self._configured = {(base_url(backend.url), backend.policy): backend for backend in configured}
        for backend in configured:
            self.add(backend)
        for backend in [] if settings.gateway.controller else self._registry.read():
            try:
                self._registered[self.add(backend).name] = backend
            except BackendRefusedError as error:
                log.info("a backend that was registered before is left out: %s", error)

    @property
    def backends(self) -> list[Upstream]:
        """Return the backends of all policies."""
        return [backend for policy in self.policies.values() for backend in policy.backends]

    @property
    def waiting(self) -> int:
        """Return the number of calls that wait for a backend."""
        return sum(policy.waiting for policy in self.policies.values())

    @property
    def names(self) -> list[str]:
        """Return the model names that clients may ask for."""
        return [*self.policies, *self.models]

    def find(self, name: str) -> Upstream | None:
        """Return the backend of that name. None: there is none."""
        return next((backend for backend in self.backends if backend.name == name), None)

    def policy_of(self, model: str | None) -> Policy:
        """Return the policy that answers for a model; where none has its name, the default one, whose engine then refuses the call."""
        name = self.models.get(model or "", model or "")
        return self.policies.get(name) or self.policy(self.default)

    def policy(self, name: str) -> Policy:
        """Return the policy of that name; a new one has no backends."""
        if name not in self.policies:
            self.policies[name] = Policy(name, self._queue_limit, lambda: self.others.changed())
        return self.policies[name]

    @asynccontextmanager
    async def lease(self, model: str | None, attempt: AttemptKey | None, avoid: Set[str] = NOTHING) -> AsyncGenerator[BackendLease]:
        """Lease a backend for a call; wait while all are busy or taking new weights.

        Args:
            model: what the client asks for.
            attempt: the attempt that makes the call. None: of no rollout; such calls share one turn.
            avoid: names of backends to avoid, as `BackendLease.failed_to_connect` returned them.

        Raises:
            BackendDownError: no backend is admitted.
            PoolFullError: too many wait already.
        """
        policy = self.policy_of(model)
        backend = await policy.acquire(attempt, avoid)
        try:
            named = model in self.models or model == policy.name
            yield BackendLease(policy, backend, backend.model if named else None, attempt, avoid)
        finally:
            policy.give_back(backend)

    def register(self, settings: BackendSettings, *, renew: bool, again: bool = False) -> Upstream:
        """Add a backend that a later gateway is to have as well.

        Args:
            settings: of the backend.
            renew: True where an engine registers itself, as it does again and again: one that is here stays as it is but for its key,
                which a restart may have changed, and one that the gateway's settings name gets theirs.
            again: True where the engine was registered before: if it was removed since, it stays removed.

        Raises:
            BackendRefusedError: as `add`, or the engine was removed.
        """
        place = base_url(settings.url), settings.policy
        known = next((other for other in self.backends if (other.url, other.policy) == place), None)
        if renew and known and known.status is not BackendStatus.DRAINING:
            if settings.key and settings.key != known.settings.key and not known.configured:
                known.take_key(settings.key)
                self._remember(known)
            return known
        if again and place in self._removed:
            raise BackendRefusedError(
                f"{place[0]} was removed from policy {settings.policy!r}. Restart the engine, or add it by `spangrad backends add`."
            )
        backend = self.add(self._configured.get(place, settings) if renew else settings)
        self._removed.discard(place)
        if not backend.configured:
            self._remember(backend)
        return backend

    def _remember(self, backend: Upstream) -> None:
        self._registered[backend.name] = backend.settings
        self._registry.write(self._registered.values())

    def add(self, settings: BackendSettings) -> Upstream:
        """Add a backend. An engine answers calls once it is admitted, a frozen upstream at once.

        Raises:
            BackendRefusedError: it is here already, or a policy would have backends of both kinds.
        """
        name = next(
            name for number in count() if (name := f"{settings.policy}-{number}") not in {backend.name for backend in self.backends}
        )
        if settings.kind == "engine":
            backend = Backend(name, settings, self._session, self._call_seconds)
        else:
            backend = FrozenUpstream(name, settings)
        for other in self.backends:
            if other.policy == backend.policy and other.url == backend.url:
                raise BackendRefusedError(f"{backend.url} is a backend of policy {backend.policy!r} already: {other.name}.")
            if other.policy == backend.policy and other.is_engine != backend.is_engine:
                raise BackendRefusedError(
                    f"policy {backend.policy!r} has backends of kind {other.kind!r}: one of kind {backend.kind!r} answers with other "
                    "weights. Register it for a policy of its own."
                )
            if other.url == backend.url and other.is_engine and backend.is_engine:
                raise BackendRefusedError(f"the engine at {backend.url} serves another policy already. Remove it there first.")
        backend.configured = (backend.url, backend.policy) in self._configured
        self.join(backend)
        if isinstance(backend, Backend) and self._tasks is not None:
            self._watch(self._tasks, backend)
        return backend

    def join(self, backend: Upstream) -> None:
        """Make a backend one of its policy's."""
        policy = self.policy(backend.policy)
        backend.changed = policy.changed
        backend.wait_elsewhere = lambda backend: self.others.wait_idle(backend)
        policy.backends.append(backend)
        log.info("backend %s: %s of policy %r at %s", backend.name, backend.kind, backend.policy, backend.url)
        policy.changed()

    async def remove(self, backend: Upstream, *, now: bool) -> None:
        """Remove a backend: it gets no more calls, and leaves when those in flight have ended, or at once with `now`."""
        self._removed.add((backend.url, backend.policy))
        if self._registered.pop(backend.name, None):
            self._registry.write(self._registered.values())
        watcher = self._watchers.pop(backend.name, None)
        if watcher is not None:
            watcher.cancel()
        backend.set_status(BackendStatus.DRAINING)
        if not now:
            await backend.wait_idle()
        self.leave(backend)

    def leave(self, backend: Upstream) -> None:
        """End a backend's part in its policy; calls in flight go on."""
        policy = self.policies[backend.policy]
        if backend in policy.backends:
            policy.backends.remove(backend)
        if policy.canary and policy.canary.backend is backend:
            policy.canary = None
        backend.close()
        policy.changed()
        log.info("backend %s at %s has left", backend.name, backend.url)

    async def run(self) -> None:
        """Watch the engines; never returns, and ends by an error of a watcher only."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for backend in self.backends:
                if isinstance(backend, Backend):
                    self._watch(tasks, backend)
            await asyncio.Event().wait()

    def _watch(self, tasks: asyncio.TaskGroup, backend: Backend) -> None:
        watching = watch(backend, self.policies[backend.policy], self._start_seconds)
        self._watchers[backend.name] = tasks.create_task(watching, name=f"watcher of {backend.name}")


def _configured(settings: Settings) -> list[BackendSettings]:
    """Return the backends that the settings name, `gateway.engine_url` first unless it is in the list; a follower's name none."""
    gateway = settings.gateway
    if gateway.controller:
        return []
    listed = list(gateway.backends)
    if not gateway.engine_url:
        return listed
    try:
        first = BackendSettings(url=gateway.engine_url, policy=gateway.policy, key=settings.engine.token)
    except ValidationError:
        raise SettingsError(f"gateway.engine_url = {gateway.engine_url!r} is no engine's URL, such as http://127.0.0.1:8000.") from None
    same = any((base_url(backend.url), backend.policy) == (base_url(first.url), first.policy) for backend in listed)
    return listed if same else [first, *listed]
