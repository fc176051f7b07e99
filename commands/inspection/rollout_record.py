"""What is known of one rollout, as plain values: spans, calls, rewards, what builds made of them, what was trained.

In: nothing. Out: the types that `rollout_read` fills in, and that `rollout_tree` and `rollout_why` tell of. Invariant: facts as the store
holds them; a span or a call may be there as often as it was delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from spangrad import semconv


@dataclass(frozen=True, slots=True)
class Span:
    """A span of the rollout."""

    run: str
    mode: str
    attempt: int
    names_rollout: bool
    """False: it belongs here by its trace, session or conversation."""
    started: int
    """Nanoseconds, by the clock of its own host."""
    trace: str
    span: str
    parent: str
    process: str
    seq: int
    name: str
    service: str
    scope: str
    duration: int
    """Nanoseconds."""
    status: str
    message: str
    attributes: Mapping[str, str]
    kind: str = ""
    """gateway, agent, llm, tool, chain, ...: what a dialect takes it for; empty for nothing in particular."""
    agent: str = ""
    tool: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all others."""
        return self.trace, self.span

    @property
    def is_root(self) -> bool:
        """Whether it is the runner's span of an attempt."""
        return self.name == semconv.ROOT_SPAN_NAME and semconv.ROLLOUT_FINAL in self.attributes

    @property
    def is_final(self) -> bool:
        """Whether it is the root of the attempt that counts."""
        return self.is_root and self.attributes[semconv.ROLLOUT_FINAL] == "true"

    @property
    def counted_by(self) -> str:
        """Who numbers it: its process, else its service's clock."""
        return self.process or f"~{self.service}"

    @property
    def place(self) -> int:
        """Among the spans of the same `counted_by`. Who does not count has a clock of its own, which '~' tells (schema 0002)."""
        return self.seq if self.process and not self.process.startswith("~") else self.started


@dataclass(frozen=True, slots=True)
class Call:
    """A choice of a call that the gateway recorded."""

    trace: str
    span: str
    choice: int
    policy: str
    versions: Sequence[int]
    """Policy versions that sampled it, in order; empty: not known."""
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    error: str
    http_status: int
    aborted: bool


@dataclass(frozen=True, slots=True)
class Reward:
    """An evaluation result, or a reward that the builder gave."""

    trace: str
    span: str
    name: str
    value: str
    source: str
    role: str = ""
    """Empty: everybody's."""

    @property
    def title(self) -> str:
        """Its name, with the role that it is of."""
        return titled(self.name, self.role)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What one build made of one call: a transition, or a drop."""

    attempt: int
    trace: str
    span: str
    """Empty: the drop of a rollout that has no calls."""
    choice: int
    agent: str
    policy: str
    version: int | None = None
    """That sampled a transition's response."""
    turn: int | None = None
    """Of a transition."""
    rewards: Sequence[tuple[str, float, str, str]] = ()
    """A transition's: name, value, source and role (empty: everybody's)."""
    reason: str = ""
    """Of a drop; empty for a transition."""
    detail: str = ""
    convention: str = ""
    """Of a dropped call's span."""


@dataclass(frozen=True, slots=True)
class Build:
    """What one build specification made of the rollout, newest revision."""

    spec: str
    conclusions: Sequence[Conclusion]
    dataset: str = ""
    """NAME@REVISION, several joined by `, `; empty where no dataset has the specification."""
    run: str = ""
    revision: int = 0
    attempt: int = 0
    """That counts."""
    calls: int = 0
    """As the build counted them."""
    built_at: datetime | None = None
    group: str = ""
    group_size: int = 0
    group_built: int = 0
    """Rollouts of the group that this specification has built."""
    skipped: Sequence[tuple[str, str, str, str]] = ()
    """Policy, branch, reason and detail of each trainer at hand that skipped the group."""

    @property
    def title(self) -> str:
        """Its dataset, else its specification."""
        return self.dataset or self.spec

    @property
    def transitions(self) -> int:
        """How many calls became transitions."""
        return sum(not one.reason for one in self.conclusions)

    @property
    def drops(self) -> Counter[tuple[str, str]]:
        """Drops by reason and detail."""
        return Counter((one.reason, one.detail) for one in self.conclusions if one.reason)


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch that the rollout was in."""

    run: str
    spec: str
    policy: str
    branch: str
    version: int
    """That the batch made."""
    batch: str
    revision: int
    """Of the rollout, at which it was trained."""
    status: str
    """Of the version: committed or orphaned."""


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that is known of one rollout."""

    rollout: str
    spans: Sequence[Span]
    calls: Sequence[Call]
    rewards: Sequence[Reward]
    builds: Sequence[Build]
    trained: Sequence[Trained] = ()
    newest: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """The newest committed version of each policy and branch."""
    last_arrival: datetime | None = None
    """Of a span of it, by the store's clock."""
    now: datetime | None = None
    """The store's clock."""
    ledger_silent: str = ""
    """Why the trainers' ledger could not be asked what they have skipped; empty: it was asked, or there is none here."""
    roles_by_run: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Roles of the rewards that were built of each of its runs, in order."""

    @property
    def roles(self) -> list[str]:
        """Roles of the rewards of its runs, those that are not built yet among them."""
        built = {role for roles in self.roles_by_run.values() for role in roles}
        return sorted(built | {reward.role for reward in self.rewards} - {""})

    def of_run(self, run: str) -> Record:
        """The same of one run alone, with the spans that name none."""
        spans = [span for span in self.spans if span.run in {run, ""}]
        kept = {span.key for span in spans}
        return Record(
            self.rollout,
            spans,
            [call for call in self.calls if (call.trace, call.span) in kept],
            [reward for reward in self.rewards if (reward.trace, reward.span) in kept],
            [build for build in self.builds if build.run in {run, ""}],
            [one for one in self.trained if one.run == run],
            self.newest,
            self.last_arrival,
            self.now,
            self.ledger_silent,
            {name: roles for name, roles in self.roles_by_run.items() if name == run},
        )


def titled(name: str, role: str) -> str:
    """Return a reward's name, with the role that it is of."""
    return f"{name} of {role}" if role else name


def counted(count: int, thing: str) -> str:
    """A number of things, in words that agree."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def attempts(spans: Sequence[Span]) -> dict[tuple[str, str], int]:
    """The attempt of each span; one that does not name the rollout has its trace's."""
    named = {span.trace: span.attempt for span in spans if span.names_rollout}
    return {span.key: span.attempt if span.names_rollout else named.get(span.trace, 0) for span in spans}
