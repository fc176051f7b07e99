"""The backends of one policy, and which of them answers a call.

In: calls that need a backend, and backends that come, go and change. Out: for each call a backend, at once or after a wait. Invariant:
a backend has never more calls in flight than its limit; no call waits while a backend that may serve it has room; a call goes to a
backend that is admitted, or to one that was never reached.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from gateway.pool.backend import Backend
from gateway.pool.queueing import FairQueue
from gateway.pool.upstream import BackendDownError, BackendStatus, Upstream
from gateway.weights.publication import WeightsRelease
from spangrad.errors import GatewayError
from spangrad.http.announcements import AttemptKey
from spangrad.types import canary_bucket

RETRY_AFTER_SECONDS = 1
AFFINITY_CALLS = 8
"""Largest surplus of calls in flight, over what would make a backend as busy as the least busy one, at which it is still chosen for its
cached prefixes."""
ATTEMPTS_KEPT = 100_000
"""Number of attempts whose last backend is remembered."""
RELEASES_KEPT = 16

_WAITED_FOR = {BackendStatus.SERVING, BackendStatus.PUBLISHING, BackendStatus.ASLEEP}
NOTHING: frozenset[str] = frozenset()


class PoolFullError(GatewayError):
    """A call was refused because the queue is full."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A release that one backend serves to a share of the rollouts, until it is promoted or rolled back."""

    backend: Backend
    release: WeightsRelease
    share: float


@dataclass(eq=False, slots=True)
class _Waiter:
    attempt: AttemptKey | None
    avoid: frozenset[str]
    granted: asyncio.Future[Upstream]

    @property
    def line(self) -> tuple[AttemptKey | None, frozenset[str]]:
        """Key of its line: all of a line can be served alike."""
        return self.attempt, self.avoid


