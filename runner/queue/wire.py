"""What the queue's server and its clients say to each other: JSON objects over HTTP.

In, out: frozen structs. Invariant: a field that nobody knows is refused, and so is a value that has no meaning.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from spangrad.types import POLICY_FAILURES, AttemptFailure, Mode, PromptVersion

NO_NULL = r"^[^\x00]*$"
"""PostgreSQL keeps no such character, and one that it refuses would fail the transaction of everybody who shares it."""
Name = Annotated[str, Meta(min_length=1, max_length=512, pattern=NO_NULL)]
Seconds = Annotated[float, Meta(gt=0, le=1e7)]
Count = Annotated[int, Meta(ge=1, le=100_000)]
Rewards = dict[str, float | dict[str, float]]
"""By name: a number that is everybody's, or numbers by role."""
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class State(StrEnum):
    """How a rollout stands."""

    QUEUED = "queued"
    """Waits to be handed out, for the first time or again."""
    RUNNING = "running"
    """A worker holds it."""
    SUCCEEDED = "succeeded"
    """An attempt was completed."""
    FAILED = "failed"
    """An attempt failed by what the policy did, and has a reward for it: it counts, and no other attempt is made."""
    DEAD = "dead"
    """Each of its attempts failed: a dead letter, until somebody queues it again."""
    CANCELLED = "cancelled"
    """Somebody said that it is not wanted."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all of them."""


class NewRollout(Struct, frozen=True, kw_only=True):
    """A rollout that is to be run."""

    task_id: Name
    input: Raw
    """What the agent is given: any JSON value, kept as it was written."""
    group_id: Name
    group_size: Count = 1
    mode: Mode = Mode.TRAIN
    rollout_id: Name | None = None
    """None: the queue makes one, and then a request that is sent twice enqueues twice. One that is known already is left as it is."""
    priority: Priority = 0
    """The largest goes first; among equals the oldest."""
    timeout_seconds: Seconds | None = None
    """That an agent may run; from the hand-out, where its worker does not say since when. None: runner.timeout_seconds of the server."""
    max_attempts: Count | None = None
    """None: runner.max_attempts of the server."""
    prompt: PromptVersion | None = None
    """What its attempts fetch under that name. None: what is published when they ask."""


class Enqueue(Struct, frozen=True, kw_only=True):
    """POST /v1/rollouts."""

    run_id: Name
    rollouts: list[NewRollout]


class Enqueued(Struct, frozen=True, kw_only=True):
    """Its answer, after they are durable."""

    rollout_ids: list[str]
    """Of all that were sent, in order."""
    known: int
    """How many of them were in the queue before."""


class Ask(Struct, frozen=True, kw_only=True):
    """POST /v1/leases."""

    run_id: Name
    """A worker serves one run: that run's agent."""
    worker: Name
    """Who asks; attempts are told by it."""
    count: Count = 1
    """At most so many."""
    wait_seconds: Annotated[float, Meta(ge=0, le=60)] = 0
    """While nothing is queued, wait so long for it."""
    lease_seconds: Seconds | None = None
    """That each lease holds unrenewed. None: runner.queue_lease_seconds of the server."""


