"""HTTP messages between the queue's server and its clients: JSON objects.

In, out: frozen structs. Invariant: an unknown field is refused, and so is a value without a meaning.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw

from spangrad.agent.reward_values import Rewards
from spangrad.http.announcements import NO_LIMITS, OWN_SAMPLING, CallLimits, SamplingParameters
from spangrad.http.queue_messages import Count, Name, NewRollout, Seconds, Struct
from spangrad.types import POLICY_FAILURES, AttemptFailure, Mode, PromptVersion, SandboxRung

CallCount = Annotated[int, Meta(ge=0, lt=2**31)]
"""Number of policy calls, which PostgreSQL keeps in 32 bits: a larger one would fail the transaction of all requests that share it."""
LeaseKey = tuple[str, int]
"""Rollout id and number of an attempt that is or was leased."""
LIST_MOST = 1000
"""Largest number of rollouts in one response."""


class RolloutState(StrEnum):
    """State of a rollout."""

    QUEUED = "queued"
    """Waiting to be handed out, for the first time or again."""
    RUNNING = "running"
    """Leased to a worker."""
    SUCCEEDED = "succeeded"
    """An attempt succeeded."""
    FAILED = "failed"
    """An attempt failed because of the policy, and has a reward for it: the rollout counts, and is not tried again."""
    DEAD = "dead"
    """Each of its attempts failed: a dead letter, until a user queues it again."""
    CANCELLED = "cancelled"
    """Cancelled by a request."""


class Enqueue(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/rollouts."""

    run_id: Name
    rollouts: list[NewRollout]
    after_groups: Annotated[int, Meta(ge=0)] | None = None
    """Number of groups of mode train, cancelled ones included, that the run must have for new rollouts to be added. None: any."""


class Enqueued(Struct, frozen=True, kw_only=True):
    """Response to POST /v1/rollouts, once the rollouts are durable."""

    rollout_ids: list[str]
    """Ids of all rollouts of the request, in order; none if the run has another number of groups than `after_groups`."""
    known: int
    """Number of them that were in the queue before."""


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/leases."""

    run_id: Name
    """Run to lease from; a worker serves one run, with that run's agent."""
    worker: Name
    """Name of the worker; recorded with its attempts."""
    count: Count = 1
    """Largest number of leases."""
    wait_seconds: Annotated[float, Meta(ge=0, le=60)] = 0
    """Longest wait for a rollout while none is queued, in seconds."""
    lease_seconds: Seconds | None = None
    """Time for which each lease holds without renewal, in seconds. None: queue.lease_seconds of the server."""


class AttemptReference(Struct, frozen=True, kw_only=True):
    """Base class of the messages about one attempt."""

    rollout_id: Name
    attempt: Annotated[int, Meta(ge=0)]

    @property
    def key(self) -> LeaseKey:
        """Rollout id and number of the attempt."""
        return self.rollout_id, self.attempt


class RolloutLease(AttemptReference, frozen=True, kw_only=True, omit_defaults=True):
    """Permission for one attempt of a rollout; its holder must report how the attempt ended."""

    run_id: str
    last: bool
    """True if no other attempt follows when this one fails."""
    task_id: str
    input: Raw
    mode: Mode
    group_id: str
    group_size: int
    priority: int
    timeout_seconds: float
    lease_seconds: float
    prompt: PromptVersion | None = None
    """Prompt version of the enqueued rollout."""
    least_sandbox: SandboxRung | None = None
    """Weakest kind of sandbox that the attempt may run in."""
    sampling: SamplingParameters = OWN_SAMPLING
    limits: CallLimits = NO_LIMITS
    data_source: str = ""
    image: str = ""

    def task_input(self) -> Any:
        """Return the input of the agent."""
        return msgspec.json.decode(self.input)


class Leases(Struct, frozen=True, kw_only=True):
    """Response to POST /v1/leases."""

    leases: list[RolloutLease]


class Held(AttemptReference, frozen=True, kw_only=True):
    """Reference to a leased attempt."""

    ran: Annotated[float, Meta(ge=0)] | None = None
    """Heartbeats only: time that the agent has run, in seconds; only this counts as run time. None: the time since the hand-out counts."""


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/leases/heartbeat: the worker is alive, and holds these leases."""

    leases: list[Held]


class StopsRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/leases/stopped: which of the worker's attempts has the queue ended?"""

    worker: Name
    after: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Value of `cursor` of the response before."""
    wait_seconds: Annotated[float, Meta(ge=0, le=60)] = 0
    """Longest wait for the next one, in seconds."""


class Extend(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/leases/extend: from now on, these leases hold for so many seconds without a heartbeat."""

    leases: list[Held]
    seconds: Seconds


