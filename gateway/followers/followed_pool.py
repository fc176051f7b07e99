"""Pool of a gateway that follows another one: that one's backends, as it last described them.

In: the controller's state; failures of this gateway's own calls. Out: backends for calls, as a pool of one's own. Invariant: no order goes
to an engine from here; what a call has shown of an engine holds until the controller's next state, or for a second.
"""

from __future__ import annotations

import asyncio

import aiohttp

from gateway.followers.messages import BackendView, FollowerReport, PoolView
from gateway.pool.backend import Backend
from gateway.pool.policy import Canary
from gateway.pool.pool import BackendPool
from gateway.pool.registry import RegisteredBackend
from gateway.pool.upstream import BackendStatus, FrozenUpstream, Upstream
from spangrad.http.announcements import ClosedAttempt
from spangrad.settings import Settings

LOCAL_SECONDS = 1.0
"""Time for which an engine that failed a call is left alone while the controller calls it sound."""


class FollowedEngine(Backend):
    """An engine that takes its orders from the controller."""

    def __init__(self, view: BackendView, session: aiohttp.ClientSession, seconds: float) -> None:
        super().__init__(view.name, view.settings.settings, session, seconds)
        self._view = view
        self._doubt: asyncio.TimerHandle | None = None

    def follow(self, view: BackendView) -> None:
        """Take over the controller's state of the engine."""
        self.close()
        self._view = view
        self.status, self.reason, self.broken, self.info = view.status, view.reason, view.broken, view.info

    def could_not_connect(self, error: Exception) -> None:
        """Send it no calls for a while."""
        super().could_not_connect(error)
        self._doubt_for_a_while()

    def refused_call(self) -> bool:
        """Let the call wait: the controller paused the engine, and its message is on the way."""
        if self.status is BackendStatus.SERVING:
            self.set_status(BackendStatus.PUBLISHING, f"the engine at {self.url} is paused")
            self._doubt_for_a_while()
        return super().refused_call()

    def close(self) -> None:
        """End the doubt of the controller's state."""
        if self._doubt:
            self._doubt.cancel()
            self._doubt = None

    def _doubt_for_a_while(self) -> None:
        if self._doubt is None and self.status is not self._view.status:
            self._doubt = asyncio.get_running_loop().call_later(LOCAL_SECONDS, self._believe)

    def _believe(self) -> None:
        self.follow(self._view)
        self.changed()


class FollowedPool(BackendPool):
    """The backends of another gateway."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession) -> None:
        super().__init__(settings, session)
        self._by_id: dict[int, Upstream] = {}
        """Backends by the controller's ids."""

    def follow(self, state: PoolView) -> None:
        """Take over the controller's state. A backend that stays is the same object, with its calls in flight."""
        self.default, self.models = state.default, state.models
        present = {RegisteredBackend.of(backend.settings): backend for backend in self.backends}
        views = [view for policy in state.policies for view in policy.backends]
        self._by_id = {view.id: self._taken(present.pop(view.settings, None), view) for view in views}
        for backend in present.values():
            self.leave(backend)
        for view in state.policies:
            policy = self.policy(view.name)
            policy.releases = [view.release] if view.release else []
            policy.all_at_once = view.all_at_once
            canary = self._by_id.get(view.canary.backend) if view.canary else None
            policy.canary = Canary(canary, view.canary.release, view.canary.share) if view.canary and isinstance(canary, Backend) else None
        for policy in self.policies.values():
            policy.changed()

    def take_elsewhere(self, calls: dict[int, int]) -> None:
        """Take over other gateways' numbers of calls in flight, by the controller's ids of backends."""
        for backend_id, backend in self._by_id.items():
            backend.set_elsewhere(calls.get(backend_id, 0))
        for policy in self.policies.values():
            if policy.waiting:
                policy.changed()

    def report(self, revision: int, closed: tuple[ClosedAttempt, ...]) -> FollowerReport:
        """Return the calls in flight and waiting, with the newest ends of attempts; `revision` is that of the state taken over last."""
        in_flight = {backend_id: backend.in_flight for backend_id, backend in self._by_id.items() if backend.in_flight}
        waiting = {policy.name: policy.waiting for policy in self.policies.values() if policy.waiting}
        return FollowerReport(revision, in_flight, waiting, closed)

    def _taken(self, backend: Upstream | None, view: BackendView) -> Upstream:
        if backend is None:
            engine = view.settings.kind == "engine"
            settings = view.settings.settings
            backend = FollowedEngine(view, self._session, self._call_seconds) if engine else FrozenUpstream(view.name, settings)
            self.join(backend)
        backend.name = view.name
        if isinstance(backend, FollowedEngine):
            backend.follow(view)
        elif BackendStatus.DRAINING in {view.status, backend.status}:
            backend.status = view.status  # for the rest, a frozen upstream is judged by the calls of each gateway
        return backend