class Lease(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The right, and the duty, to make one attempt of a rollout."""

    run_id: str
    rollout_id: str
    attempt: int
    last: bool
    """Whether no other attempt will come when this one fails."""
    task_id: str
    input: Raw
    mode: Mode
    group_id: str
    group_size: int
    priority: int
    timeout_seconds: float
    lease_seconds: float
    prompt: PromptVersion | None = None
    """As it was enqueued."""

    def task_input(self) -> Any:
        """What the agent is given."""
        return msgspec.json.decode(self.input)


class Leases(Struct, frozen=True, kw_only=True):
    """Its answer; also what is beaten, extended or given back."""

    leases: list[Lease]


class Held(Struct, frozen=True, kw_only=True):
    """An attempt, by its name."""

    rollout_id: Name
    attempt: Annotated[int, Meta(ge=0)]
    ran: Annotated[float, Meta(ge=0)] | None = None
    """In a heartbeat: how long its agent has run, so that nothing else counts. None: since the hand-out."""


class Beat(Struct, frozen=True, kw_only=True):
    """POST /v1/leases/heartbeat: the worker is alive, and holds these."""

    leases: list[Held]


class Extend(Struct, frozen=True, kw_only=True):
    """POST /v1/leases/extend: from now on, these hold for so long without a heartbeat."""

    leases: list[Held]
    seconds: Seconds


class Release(Struct, frozen=True, kw_only=True):
    """POST /v1/leases/release: given back, as if they had not been handed out; the attempt does not count."""

    leases: list[Held]
    detail: str = ""


class Completion(Struct, frozen=True, kw_only=True):
    """An attempt that succeeded."""

    rollout_id: Name
    attempt: Annotated[int, Meta(ge=0)]
    rewards: Rewards | None = None
    """Final rewards by name, or by name and role. None: the agent's spans hold them."""
    calls: Annotated[int, Meta(ge=0)] | None = None
    """Policy calls that the gateway answered. None: nobody counted."""
    seconds: Annotated[float, Meta(ge=0)] | None = None
    """That the agent ran, by its worker's clock. None: the worker does not say."""


class Complete(Struct, frozen=True, kw_only=True):
    """POST /v1/leases/complete."""

    completions: list[Completion]


class Failure(Struct, frozen=True, kw_only=True):
    """An attempt that failed."""

    rollout_id: Name
    attempt: Annotated[int, Meta(ge=0)]
    reason: AttemptFailure
    detail: str = ""
    """What happened, for people."""
    calls: Annotated[int, Meta(ge=0)] | None = None
    seconds: Annotated[float, Meta(ge=0)] | None = None
    retry: bool = True
    """False: no other attempt would do better; it is dead at once."""
    rewards: Rewards | None = None
    """By name, of a failure that the policy caused: the rollout has failed, counts, and is not tried again. None: it has none."""

    def __post_init__(self) -> None:
        """Refuse a reward of infrastructure.

        Raises:
            ValueError: the reason is none of the policy's.
        """
        if self.rewards is not None and self.reason not in POLICY_FAILURES:
            reasons = ", ".join(sorted(POLICY_FAILURES))
            raise ValueError(f"the policy did not cause {self.reason.value!r}: leave out its rewards. Only {reasons} have any")


class Fail(Struct, frozen=True, kw_only=True):
    """POST /v1/leases/fail."""

    failures: list[Failure]


class Result(Struct, frozen=True, kw_only=True):
    """What became of one attempt that was completed, failed, released, extended or beaten."""

    rollout_id: str
    attempt: int
    state: State | None
    """The rollout's, by this attempt: the same however often it is told. None: the queue has no such rollout."""
    refused: str | None = None
    """Why it counts for nothing, in a sentence. None: it was taken."""
    ended: AttemptFailure | None = None
    """Why the attempt was over before. None: it was not, or it had succeeded."""


class Results(Struct, frozen=True, kw_only=True):
    """Answers, in the order of what was asked; to a heartbeat and an extension, only the attempts that are over."""

    results: list[Result]


class Which(Struct, frozen=True, kw_only=True):
    """POST /v1/cancel and /v1/retry: rollouts by id, a group, or a whole run."""

    rollout_ids: list[Name] | None = None
    run_id: Name | None = None
    group_id: Name | None = None
    """Of that run. None: all its groups."""


class Cancelled(Struct, frozen=True, kw_only=True):
    """How many were cancelled."""

    queued: int
    running: int
    """Their workers learn it from their next heartbeat."""


class Retried(Struct, frozen=True, kw_only=True):
    """How many dead letters are queued again, each for as many attempts as a new rollout has."""

    queued: int


class Purge(Struct, frozen=True, kw_only=True):
    """POST /v1/purge: forget rollouts that have ended, and their attempts."""

    older_than_seconds: Annotated[float, Meta(ge=0)]
    """That they ended before."""
    run_id: Name | None = None
    """None: of all runs."""


class Purged(Struct, frozen=True, kw_only=True):
    """Its answer."""

    rollouts: int
    """That are forgotten."""
    more: bool
    """Whether others may be left that are as old: ask again."""


class Attempt(Struct, frozen=True, kw_only=True):
    """One attempt of a rollout."""

    attempt: int
    worker: str
    began_at: float
    """Seconds since 1970, by the server's clock: for people."""
    ended_at: float | None
    """None: it is under way."""
    reason: AttemptFailure | None
    """Why it failed. None: it is under way, or it succeeded."""
    detail: str
    rewards: Rewards | None
    calls: int | None
    seconds: float | None


class Rollout(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout, for people and for those who wait for its end."""

    run_id: str
    rollout_id: str
    task_id: str
    mode: Mode
    group_id: str
    group_size: int
    priority: int
    state: State
    attempts_left: int
    timeout_seconds: float
    worker: str | None
    """Who holds it. None: nobody."""
    cursor: int | None
    """Its place in the order in which the run's rollouts ended. None: it has not."""
    attempts: list[Attempt]
    """Oldest first; in lists only the last one."""
    prompt: PromptVersion | None = None
    """That its attempts are pinned to. None: to none."""


class Rollouts(Struct, frozen=True, kw_only=True):
    """GET /v1/rollouts and /v1/runs/{run}/ended."""

    rollouts: list[Rollout]
    cursor: int
    """What to ask `after` next."""


class Run(Struct, frozen=True, kw_only=True):
    """How many rollouts of a run stand how."""

    run_id: str
    states: dict[State, int]
    cursor: int
    """The newest place in the order in which its rollouts ended; 0: none has."""


class Runs(Struct, frozen=True, kw_only=True):
    """GET /v1/runs."""

    runs: list[Run]


class Wanted(Struct, frozen=True, kw_only=True):
    """PUT /v1/runs/{run}/demand: what a branch wants of the run."""

    policy: Name
    branch: Name
    groups: Annotated[int, Meta(ge=0, lt=2**53)]
    """Of mode train, in all, since the run's beginning."""
    oldest_version: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    """Whose calls the branch can still train. None: the branch does not say."""
    filled: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    """Of `groups`, those that are there: spent, or whole in the trainer's hands. As many as `groups`: no other one is waited for."""


class Demand(Struct, frozen=True, kw_only=True):
    """Its answer, and that of a GET."""

    groups: int
    """The most that any branch wants."""
    enqueued: int
    """Groups of mode train that were enqueued in the run, without those of which a rollout was cancelled."""
    cancelled: int
    """Those."""
    branches: list[Wanted]


class Refusal(Struct, frozen=True, kw_only=True):
    """Any answer that is not 200."""

    error: str
