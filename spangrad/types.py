"""The nouns of the story, as frozen types: what flows between the stages when it is not a table.

In: rows of the span store. Out: values that stages hand to each other. Invariant: facts only; anything
that can be derived (returns, advantages, staleness) is a property or a pure function elsewhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """What a rollout is for."""

    TRAIN = "train"
    """May be trained on."""
    VALIDATE = "validate"
    """Held out: measured, never trained."""
    PROBE = "probe"
    """Checks a server or a canary: never trained."""
    PRODUCTION = "production"
    """A service's own traffic: trained only when the trainer is told to."""


class DropReason(StrEnum):
    """Why a policy call, or a whole rollout, is not a transition."""

    NO_CALLS = "no_calls"
    """The rollout ended without one policy call."""
    INCOMPLETE = "incomplete"
    """Fewer calls arrived in time than the gateway had answered."""
    NO_REWARD = "no_reward"
    """The rollout ended without a reward. Never read as 0."""
    ATTEMPT_FAILED = "attempt_failed"
    """The agent crashed, hung or gave something invalid, and no attempt was left."""
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    """A later attempt of the same rollout counts instead."""
    NO_TOKEN_IDS = "no_token_ids"
    """Neither the gateway nor the agent's span holds the engine's token ids."""
    RETOKENIZED = "retokenized"
    """Its ids were made from its text, and are not those that were sampled."""
    NO_LOGPROBS = "no_logprobs"
    """The ids are there, their logprobs are not, or not as many."""
    EMPTY_RESPONSE = "empty_response"
    """The engine sampled nothing."""
    CALL_FAILED = "call_failed"
    """The engine or the gateway answered with an error."""
    ABORTED = "aborted"
    """The client left before the answer was whole."""
    REDACTED = "redacted"
    """Ids were withheld because they would spell redacted text."""
    OTHER_TOKENIZER = "other_tokenizer"
    """Sampled with another tokenizer or chat template than the policy's."""
    MIXED_VERSIONS = "mixed_versions"
    """A reload fell inside the call, so two policies wrote it."""
    UNKNOWN_VERSION = "unknown_version"
    """The engine did not say which weights answered."""
    OTHER_DISTRIBUTION = "other_distribution"
    """Sampled from a distribution that the trainer cannot compute again: top-p, top-k, min-p, penalties, masked tokens."""
    NOT_SELECTED = "not_selected"
    """The build's selection leaves this agent, model or policy out."""


class AttemptFailure(StrEnum):
    """Why an attempt of a rollout gave no reward: `spangrad.rollout.failure` on its root span."""

    CRASH = "crash"
    """The process that ran the agent died."""
    TIMEOUT = "timeout"
    """The agent was not done in time."""
    EXCEPTION = "exception"
    """The agent raised."""
    EXIT_CODE = "exit_code"
    """The agent's command ended with an exit code other than 0."""
    INVALID_OUTPUT = "invalid_output"
    """What should be rewards are not finite numbers."""
    NO_REWARD = "no_reward"
    """The agent ended well, and nothing said what that is worth."""
    EVALUATION = "evaluation"
    """The evaluator raised."""
    UNCOUNTED = "uncounted"
    """The gateway was restarted meanwhile and cannot say how many calls it answered, so some may be missing."""
    UNFLUSHED = "unflushed"
    """Its spans could not be sent in time, so rewards on them may be missing."""
    CANCELLED = "cancelled"
    """The runner was stopped, or lost the gateway."""


class RewardSource(StrEnum):
    """Who says so, in order of precedence: the first source that names a reward wins."""

    RUNNER = "runner"
    EVALUATION_EVENT = "evaluation_event"
    EVALUATION_LOG = "evaluation_log"
    SPAN_ATTRIBUTE = "span_attribute"
    SQL = "sql"
    AIR = "air"


class VersionStatus(StrEnum):
    """What became of a policy version."""

    COMMITTED = "committed"
    """Durable, with its batch; it may be published."""
    ORPHANED = "orphaned"
    """Its number was taken, but the trainer stopped before the commit."""


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """One attempt of one rollout in one run."""

    run_id: str
    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Task:
    """One question put to an agent."""

    task_id: str
    input: object
    """What the agent is given: any JSON value."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of an agent on a task, asked for by the runner."""

    key: RolloutKey
    task: Task
    mode: Mode
    group_id: str
    group_size: int
    """How many rollouts share the group's baseline."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Weights that were trained, or that training began with."""

    policy: str
    version: int
    parent: int | None
    """None for the weights that training began with."""
    batch_id: str | None
    """None for the weights that training began with."""
    checksum: str
    """Multiset checksum of the parameters; see docs/architecture.md."""
    path: str


def call_id(trace_id: str, span_id: str, choice: int) -> str:
    """Name a choice of a call: the first 16 bytes of SHA-256 over `trace:span:choice`, in hex (as the schema's views do)."""
    return hashlib.sha256(f"{trace_id}:{span_id}:{choice}".encode()).hexdigest()[:32]


def transition_id(call: str, build_spec: str, revision: int) -> str:
    """Name a transition: the first 16 bytes of SHA-256 over `call:specification:revision`, in hex."""
    return hashlib.sha256(f"{call}:{build_spec}:{revision}".encode()).hexdigest()[:32]
