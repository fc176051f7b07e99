"""HTTP messages between an environment service and its clients: JSON objects (docs/guides/environments.md).

In, out: frozen structs. Invariant: a request with an unknown field is refused; unknown fields of responses are ignored, so that services
of other authors may add fields.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=512)]
WAIT_MOST = 60.0
"""Longest time that a request may wait in line, in seconds."""


class InstanceState(StrEnum):
    """State of an instance."""

    MAKING = "making"
    """The slot has no instance yet, or its discarded instance is being replaced."""
    FREE = "free"
    """Reset, and not leased."""
    LEASED = "leased"
    """Leased to an attempt."""
    RESETTING = "resetting"
    """Released and being reset; it is not leased before that is done."""


class InstanceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/leases: request for a lease."""

    lease: Name
    """Name of the lease, chosen by the client, so that it can repeat the request, and release the lease even if no answer arrived."""
    rollout_id: Name
    attempt: Annotated[int, Meta(ge=0)]
    input: Any = None
    """Input of the task."""
    wait_seconds: Annotated[float, Meta(ge=0, le=WAIT_MOST)] = 0
    """Longest wait in line for a free instance, in seconds."""


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a lease request."""

    lease: str
    instance: str
    """Name of the instance, for people."""
    environment: Any
    """Value that is passed to the agent: what the instance's `begin` returned."""
    lease_seconds: float
    """Time for which the lease holds without a heartbeat, in seconds."""


class InstanceHeartbeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/leases/heartbeat: these leases are in use."""

    leases: list[Name]


class ExpiredLeases(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a heartbeat: those of its leases that are not held any more."""

    over: list[str]


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """Response to DELETE /v1/leases/{lease}."""

    released: bool
    """False: the lease was not held, or is not held any more."""


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one instance, for people."""

    instance: str
    state: InstanceState
    users: int
    """Number of attempts that it was leased to so far."""
    rollout_id: str | None
    """Rollout that it is leased to. None: it is not leased."""


class InstanceStatuses(msgspec.Struct, frozen=True, kw_only=True):
    """Response to GET /v1/instances."""

    instances: list[InstanceStatus]
    waiting: int
    """Number of requests in line."""
