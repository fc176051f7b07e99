"""Releases of a policy: publication to all of its engines, rolling or at once, to a canary first, and rollback.

In: a version from the trainer, or an operator's order. Out: engines that serve it, and the reasons of those that do not. Invariant: a
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
from gateway.weights.publication import CallsInFlight, Expected, PublicationError, WeightsRelease, holds, put
from gateway.weights.transfer import SenderAddress
from spangrad.errors import EngineError
from spangrad.weights.shards import ChecksumScope, EngineSums

log = logging.getLogger(__name__)


class Order(StrEnum):
    """Order in which the engines of a policy take new weights."""

    ALL_AT_ONCE = "all_at_once"
    """All engines together: calls wait for the first that is done."""
    ROLLING = "rolling"
    """One engine after the other, while the rest serve; it ends with the first engine if that fails."""


class OrderRequest(CallsInFlight, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order in which engines take a version that the gateway knows, and treatment of their calls in flight."""

    order: Order = Order.ALL_AT_ONCE


class PublicationRequest(OrderRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer's request to publish a version."""

    version: int
    path: str
    checksum: str = ""
    """Checksum of all words of its weights. Empty: engines must hold what the files hold, whatever that is."""
    canary: float | None = None
    """Share of the rollouts that one engine serves with the version until it is promoted or rolled back. None: all engines serve it."""
    sender: SenderAddress | None = None
    """Trainer that sends the weights to the engines. None: they read them from `path`, as any engine does that needs them later."""
    again: bool = False
    """Publish a version that was rolled back, or that is older than what is served."""


class Publication(msgspec.Struct, frozen=True):
    """Result of a publication: the version that is served, and by which backends."""

    policy: str
    version: int
    checksum: str
    seconds: float
    backends: dict[str, str] = {}
    """Each engine's status, with the reason of those that are down."""
    stages: dict[str, dict[str, float]] = {}
    """Seconds of each step (pause, reload, checksum, ...), by engine, of those that took the version in this publication."""


async def publish(policy: Policy, request: PublicationRequest) -> Publication:
    """Make the engines of a policy serve a version.

    Raises:
        PublicationError: the request cannot be met; nothing changed.
        EngineError: no engine serves it; the message says what state that left.
    """
    began = time.monotonic()
    release = WeightsRelease(request.version, request.path, request.checksum)
    async with policy.lock:
        engines = _publishable(policy)
        if policy.canary:
            raise PublicationError(  # a status that has trainers try again
                503,
                f"version {policy.canary.release.version} is out as a canary of {policy.name!r}. Promote it or roll it back first.",
            )
        if request.version in policy.rolled_back and not request.again:
            raise PublicationError(
                409, f'version {request.version} was rolled back. Publish a newer one, or this one with "again": true, if you mean it.'
            )
        expected = Expected(release, request.sender)
        todo = [engine for engine in engines if not _serves(engine, release, await expected.by(engine))]
        if not todo:
            if policy.release is None or policy.release.version != release.version:
                # Engines were started with it, or another gateway published it: those that come later are given it as well.
                policy.served(release)
                _withdraw_outdated(policy)
            return _publication(policy, release, 0.0)
        _require_newer(policy, release, todo, again=request.again)
        if request.canary is not None:
            await _send_canary(policy, release, expected, request, todo)
        else:
            try:
                await _put_into(policy, todo, release, expected, request.order, request)
            except EngineError as error:
                if len(todo) == len(engines):
                    raise
                log.warning("version %d is served by those that had it: %s", release.version, error)
            policy.served(release)
            _withdraw_outdated(policy)
        took = [policy.canary.backend] if policy.canary else todo
        return _publication(policy, release, time.monotonic() - began, took)


async def promote(policy: Policy, request: OrderRequest) -> Publication:
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
        engines = _publishable(policy)
        todo = [engine for engine in engines if not _serves(engine, canary.release, await expected.by(engine))]
        if canary.backend in todo or canary.backend not in engines:
            raise PublicationError(409, f"the canary does not serve version {canary.release.version}: {canary.backend.reason}")
        policy.canary = None
        policy.served(canary.release)
        try:
            if todo:
                await _put_into(policy, todo, canary.release, expected, request.order, request)
        except EngineError as error:
            log.warning("only the canary serves version %d: %s", canary.release.version, error)
        _withdraw_outdated(policy)
        return _publication(policy, canary.release, time.monotonic() - began)


async def roll_back(policy: Policy, request: OrderRequest) -> Publication:
    """Serve what was served before: before the canary, before a publication that left no engine up, else before the newest version.

    Raises:
        PublicationError: the previous version is unknown, or its files are missing; nothing changed.
        EngineError: no engine serves it; the message says what state that left.
    """
    began = time.monotonic()
    async with policy.lock:
        engines = _publishable(policy)
        up = any(engine.status is not BackendStatus.DOWN for engine in engines)
        newest = policy.canary is None and up
        earlier_releases = policy.releases[:-1] if newest else policy.releases
        if not earlier_releases:
            raise PublicationError(
                409, f"no version is known that policy {policy.name!r} served before: this gateway has published none. Publish one."
            )
        release = earlier_releases[-1]
        expected = Expected(release)
        todo = [engine for engine in engines if not _serves(engine, release, await expected.by(engine))]
        withdrawn = [policy.canary.release.version] if policy.canary else [past.version for past in policy.releases[-1:] if newest]
        try:
            if todo:
                await _put_into(policy, todo, release, expected, request.order, request)
        except EngineError as error:
            if len(todo) == len(engines):
                raise
            log.warning("version %d is served by those that had it: %s", release.version, error)
        policy.canary = None
        policy.releases = earlier_releases
        policy.rolled_back = (policy.rolled_back | set(withdrawn)) - {release.version}
        policy.replaced.discard(release.version)
        _withdraw_outdated(policy)
        return _publication(policy, release, time.monotonic() - began)


def _publishable(policy: Policy) -> list[Backend]:
    """Return the engines that can be published to.

    One that cannot be reached, or is not admitted yet, would fail or be waited for: its watcher loads what is served before it has calls.

    Raises:
        PublicationError: there is none.
    """
    engines = policy.engines
    if not engines:
        raise PublicationError(409, f"policy {policy.name!r} has no engine to publish to: its backends are frozen, or there are none.")
    publishable = [engine for engine in engines if engine.info and (engine.broken or engine.status is not BackendStatus.DOWN)]
    if not publishable:
        raise PublicationError(503, f"{policy.why_down()}. Publish again once /readyz answers 200.")
    return publishable


def _serves(backend: Backend, release: WeightsRelease, expected: EngineSums) -> bool:
    assert backend.info
    same = backend.scope is ChecksumScope.OFF or backend.checksum == expected.checksum
    return backend.status is BackendStatus.SERVING and backend.info.version == release.version and same


def _require_newer(policy: Policy, release: WeightsRelease, todo: Sequence[Backend], *, again: bool) -> None:
    """Raise unless the version is newer than those served: a version's weights never change, and old ones return by rollback or `again`."""
    for engine in policy.engines:
        if engine.info and (release.version == engine.info.version or (release.version < engine.info.version and not again)):
            lost = engine.status in {BackendStatus.DOWN, BackendStatus.ASLEEP}
            reinstates = release.version == engine.info.version and (lost or engine not in todo)
            if not reinstates:
                raise PublicationError(409, f"version {release.version} is not newer than version {engine.info.version}, which is served.")


async def _put_into(
    policy: Policy, engines: Sequence[Backend], release: WeightsRelease, expected: Expected, order: Order, calls: CallsInFlight
) -> None:
    """Publish to engines; the status of each shows whether it failed.

    Raises:
        EngineError: all failed, or in rolling order the first.
    """
    began = time.monotonic()
    if order is Order.ROLLING:
        failures = [await _publish_to(engines[0], release, expected, calls)]
        if failures[0] is None:
            failures += [await _publish_to(engine, release, expected, calls) for engine in engines[1:]]
    else:
        # Engines that get only a new version number serve meanwhile.
        policy.all_at_once = not all([holds(engine, await expected.by(engine)) for engine in engines])
        try:
            failures = await asyncio.gather(*(_publish_to(engine, release, expected, calls) for engine in engines))
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


async def _publish_to(
    backend: Backend, release: WeightsRelease, expected: Expected, calls: CallsInFlight
) -> EngineError | PublicationError | None:
    """Publish to one engine; return its error, or None. One that was restarted since the others began may refuse what it took before."""
    async with backend.lock:
        try:
            await put(backend, release, await expected.by(backend), calls, expected.sender)
        except (EngineError, PublicationError) as error:
            return error
    return None


async def _send_canary(
    policy: Policy, release: WeightsRelease, expected: Expected, request: PublicationRequest, todo: Sequence[Backend]
) -> None:
    share = request.canary or 0.0
    serving = [engine for engine in todo if engine.status is BackendStatus.SERVING]
    if len(serving) < 2:
        raise PublicationError(409, f"a canary needs two engines that serve, policy {policy.name!r} has {len(serving)}.")
    if not 0 < share < 1:
        raise PublicationError(409, f"canary = {share:g} is no share of the rollouts: it lies between 0 and 1.")
    first = min(serving, key=lambda engine: engine.in_flight)
    # Before it serves: calls that wait meanwhile go to it only if they are its own.
    policy.canary = Canary(first, release, share)
    try:
        await _put_into(policy, [first], release, expected, Order.ROLLING, request)
    except BaseException:
        policy.canary = None
        raise
    finally:
        policy.changed()


def _withdraw_outdated(policy: Policy) -> None:
    """Take down engines that still serve another version, as one that could not be paused does; their watchers bring them up to date."""
    release = policy.release
    for engine in policy.engines:
        if release and engine.info and engine.status is BackendStatus.SERVING and engine.info.version != release.version:
            engine.take_down(
                f"the engine at {engine.url} is behind: it serves version {engine.info.version}, not {release.version}", broken=False
            )
    policy.changed()  # also where no engine was taken down: other gateways are to learn of the release


def _publication(policy: Policy, release: WeightsRelease, seconds: float, took: Sequence[Backend] = ()) -> Publication:
    backends = {engine.name: f"{engine.status}: {engine.reason}" if engine.reason else str(engine.status) for engine in policy.engines}
    stages = {engine.name: engine.publication for engine in took if engine.status is not BackendStatus.DOWN}
    return Publication(policy.name, release.version, release.checksum, seconds, backends, stages)