class Policy:
    """A policy: its backends, its releases, and the queue of calls for them."""

    def __init__(self, name: str, queue_limit: int, on_change: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.backends: list[Upstream] = []
        self.releases: list[WeightsRelease] = []
        """Releases that were served, the newest last, which every engine of the policy must serve. Empty: none was published."""
        self.rolled_back: set[int] = set()
        """Versions that were rolled back; they are published again only on explicit request."""
        self.replaced: set[int] = set()
        """Versions in whose place an older one was published; they may be published again."""
        self.canary: Canary | None = None
        self.lock = asyncio.Lock()
        """Held by the task that publishes."""
        self.all_at_once = False
        """True while all engines take new weights: those that are done first do not get the calls of all."""
        self.waiting_elsewhere = 0
        """Number of calls that wait for a backend at other gateways, as they reported last."""
        self._on_change = on_change
        self._queue: FairQueue[tuple[AttemptKey | None, frozenset[str]], _Waiter] = FairQueue()
        self._queue_limit = queue_limit
        self._holders: OrderedDict[AttemptKey, Upstream] = OrderedDict()

    @property
    def engines(self) -> list[Backend]:
        """Return the backends that take orders, and are not leaving."""
        return [engine for engine in self.backends if isinstance(engine, Backend) and engine.status is not BackendStatus.DRAINING]

    @property
    def release(self) -> WeightsRelease | None:
        """Return the release that every engine but the canary must serve. None: each serves the weights it was started with."""
        return self.releases[-1] if self.releases else None

    @property
    def waiting(self) -> int:
        """Return the number of calls that wait for a backend."""
        return len(self._queue)

    @property
    def version(self) -> int | None:
        """Return the newest version that answers calls, the canary's excepted; with all engines down, their last. None: none reached."""
        canary = self.canary.backend if self.canary else None
        known = [engine for engine in self.engines if engine.info and (engine is not canary or len(self.engines) == 1)]
        up = [engine for engine in known if engine.status is not BackendStatus.DOWN] or known
        return max((engine.info.version for engine in up if engine.info), default=None)

    @property
    def status(self) -> BackendStatus:
        """Return the best status among the backends."""
        statuses = {backend.status for backend in self.backends}
        return next((status for status in BackendStatus if status in statuses), BackendStatus.DOWN)

    def release_for(self, backend: Backend) -> WeightsRelease | None:
        """Return the release that a backend must serve. None: the weights it was started with."""
        return self.canary.release if self.canary and self.canary.backend is backend else self.release

    def missed(self, backend: Backend, version: int) -> WeightsRelease | None:
        """Return the release that a backend at a version must load before it answers calls. None: it may answer with what it holds."""
        release = self.release_for(backend)
        # An engine that was started with a newer version keeps it.
        stale = release and version != release.version and (version < release.version or version in self.rolled_back | self.replaced)
        return release if stale else None

    def served(self, release: WeightsRelease) -> None:
        """Record a release as served now, and newer versions as replaced."""
        known = {past.version for past in self.releases} | {engine.info.version for engine in self.engines if engine.info}
        self.replaced |= {version for version in known if version > release.version}
        self.replaced.discard(release.version)
        self.rolled_back.discard(release.version)
        again = self.release is not None and self.release.version == release.version  # from another copy of its files, say
        self.releases = [*(self.releases[:-1] if again else self.releases), release][-RELEASES_KEPT:]

    def changed(self) -> None:
        """Handle a change of the backends: start the waiting calls that can start, and refuse those that no backend can serve."""
        while self._takes_calls() and self._queue.take(self._grant) is not None:
            pass
        for waiter in [waiter for waiter in self._queue if not self.may_become_free(waiter.attempt, waiter.avoid)]:
            self._queue.discard(waiter.line, waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(BackendDownError(self.why_down()))
        self._on_change()

    async def acquire(self, attempt: AttemptKey | None, avoid: Set[str] = NOTHING) -> Upstream:
        """Wait for a backend; the caller must give it back.

        Args:
            attempt: the attempt that makes the call.
            avoid: names of backends that the call could not connect to.

        Raises:
            BackendDownError: none is admitted, and none is about to be.
            PoolFullError: too many wait already.
        """
        # This overtakes no waiting call: backends with room could not serve those that wait, or would have.
        backend = self._choose(attempt, avoid)
        if backend is not None:
            return self._begin(backend, attempt)
        if not self.may_become_free(attempt, avoid):
            raise BackendDownError(self.why_down())
        if len(self._queue) >= self._queue_limit:
            raise PoolFullError(
                f"{len(self._queue)} calls wait for policy {self.name!r} already, as many as gateway.queue_limit allows. Ask again later, "
                "or register a backend more by POST /admin/backends."
            )
        waiter = _Waiter(attempt, frozenset(avoid), asyncio.get_running_loop().create_future())
        self._queue.put(waiter.line, waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self._queue.discard(waiter.line, waiter)
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                self.give_back(waiter.granted.result())
            raise

    def give_back(self, backend: Upstream) -> None:
        """End a call at a backend, and start the next waiting one."""
        backend.end()
        if not (backend.status is BackendStatus.SERVING or backend.may_be_tried):
            return  # it takes none, and the others were full before: where all drain, each end would look at every line
        while self._takes_calls() and self._queue.take(self._grant) is False:
            pass

    def why_down(self) -> str:
        """Return the reason why calls are refused."""
        reasons = [backend.reason or f"backend {backend.name} is {backend.status}" for backend in self.backends]
        return " ".join(reasons) or f"policy {self.name!r} has no backend. Register one by POST /admin/backends, or set gateway.backends."

    def _grant(self, waiter: _Waiter) -> bool | None:
        """Give a waiter a backend, and return True. None: there is none for it; False: it waits no more."""
        if waiter.granted.done():
            return False
        backend = self._choose(waiter.attempt, waiter.avoid)
        if backend is None:
            return None
        waiter.granted.set_result(self._begin(backend, waiter.attempt))
        return True

    def _begin(self, backend: Upstream, attempt: AttemptKey | None) -> Upstream:
        backend.begin()
        if attempt is not None and len(self.backends) > 1:
            self._holders[attempt] = backend
            self._holders.move_to_end(attempt)
            if len(self._holders) > ATTEMPTS_KEPT:
                self._holders.popitem(last=False)
        return backend

    def _choose(self, attempt: AttemptKey | None, avoid: Set[str]) -> Upstream | None:
        """Return the backend that a call may go to now: the one that caches its prefix, unless another is much less busy."""
        group = self._group(attempt, avoid)
        free = self._free(group)
        if not free:
            if any(backend.status in _WAITED_FOR for backend in group):
                return None
            free = [backend for backend in group if backend.may_be_tried and backend.has_room and not self.release]
            if not free:
                return None
        # The least busy by its capacity; among equals the one that was given the fewest calls in all, so that sequential calls rotate.
        least = min(free, key=lambda backend: (backend.load / backend.capacity, backend.calls / backend.capacity))
        holder = self._holders.get(attempt) if attempt else None
        if holder is not None and holder in free:
            as_busy = least.load * holder.capacity / least.capacity
            if holder.load - as_busy <= AFFINITY_CALLS:
                return holder
        return least

    def may_become_free(self, attempt: AttemptKey | None, avoid: Set[str]) -> bool:
        """Return whether there is a backend that may take a call, now or soon."""
        group = self._group(attempt, avoid)
        return any(backend.status in _WAITED_FOR or (backend.may_be_tried and not self.release) for backend in group)

    def _group(self, attempt: AttemptKey | None, avoid: Set[str]) -> list[Upstream]:
        """Return the backends that may answer an attempt's calls: the canary for its share of the rollouts, the others for the rest."""
        if self.canary is None:
            return self.backends if not avoid else [backend for backend in self.backends if backend.name not in avoid]
        canary = self.canary.backend
        others = [backend for backend in self.backends if backend is not canary and backend.name not in avoid]
        if (
            attempt is not None
            and canary_bucket(attempt.rollout_id) < self.canary.share
            and canary.name not in avoid
            and canary.status in _WAITED_FOR
        ):
            return [canary]
        return others

    def _free(self, group: Sequence[Upstream]) -> list[Upstream]:
        """Return the backends of a group that may take another call: while all take new weights, no more than their share by capacity."""
        free = [backend for backend in group if backend.status is BackendStatus.SERVING and backend.has_room]
        if not free or not self.all_at_once:
            return free
        sharing = [backend for backend in self.backends if backend.status in {BackendStatus.SERVING, BackendStatus.PUBLISHING}]
        calls = 1 + len(self._queue) + sum(backend.in_flight for backend in sharing)
        capacity = sum(backend.capacity for backend in sharing)
        return [backend for backend in free if backend.in_flight < math.ceil(calls * backend.capacity / capacity)]

    def _takes_calls(self) -> bool:
        """Return whether some backend may take a call: else there is no need to look at every line of the queue."""
        return bool(self._free(self.backends)) or (not self.release and any(backend.may_be_tried for backend in self.backends))
