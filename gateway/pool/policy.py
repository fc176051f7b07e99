"""The backends of one policy, and which of them answers a call.

In: calls that want a backend, and backends that come, go and change. Out: for each call a backend, in the end or at once. Invariant:
a backend has never more calls in flight than its limit; nobody waits while a backend that may serve them has room; a call goes to a
backend that is admitted, or to one that nobody has reached yet.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

from gateway.pool.backend import Backend
from gateway.pool.queueing import FairQueue
from gateway.pool.upstream import BackendDownError, BackendStatus, Upstream
from gateway.proxy.context import Attempt
from gateway.weights.publication import Release
from spangrad.errors import GatewayError

RETRY_AFTER_SECONDS = 1
AFFINITY_CALLS = 8
"""How many calls more than the least busy one a backend may be at and still be chosen for the prefixes that it holds."""
ATTEMPTS_KEPT = 100_000
"""Attempts whose backend is remembered."""
RELEASES_KEPT = 16

_WAITED_FOR = {BackendStatus.SERVING, BackendStatus.PUBLISHING, BackendStatus.ASLEEP}
NOTHING: frozenset[str] = frozenset()


class PoolFullError(GatewayError):
    """A call was refused because as many wait as may."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A release that one backend serves to a share of the rollouts, until it is promoted or rolled back."""

    backend: Backend
    release: Release
    share: float


@dataclass(eq=False, slots=True)
class _Waiter:
    attempt: Attempt | None
    avoid: Set[str]
    granted: asyncio.Future[Upstream]