class LeaseRelease(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/leases/release: the leases are returned as if they had not been handed out; the attempts do not count."""

    leases: list[Held]
    detail: str = ""


class AttemptReport(AttemptReference, frozen=True, kw_only=True):
    """Report that an attempt ended."""

    rewards: Rewards | None = None
    """Final rewards by name, or by name and role. None: the agent's spans hold them, or it failed and has none."""
    calls: CallCount | None = None
    """Policy calls that the gateway answered. None: they were not counted."""
    seconds: Annotated[float, Meta(ge=0)] | None = None
    """Time that the agent ran, in seconds, by its worker's clock. None: unknown."""


class Completion(AttemptReport, frozen=True, kw_only=True):
    """Report that an attempt succeeded."""

    reason: ClassVar[None] = None
    detail: ClassVar[str] = ""
    retry: ClassVar[bool] = False


class Complete(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/leases/complete."""

    completions: list[Completion]


class Failure(AttemptReport, frozen=True, kw_only=True):
    """Report that an attempt failed; with rewards, for a failure that the policy caused, the rollout counts, and is not tried again."""

    reason: AttemptFailure
    detail: str = ""
    """Explanation for people."""
    retry: bool = True
    """False: another attempt would fail as well; the rollout is dead at once."""

    def __post_init__(self) -> None:
        """Raise ValueError where there are rewards for a failure that the policy did not cause."""
        if self.rewards is not None and self.reason not in POLICY_FAILURES:
            reasons = ", ".join(sorted(POLICY_FAILURES))
            raise ValueError(f"the policy did not cause {self.reason.value!r}: leave out its rewards. Only {reasons} have any")


Ending = Completion | Failure
"""The end of an attempt, as its worker or the queue reports it."""


class Fail(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/leases/fail."""

    failures: list[Failure]


class AttemptReceipt(AttemptReference, frozen=True, kw_only=True):
    """Result of a request for one attempt: complete, fail, release, extend or heartbeat."""

    state: RolloutState | None
    """State of the rollout after this attempt ended; the same however often it is reported. None: the queue has no such rollout."""
    refused: str | None = None
    """Sentence that says why the report does not count. None: it was accepted."""
    ended: AttemptFailure | None = None
    """Failure with which the attempt had ended before. None: it had not ended, or it had succeeded."""


class AttemptReceipts(Struct, frozen=True, kw_only=True):
    """Response: results in the order of the request; to a heartbeat and an extension, only for attempts that have ended."""

    results: list[AttemptReceipt]


class Stops(Struct, frozen=True, kw_only=True):
    """Response to POST /v1/leases/stopped."""

    results: list[AttemptReceipt]
    """Attempts that a cancellation, an expired lease or a time limit has ended, in order."""
    cursor: int
    """Value of `after` for the next request."""


class ClosedEndings(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/endings/closed, and response: of a run's endings up to `cursor`, lost attempts have root spans in the store."""

    run_id: Name
    cursor: Annotated[int, Meta(ge=0, lt=2**62)] = 0


class RolloutSelector(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/cancel and /v1/retry: rollouts by id, a group, or a whole run."""

    rollout_ids: list[Name] | None = None
    run_id: Name | None = None
    group_id: Name | None = None
    """Group of that run. None: all its groups."""


class Cancelled(Struct, frozen=True, kw_only=True):
    """Response to POST /v1/cancel: number of cancelled rollouts, by their previous state."""

    queued: int
    running: int
    """Number of running ones; their workers learn of it at once where they wait for it, else by their next heartbeat."""


class Retried(Struct, frozen=True, kw_only=True):
    """Response to POST /v1/retry: number of dead letters that are queued again, each for as many attempts as a new rollout has."""

    queued: int


class Purge(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/purge: delete rollouts that have ended, and their attempts."""

    older_than_seconds: Annotated[float, Meta(ge=0)]
    """Smallest age to delete, in seconds since the rollout ended."""
    run_id: Name | None = None
    """Run of the rollouts. None: all runs."""


class Purged(Struct, frozen=True, kw_only=True):
    """Response to POST /v1/purge."""

    rollouts: int
    """Number of deleted rollouts."""
    more: bool
    """True if more rollouts of that age may be left: send the request again."""


class AttemptRecord(Struct, frozen=True, kw_only=True):
    """One attempt of a rollout."""

    attempt: int
    worker: str
    began_at: float
    """Seconds since 1970, by the server's clock: for people."""
    ended_at: float | None
    """Seconds since 1970, by the server's clock. None: it is running."""
    reason: AttemptFailure | None
    """Failure of the attempt. None: it is running, or it succeeded."""
    detail: str
    rewards: Rewards | None
    calls: int | None
    seconds: float | None


class QueuedRollout(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout, for people and for clients that wait for its end."""

    run_id: str
    rollout_id: str
    task_id: str
    mode: Mode
    group_id: str
    group_size: int
    priority: int
    state: RolloutState
    attempts_left: int
    timeout_seconds: float
    worker: str | None
    """Worker that holds its lease. None: no worker does."""
    cursor: int | None
    """Position in the order in which the run's rollouts ended. None: it has not ended."""
    attempts: list[AttemptRecord]
    """Oldest first; in lists only the last one."""
    prompt: PromptVersion | None = None
    """Prompt version that its attempts are pinned to. None: they are not pinned."""
    data_source: str = ""
    """Source of its task. Empty: none is named."""


class Rollouts(Struct, frozen=True, kw_only=True):
    """Response to GET /v1/rollouts and /v1/runs/{run}/ended."""

    rollouts: list[QueuedRollout]
    cursor: int
    """Value of `after` for the next page."""


class RunCounts(Struct, frozen=True, kw_only=True):
    """Number of a run's rollouts, by state."""

    run_id: str
    states: dict[RolloutState, int]
    cursor: int
    """Newest position in the order in which its rollouts ended; 0: none has ended."""


class Runs(Struct, frozen=True, kw_only=True):
    """Response to GET /v1/runs."""

    runs: list[RunCounts]
