"""What a service of environments and its clients say to each other: JSON objects over HTTP (docs/environments.md).

In, out: frozen structs. Invariant: a request with a field that nobody knows is refused; in answers such fields are passed over, so that
services of other people may say more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=512)]
WAIT_MOST = 60.0
"""Seconds that a request may wait in line."""


class State(StrEnum):
    """What is being done with an instance."""

    MAKING = "making"
    """There is none yet, or another one is made in the place of one that was discarded."""
    FREE = "free"
    """Clean, and nobody's."""
    LEASED = "leased"
    """Somebody's."""
    RESETTING = "resetting"
    """Its user has gone; nobody gets it before it is clean."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/leases."""

    lease: Name
    """The lease's name, given by who asks, so that it can be asked for again, and given back whatever was heard of it."""
    rollout_id: Name
    attempt: Annotated[int, Meta(ge=0)]
    input: Any = None
    """The task's."""
    wait_seconds: Annotated[float, Meta(ge=0, le=WAIT_MOST)] = 0
    """While nothing is free, stay in line so long."""


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer."""

    lease: str
    instance: str
    """Which one: for people."""
    environment: Any
    """What the agent is handed: whatever the instance gives."""
    lease_seconds: float
    """That the lease holds without a heartbeat."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/leases/heartbeat: these are in use."""

    leases: list[Name]


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer: those of them that are not held any more."""

    over: list[str]


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """DELETE /v1/leases/{lease}."""

    released: bool
    """False: it was not held, or is not any more."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, for people."""

    instance: str
    state: State
    users: int
    """That it has had."""
    rollout_id: str | None
    """Whose it is. None: nobody's."""


class Standings(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/instances."""

    instances: list[Standing]
    waiting: int
    """Requests in line."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Any answer that is not 200."""

    error: str
