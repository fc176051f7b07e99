"""Messages between the gateway that gives orders to the engines, the controller, and those that follow it.

In: the controller's pool. Out: its state in a form that a follower rebuilds, and a follower's report of its calls. Invariant: a report
names the revision that the follower acts on, so that the controller knows from when on no call begins at a backend that it has closed.
"""

from __future__ import annotations

import msgspec

from gateway.pool.backend import Backend, EngineInfo
from gateway.pool.policy import Policy
from gateway.pool.pool import BackendPool
from gateway.pool.registry import RegisteredBackend
from gateway.pool.upstream import BackendStatus, Upstream
from gateway.weights.publication import WeightsRelease
from spangrad.http.announcements import ClosedAttempt

BEAT_SECONDS = 1.0
"""Longest time between two messages, each way."""
COUNT_SECONDS = 0.05
"""Time between two counts of the calls in flight, which are sent when they have changed."""
CLOSED_KEPT = 10_000
"""Number of the newest ends of attempts that a gateway keeps for others that connect later."""
SILENT_SECONDS = 5.0
"""Time without a message after which the other gateway counts as gone."""


class BackendView(msgspec.Struct, frozen=True):
    """Backend of the controller: what a follower needs to send it calls."""

    id: int
    name: str
    settings: RegisteredBackend
    status: BackendStatus
    reason: str
    broken: bool = False
    info: EngineInfo | None = None
    """None: it is no engine, or was never reached."""


class CanaryView(msgspec.Struct, frozen=True):
    """Release that one backend serves to a share of the rollouts."""

    backend: int
    """Its `BackendView.id`."""
    release: WeightsRelease
    share: float


class PolicyView(msgspec.Struct, frozen=True):
    """Policy of the controller."""

    name: str
    backends: tuple[BackendView, ...]
    release: WeightsRelease | None
    canary: CanaryView | None
    all_at_once: bool


class PoolView(msgspec.Struct, frozen=True):
    """State of the controller's pool."""

    default: str
    models: dict[str, str]
    policies: tuple[PolicyView, ...]


class ControllerUpdate(msgspec.Struct, frozen=True):
    """Message of the controller."""

    revision: int
    """Number of the state; it begins anew with each start of the controller."""
    state: PoolView | None
    """None: it is as the message before left it."""
    elsewhere: dict[int, int]
    """Calls in flight of all other gateways, by the backends' ids; 0 is left out."""
    closed: tuple[ClosedAttempt, ...] = ()
    """Attempts that have ended since the message before."""


class FollowerReport(msgspec.Struct, frozen=True):
    """Message of a follower."""

    revision: int
    """Newest state that it acts on."""
    in_flight: dict[int, int]
    """Its calls in flight, by the backends' ids; 0 is left out."""
    waiting: dict[str, int]
    """Its calls that wait for a backend, by policy; 0 is left out."""
    closed: tuple[ClosedAttempt, ...] = ()
    """Attempts that have ended, as it was ordered since the message before; first of all the newest ones from before the connection."""


def view_of(pool: BackendPool) -> PoolView:
    """Return the state of a pool."""
    return PoolView(pool.default, dict(pool.models), tuple(map(_policy_view, pool.policies.values())))


def _policy_view(policy: Policy) -> PolicyView:
    canary = policy.canary
    return PolicyView(
        policy.name,
        tuple(map(_backend_view, policy.backends)),
        policy.release,
        CanaryView(canary.backend.id, canary.release, canary.share) if canary else None,
        policy.all_at_once,
    )


def _backend_view(backend: Upstream) -> BackendView:
    broken, info = (backend.broken, backend.info) if isinstance(backend, Backend) else (False, None)
    return BackendView(backend.id, backend.name, RegisteredBackend.of(backend.settings), backend.status, backend.reason, broken, info)
