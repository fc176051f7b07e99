"""New weights for a policy: into all of its engines, one after the other or at once, into one first, and back.

In: a version from the trainer, or an operator's order. Out: engines that serve it, and a word on those that do not. Invariant: a
version counts as served only when an engine has shown that it serves it; an engine that failed, or is behind, answers no calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from gateway.pool.backend import Backend
from gateway.pool.policy import Canary, Policy
from gateway.pool.upstream import BackendStatus
from gateway.weights.publication import CallsInFlight, Expected, InFlight, PublicationError, Release, holds, put
from gateway.weights.transfer import Sender
from spangrad.errors import EngineError

log = logging.getLogger(__name__)


class Order(StrEnum):
    """In which order engines take new weights."""

    ALL_AT_ONCE = "all_at_once"
    """All together: calls wait for the first that is done."""
    ROLLING = "rolling"
    """One after the other, while the rest serve on; it ends with the first engine, should that fail."""


class PublicationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer hands over."""

    version: int
    path: str
    checksum: str
    order: Order = Order.ALL_AT_ONCE
    in_flight: InFlight = InFlight.KEEP
    drain_seconds: float | None = None
    """Longest wait of `drain`; calls that are left go on as with `keep`. None: the time of a call, after which the publication fails."""
    canary: float | None = None
    """Share of the rollouts that one engine serves with it, until it is promoted or rolled back. None: all engines serve it."""
    sender: Sender | None = None
    """Who sends the weights to the engines' workers. None: they read them from `path`, as they will whenever they need them again."""
    again: bool = False
    """Publish a version that was rolled back, or that is older than what is served."""

    @property
    def calls(self) -> CallsInFlight:
        """Treatment of calls in flight."""
        return CallsInFlight(self.in_flight, self.drain_seconds)


class Publication(msgspec.Struct, frozen=True):
    """A version that is served."""

    policy: str
    version: int
    checksum: str
    seconds: float
    backends: dict[str, str] = {}
    """Each engine's status, with the reason of those that are down."""
    stages: dict[str, dict[str, float]] = {}
    """Seconds of each step (pause, reload, checksum, ...) of the engines that took the version now."""


async def publish(policy: Policy, request: PublicationRequest) -> Publication:
    """Make the engines of a policy serve a version.

    Raises:
        PublicationError: the request cannot be met; nothing changed.
        EngineError: no engine serves it; the message says what state that left.
    """
    began = time.monotonic()
    release = Release(request.version, request.path, request.checksum)
    async with policy.lock:
        engines = _reached(policy)
        if policy.canary:
            raise PublicationError(
                409,
                f"version {policy.canary.release.version} is out as a canary of {policy.name!r}. Promote it or roll it back first.",
            )
        if request.version in policy.rolled_back and not request.again:
            raise PublicationError(
                409, f'version {request.version} was rolled back. Publish a newer one, or this one with "again": true, if you mean it.'
            )
        expected = Expected(release, request.sender)
        todo = [one for one in engines if not _serves(one, release, await expected.by(one))]
        if not todo:
            return _publication(policy, release, 0.0)
        _require_newer(policy, release, todo, again=request.again)
        if request.canary is not None:
            await _send_canary(policy, release, expected, request, todo)
        else:
            await _put_into(policy, todo, release, expected, request.order, request.calls)
            policy.served(release)
            _withdraw_laggards(policy)
        took = [policy.canary.backend] if policy.canary else todo
        return _publication(policy, release, time.monotonic() - began, took)


async def promote(policy: Policy, order: Order, calls: CallsInFlight) -> Publication:
    """Have all engines serve what the canary serves.

    Raises:
        PublicationError: there is no canary, or it is down; nothing changed.
    """
    began = time.monotonic()
    async with policy.lock:
        canary = policy.canary
        if canary is None:
            raise PublicationError(409, f"policy {policy.name!r} has no canary.")
        expected = Expected(canary.release)
        todo = [one for one in _reached(policy) if not _serves(one, canary.release, await expected.by(one))]
        if canary.backend in todo:
            raise PublicationError(409, f"the canary does not serve version {canary.release.version}: {canary.backend.reason}")
        policy.canary = None
        policy.served(canary.release)
        try:
            if todo:
                await _put_into(policy, todo, canary.release, expected, order, calls)
        except EngineError as error:
            log.warning("only the canary serves version %d: %s", canary.release.version, error)
        _withdraw_laggards(policy)
        return _publication(policy, canary.release, time.monotonic() - began)


