"""Data of one rollout, as plain values: spans, calls, rewards, builds and trained batches.

In: nothing. Out: the types that `reader` fills in, that `tree` orders and that `why` explains. Invariant: values are as the store holds
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from spangrad import semconv

UNKNOWN_MODEL_CALL = "unknown model call"
"""Kind of a request to a model server in a trace without a call that a dialect reads."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of the rollout."""

    run: str
    mode: str
    attempt: int
    """Number of the attempt that the span belongs to, by its own name or by its trace; 0 if its trace names none."""
    names_rollout: bool
    """True if the span carries the rollout's id. False: it belongs to the rollout by its trace, session or conversation."""
    started: int
    """Start time in nanoseconds since the Unix epoch, by the clock of the span's host."""
    trace: str
    span: str
    parent: str
    process: str
    seq: int
    name: str
    service: str
    scope: str
    duration: int
    """Duration in nanoseconds."""
    status: str
    message: str
    attributes: Mapping[str, str]
    kind: str = ""
    """Kind that a dialect recognises: gateway, agent, llm, tool, chain, ..., UNKNOWN_MODEL_CALL; empty if none does."""
    agent: str = ""
    tool: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Trace id and span id, which identify the span."""
        return self.trace, self.span

    @property
    def is_root(self) -> bool:
        """True for the root span of an attempt, which the runner sends."""
        return self.name == semconv.ROOT_SPAN_NAME and semconv.ROLLOUT_FINAL in self.attributes

    @property
    def is_final(self) -> bool:
        """True for the root span of the rollout's final attempt."""
        return self.is_root and self.attributes[semconv.ROLLOUT_FINAL] == "true"

    @property
    def counted_by(self) -> str:
        """The process that numbers the span, or `~SERVICE` if its spans are ordered by the service's clock."""
        return self.process or f"~{self.service}"

    @property
    def place(self) -> int:
        """Position among the spans of the same `counted_by`: the sequence number, or the start time where processes do not number spans.

        A process id that begins with `~` marks spans without sequence numbers (schema 0002).
        """
        return self.seq if self.process and not self.process.startswith("~") else self.started


@dataclass(frozen=True, slots=True)
class Call:
    """One choice of a model call that the gateway recorded."""

    trace: str
    span: str
    choice: int
    policy: str
    versions: Sequence[int]
    """Policy versions that sampled the response, in order; empty if not known."""
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    error: str
    http_status: int
    aborted: bool

    @property
    def failed(self) -> bool:
        """True if the call was answered with an error, or not at all."""
        return bool(self.error) or self.http_status >= 400


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward: an evaluation result that arrived with the spans, or one that the builder gave."""

    trace: str
    span: str
    name: str
    value: str
    source: str
    role: str = ""
    """Role that the reward belongs to; empty if it belongs to all roles."""

    @property
    def title(self) -> str:
        """The reward's name, with its role."""
        return titled(self.name, self.role)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Result of one build for one call: a transition, or a drop."""

    attempt: int
    trace: str
    span: str
    """Id of the call's span; empty for the drop of a rollout that has no calls."""
    choice: int
    agent: str
    policy: str
    version: int | None = None
    """Policy version that sampled a transition's response."""
    turn: int | None = None
    """Turn of a transition within the rollout; None for a drop."""
    rewards: Sequence[tuple[str, float, str, str]] = ()
    """Rewards of a transition: name, value, source and role (empty if it belongs to all roles)."""
    reason: str = ""
    """Drop reason; empty for a transition."""
    detail: str = ""
    convention: str = ""
    """Semantic convention of a dropped call's span."""


@dataclass(frozen=True, slots=True)
class Build:
    """Newest revision of the rollout that one build specification built."""

    spec: str
    run: str = ""
    mode: str = ""
    group: str = ""
    group_size: int = 0
    revision: int = 0
    attempt: int = 0
    """Number of the attempt whose transitions count."""
    calls: int = 0
    """Number of calls that the build counted."""
    id: int = 0
    built_at: datetime | None = None
    conclusions: Sequence[Conclusion] = ()
    dataset: str = ""
    """Datasets of the specification, as NAME@REVISION joined by `, `; empty if it has none."""
    group_built: int = 0
    """Number of rollouts of the group that this specification has built; 0 if the rollout has no group."""
    skipped: Sequence[tuple[str, str, str, str]] = ()
    """Policy, branch, reason and detail of each trainer that skipped the group, as far as the ledger could be read."""

    @property
    def title(self) -> str:
        """The build's dataset, or its specification if it has no dataset."""
        return self.dataset or self.spec

    @property
    def transitions(self) -> int:
        """Number of transitions."""
        return sum(not conclusion.reason for conclusion in self.conclusions)

    @property
    def drops(self) -> Counter[tuple[str, str]]:
        """Number of drops by reason and detail."""
        return Counter((drop.reason, drop.detail) for drop in self.conclusions if drop.reason)


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A training batch that contained the rollout."""

    run: str
    spec: str
    policy: str
    branch: str
    version: int
    """Policy version that was trained on the batch."""
    batch: str
    revision: int
    """Revision of the rollout that was trained."""
    status: str
    """Status of the version: committed or orphaned."""


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that the store and the ledger hold of one rollout."""

    rollout: str
    spans: Sequence[Span]
    calls: Sequence[Call]
    rewards: Sequence[Reward]
    builds: Sequence[Build]
    trained: Sequence[TrainedBatch] = ()
    committed: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict[tuple[str, str], Sequence[int]])
    """Numbers of the committed versions of each policy and branch, in order; those of orphaned versions are missing among them."""
    last_arrival: datetime | None = None
    """Time at which the newest span or evaluation of the rollout arrived, by the store's clock."""
    now: datetime | None = None
    """Time of the read, by the store's clock."""
    ledger_silent: str = ""
    """Reason why skipped groups could not be read from the trainers' ledger; empty if they were read, or if there is no ledger."""
    roles_by_run: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Roles of the built rewards of each of the rollout's runs, sorted."""

    @property
    def roles(self) -> list[str]:
        """Roles of the rewards of the rollout's runs, sorted; those of rewards that are not built yet included."""
        built = {role for roles in self.roles_by_run.values() for role in roles}
        return sorted(built | {reward.role for reward in self.rewards} - {""})

    def of_run(self, run: str) -> Record:
        """Return the part of the record that belongs to one run, with the spans that name no run."""
        spans = [span for span in self.spans if span.run in {run, ""}]
        kept = {span.key for span in spans}
        return replace(
            self,
            spans=spans,
            calls=[call for call in self.calls if (call.trace, call.span) in kept],
            rewards=[reward for reward in self.rewards if (reward.trace, reward.span) in kept],
            builds=[build for build in self.builds if build.run in {run, ""}],
            trained=[batch for batch in self.trained if batch.run == run],
            roles_by_run={name: roles for name, roles in self.roles_by_run.items() if name == run},
        )


def titled(name: str, role: str) -> str:
    """Return a reward's name, followed by its role if it has one."""
    return f"{name} of {role}" if role else name


def counted(count: int, thing: str) -> str:
    """Return a count and its noun, in the plural unless the count is 1."""
    return f"{count} {thing}{'' if count == 1 else 's'}"