class Policy:
    """One policy."""

    def __init__(self, name: str, queue_limit: int) -> None:
        self.name = name
        self.backends: list[Upstream] = []
        self.releases: list[Release] = []
        """What was served, the newest last: that is what every engine of the policy ought to serve. Empty: nobody has said."""
        self.rolled_back: set[int] = set()
        """Versions that were taken back, and are not published again by mistake."""
        self.replaced: set[int] = set()
        """Versions in whose place an older one was published; they may be published again."""
        self.canary: Canary | None = None
        self.lock = asyncio.Lock()
        """Held by whoever publishes."""
        self.all_at_once = False
        """All engines are taking new weights: those that are done first do not get the calls of all."""
        self._queue: FairQueue[Attempt | None, _Waiter] = FairQueue()
        self._queue_limit = queue_limit
        self._holders: OrderedDict[Attempt, Upstream] = OrderedDict()

    @property
    def engines(self) -> list[Backend]:
        """The backends that take orders, and are not leaving."""
        return [one for one in self.backends if isinstance(one, Backend) and one.status is not BackendStatus.DRAINING]

    @property
    def release(self) -> Release | None:
        """What every engine but the canary ought to serve. None: whatever it was started with."""
        return self.releases[-1] if self.releases else None

    @property
    def waiting(self) -> int:
        """Calls that wait for a backend."""
        return len(self._queue)

    @property
    def version(self) -> int | None:
        """The newest version that calls are answered with, the canary's aside; while none is, the last one. None: no engine was reached."""
        canary = self.canary.backend if self.canary else None
        known = [one for one in self.engines if one.info and (one is not canary or len(self.engines) == 1)]
        up = [one for one in known if one.status is not BackendStatus.DOWN] or known
        return max((one.info.version for one in up if one.info), default=None)

    @property
    def status(self) -> BackendStatus:
        """The best of its backends'."""
        found = {one.status for one in self.backends}
        return next((one for one in BackendStatus if one in found), BackendStatus.DOWN)

    def wanted(self, backend: Backend) -> Release | None:
        """What a backend ought to serve."""
        return self.canary.release if self.canary and self.canary.backend is backend else self.release

    def missed(self, backend: Backend, version: int) -> Release | None:
        """What a backend that holds a version has to be given before it answers calls. None: it may answer with what it holds."""
        wanted = self.wanted(backend)
        # One that was started with a newer version was meant to be.
        stale = wanted and version != wanted.version and (version < wanted.version or version in self.rolled_back | self.replaced)
        return wanted if stale else None

    def served(self, release: Release) -> None:
        """Remember a release that is served now, and that what is newer is not."""
        known = {one.version for one in self.releases} | {one.info.version for one in self.engines if one.info}
        self.replaced |= {one for one in known if one > release.version}
        self.replaced.discard(release.version)
        self.rolled_back.discard(release.version)
        if release != self.release:
            self.releases = [*self.releases, release][-RELEASES_KEPT:]

    def changed(self) -> None:
        """A backend came, went or changed: let those begin who can, and refuse those who wait in vain."""
        while self._queue.take(self._grant) is not None:
            pass
        for waiter in [one for one in self._queue if not self.worth_waiting(one.attempt, one.avoid)]:
            self._queue.discard(waiter.attempt, waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(BackendDownError(self.why_down()))

    async def acquire(self, attempt: Attempt | None, avoid: Set[str] = NOTHING) -> Upstream:
        """Wait for a backend; whoever gets it gives it back.

        Args:
            attempt: whose call it is.
            avoid: names of backends that the call could not connect to.

        Raises:
            BackendDownError: none is admitted, and none is about to be.
            PoolFullError: too many wait already.
        """
        # Nobody is overtaken: those who wait could not be served by what has room, or would have been.
        backend = self._choose(attempt, avoid)
        if backend is not None:
            return self._begin(backend, attempt)
        if not self.worth_waiting(attempt, avoid):
            raise BackendDownError(self.why_down())
        if len(self._queue) >= self._queue_limit:
            raise PoolFullError(
                f"{len(self._queue)} calls wait for policy {self.name!r} already, as many as gateway.queue_limit allows. Ask again later, "
                "or register a backend more by POST /admin/backends."
            )
        waiter = _Waiter(attempt, avoid, asyncio.get_running_loop().create_future())
        self._queue.put(attempt, waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self._queue.discard(attempt, waiter)
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                self.give_back(waiter.granted.result())
            raise

    def give_back(self, backend: Upstream) -> None:
        """A call has ended: the next in turn may begin."""
        backend.end()
        while self._queue.take(self._grant) is False:
            pass

    def why_down(self) -> str:
        """Why calls are refused."""
        reasons = [one.reason or f"backend {one.name} is {one.status}" for one in self.backends]
        return " ".join(reasons) or f"policy {self.name!r} has no backend. Register one by POST /admin/backends, or set gateway.backends."

    def _grant(self, waiter: _Waiter) -> bool | None:
        """Give a waiter a backend. None: there is none for it; False: it waits no more."""
        if waiter.granted.done():
            return False
        backend = self._choose(waiter.attempt, waiter.avoid)
        if backend is None:
            return None
        waiter.granted.set_result(self._begin(backend, waiter.attempt))
        return True

    def _begin(self, backend: Upstream, attempt: Attempt | None) -> Upstream:
        backend.begin()
        if attempt is not None and len(self.backends) > 1:
            self._holders[attempt] = backend
            self._holders.move_to_end(attempt)
            if len(self._holders) > ATTEMPTS_KEPT:
                self._holders.popitem(last=False)
        return backend

    def _choose(self, attempt: Attempt | None, avoid: Set[str]) -> Upstream | None:
        """The backend that a call may go to now: the one that holds its prefix, unless another is much less busy."""
        group = self._group(attempt, avoid)
        free = [one for one in group if one.status is BackendStatus.SERVING and one.has_room and self._has_share(one)]
        if not free:
            if any(one.status in _WAITED_FOR for one in group):
                return None
            free = [one for one in group if one.worth_a_try and one.has_room and not self.release]
            if not free:
                return None
        # Among equals the one that was given the fewest: calls one after the other go round.
        least = min(free, key=lambda one: (one.in_flight, one.calls))
        holder = self._holders.get(attempt) if attempt else None
        if holder is not None and holder in free and holder.in_flight - least.in_flight <= AFFINITY_CALLS:
            return holder
        return least

    def worth_waiting(self, attempt: Attempt | None, avoid: Set[str]) -> bool:
        """Whether there is a backend that may take a call, now or soon."""
        return any(one.status in _WAITED_FOR or (one.worth_a_try and not self.release) for one in self._group(attempt, avoid))

    def _group(self, attempt: Attempt | None, avoid: Set[str]) -> list[Upstream]:
        """The backends that may answer an attempt's calls at all: the canary for its share of the rollouts, the others for the rest."""
        if self.canary is None:
            return self.backends if not avoid else [one for one in self.backends if one.name not in avoid]
        canary, others = self.canary.backend, [one for one in self.backends if one is not self.canary.backend and one.name not in avoid]
        if attempt is not None and _lot(attempt) < self.canary.share and canary.name not in avoid and canary.status in _WAITED_FOR:
            return [canary]
        return others

    def _has_share(self, backend: Upstream) -> bool:
        """Whether a backend that is done with its new weights may take a call more while the others are not."""
        if not self.all_at_once:
            return True
        sharing = [one for one in self.backends if one.status in {BackendStatus.SERVING, BackendStatus.PUBLISHING}]
        calls = 1 + len(self._queue) + sum(one.in_flight for one in sharing)
        return backend.in_flight < -(-calls // len(sharing))


def _lot(attempt: Attempt) -> float:
    """Where a rollout falls in [0, 1): the same place for all of its calls."""
    return zlib.crc32(attempt.rollout_id.encode("utf-8", "replace")) / 2**32