async def roll_back(policy: Policy, order: Order, calls: CallsInFlight) -> Publication:
    """Serve what was served before: before the canary, before a publication that left no engine up, else before the newest version.

    Raises:
        PublicationError: what was served before is not known, or its files are gone; nothing changed.
        EngineError: no engine serves it; the message says what state that left.
    """
    began = time.monotonic()
    async with policy.lock:
        engines = _reached(policy)
        up = any(one.status is not BackendStatus.DOWN for one in engines)
        newest = policy.canary is None and up
        former = policy.releases[:-1] if newest else policy.releases
        if not former:
            raise PublicationError(
                409, f"no version is known that policy {policy.name!r} served before: this gateway has published none. Publish one."
            )
        release = former[-1]
        expected = Expected(release)
        todo = [one for one in engines if not _serves(one, release, await expected.by(one))]
        withdrawn = [policy.canary.release.version] if policy.canary else [one.version for one in policy.releases[-1:] if newest]
        try:
            if todo:
                await _put_into(policy, todo, release, expected, order, calls)
        except EngineError as error:
            if len(todo) == len(engines):
                raise
            log.warning("version %d is served by those that had it: %s", release.version, error)
        policy.canary = None
        policy.releases = former
        policy.rolled_back = (policy.rolled_back | set(withdrawn)) - {release.version}
        policy.replaced.discard(release.version)
        _withdraw_laggards(policy)
        return _publication(policy, release, time.monotonic() - began)


def _reached(policy: Policy) -> list[Backend]:
    """The engines that can be published to.

    Raises:
        PublicationError: there is none.
    """
    engines = policy.engines
    if not engines:
        raise PublicationError(409, f"policy {policy.name!r} has no engine to publish to: its backends are frozen, or there are none.")
    reached = [one for one in engines if one.info]
    if not reached:
        raise PublicationError(503, f"{policy.why_down()}. Publish again once /readyz answers 200.")
    return reached


def _serves(backend: Backend, release: Release, expected: str) -> bool:
    assert backend.info
    return backend.status is BackendStatus.SERVING and (backend.info.version, backend.checksum) == (release.version, expected)


def _require_newer(policy: Policy, release: Release, todo: Sequence[Backend], *, again: bool) -> None:
    """A version has one set of weights for ever, and older ones come back by rolling back, or where that is asked for, alone."""
    for one in policy.engines:
        if one.info and (release.version == one.info.version or (release.version < one.info.version and not again)):
            mends = release.version == one.info.version and (one.status is BackendStatus.DOWN or one not in todo)
            if not mends:
                raise PublicationError(409, f"version {release.version} is not newer than version {one.info.version}, which is served.")


async def _put_into(
    policy: Policy, engines: Sequence[Backend], release: Release, expected: Expected, order: Order, calls: CallsInFlight
) -> None:
    """Publish to engines; those that fail are told apart by their status.

    Raises:
        EngineError: all failed, or in rolling order the first.
    """
    began = time.monotonic()
    if order is Order.ROLLING:
        failures = [await _publish_to(engines[0], release, expected, calls)]
        if failures[0] is None:
            failures += [await _publish_to(one, release, expected, calls) for one in engines[1:]]
    else:
        # Those that get a number alone serve on meanwhile.
        policy.all_at_once = not all([holds(one, await expected.by(one)) for one in engines])
        try:
            failures = await asyncio.gather(*(_publish_to(one, release, expected, calls) for one in engines))
        finally:
            policy.all_at_once = False
            policy.changed()
    errors = [error for error in failures if error is not None]
    if len(errors) == len(failures):
        raise EngineError(" ".join(map(str, errors)))
    log.info(
        "published: policy %r version %d from %s into %d of %d engines (%.3f s)",
        *(policy.name, release.version, release.path, len(failures) - len(errors), len(engines), time.monotonic() - began),
    )


async def _publish_to(backend: Backend, release: Release, expected: Expected, calls: CallsInFlight) -> EngineError | None:
    """Publish to one engine; what went wrong, or None."""
    async with backend.lock:
        try:
            await put(backend, release, await expected.by(backend), calls, expected.sender)
        except EngineError as error:
            return error
    return None


async def _send_canary(policy: Policy, release: Release, expected: Expected, request: PublicationRequest, todo: Sequence[Backend]) -> None:
    share = request.canary or 0.0
    serving = [one for one in todo if one.status is BackendStatus.SERVING]
    if len(serving) < 2:
        raise PublicationError(409, f"a canary needs two engines that serve, policy {policy.name!r} has {len(serving)}.")
    if not 0 < share < 1:
        raise PublicationError(409, f"canary = {share:g} is no share of the rollouts: it lies between 0 and 1.")
    first = min(serving, key=lambda one: one.in_flight)
    # Before it serves: calls that wait meanwhile go to it only if they are its own.
    policy.canary = Canary(first, release, share)
    try:
        await _put_into(policy, [first], release, expected, Order.ROLLING, request.calls)
    except BaseException:
        policy.canary = None
        raise
    finally:
        policy.changed()


def _withdraw_laggards(policy: Policy) -> None:
    """An engine that could not be paused serves the old version still: who watches it brings it up."""
    wanted = policy.release
    for one in policy.engines:
        if wanted and one.info and one.status is BackendStatus.SERVING and one.info.version != wanted.version:
            one.take_down(f"the engine at {one.url} is behind: it serves version {one.info.version}, not {wanted.version}", broken=False)


def _publication(policy: Policy, release: Release, seconds: float, took: Sequence[Backend] = ()) -> Publication:
    backends = {one.name: f"{one.status}: {one.reason}" if one.reason else str(one.status) for one in policy.engines}
    stages = {one.name: one.publication for one in took if one.status is not BackendStatus.DOWN}
    return Publication(policy.name, release.version, release.checksum, seconds, backends, stages)
