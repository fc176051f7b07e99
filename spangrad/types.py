"""The nouns of the story, as frozen types: what flows between the stages when it is not a table.

In: rows of the span store. Out: values that stages hand to each other. Invariant: facts only; anything
that can be derived (returns, advantages, staleness) is a property or a pure function elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
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
    GREEDY = "greedy"
    """At temperature 0, for its group to be compared with (ReMax): never trained."""
    TRIAL = "trial"
    """Tries a candidate of a prompt: measured, never trained."""
    PRODUCTION = "production"
    """A service's own traffic: trained only when the trainer is told to."""


HELD_OUT_MODES = frozenset({Mode.VALIDATE, Mode.PROBE, Mode.GREEDY, Mode.TRIAL})
"""Modes of rollouts that are measured and never trained."""


class DropReason(StrEnum):
    """Why a policy call, or a whole rollout, is not a transition."""

    NO_CALLS = "no_calls"
    """The rollout ended without one policy call."""
    INCOMPLETE = "incomplete"
    """Fewer calls arrived in time than the gateway had answered."""
    NO_REWARD = "no_reward"
    """The rollout ended without a reward. Never read as 0."""
    ATTEMPT_FAILED = "attempt_failed"
    """The attempt failed by no doing of the policy (a crash, a lost worker), and no attempt was left; or its failure has no reward."""
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    """A later attempt of the same rollout counts instead."""
    SHARED_TRACE = "shared_trace"
    """Its own span names no rollout, and its trace names several attempts."""
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
    """The engine took new weights during the call, so that several policy versions sampled it, and builder.mixed_versions says drop."""
    UNKNOWN_VERSION = "unknown_version"
    """The engine did not say which weights sampled which tokens."""
    UNKNOWN_SAMPLING = "unknown_sampling"
    """The engine did not say with which sampling parameters it answered."""
    OTHER_DISTRIBUTION = "other_distribution"
    """Sampled from a distribution that the trainer cannot compute again: top-p, top-k, min-p, penalties, masked tokens."""
    OTHER_MODALITY = "other_modality"
    """Its prompt or answer holds images, audio, video or files: placeholders stand for them among the token ids."""
    NOT_SELECTED = "not_selected"
    """The build's selection leaves this agent, model, policy, tool or component out."""
    RETRIED = "retried"
    """The client asked again; only the answer that the agent used counts."""
    DUPLICATE = "duplicate"
    """Another span tells of the same answer, and counts."""
    UNFINISHED = "unfinished"
    """Its span says neither that the call ended nor what came of it."""
    ATTRIBUTES_DROPPED = "attributes_dropped"
    """The sender kept back attributes of the call's span, the answer among them."""
    UNKNOWN_CONVENTION = "unknown_convention"
    """Something called a model, in a convention that no dialect reads."""
    OVER_LENGTH = "over_length"
    """Prompt and response are longer than builder.max_tokens."""

    @property
    def remedy(self) -> str:
        """What to do about it, or why nothing need be done: one sentence."""
        return _REMEDIES[self]


_REMEDIES: Mapping[DropReason, str] = {
    DropReason.NO_CALLS: "Let the agent call the policy through the gateway, or through an instrumented client.",
    DropReason.INCOMPLETE: "Find the spans that did not arrive (the exporter's log, the gateway's spill), "
    "or raise builder.incomplete_after_seconds: those that come late make a new revision.",
    DropReason.NO_REWARD: "Give one: an event gen_ai.evaluation.result with a finite score, or a query of builder.sql_rewards; "
    "rules of builder.rules are enough only with builder.rewards_from = 'rules'.",
    DropReason.ATTEMPT_FAILED: "Fix what the attempt failed of (its root span names it), or allow more attempts.",
    DropReason.SUPERSEDED_ATTEMPT: "Nothing need be done: the attempt that counts was built in its place.",
    DropReason.SHARED_TRACE: "Let whoever asks say for which rollout: under /rollout/ID/attempt/N/v1, or with baggage; "
    "or give each attempt a trace of its own.",
    DropReason.NO_TOKEN_IDS: "Send the agent's calls through the gateway, or serve them from `spangrad engine`, "
    "whose answers carry the ids: without them they can be exported for SFT only.",
    DropReason.RETOKENIZED: "Serve the policy from an engine that returns token ids, or accept ids made from its text: "
    "builder.retokenized.",
    DropReason.NO_LOGPROBS: "Have the engine return a logprob for each sampled token: the gateway and `spangrad engine` ask for them.",
    DropReason.EMPTY_RESPONSE: "Look at the prompt and the stop words: an answer of no tokens holds nothing to learn from.",
    DropReason.CALL_FAILED: "Mend what the error says: a call without an answer is no action.",
    DropReason.ABORTED: "Give the agent a longer timeout, or let it read its streams to the end.",
    DropReason.REDACTED: "Redact less, or keep the ids of redacted calls with gateway.redact_keep_ids.",
    DropReason.OTHER_TOKENIZER: "Serve the policy with the tokenizer and chat template that it is trained with, "
    "or mend builder.tokenizer_hash.",
    DropReason.MIXED_VERSIONS: "Set builder.mixed_versions = keep: each token is then trained as sampled by its own version.",
    DropReason.UNKNOWN_VERSION: "Serve the policy from `spangrad engine`, which says with each answer which weights gave it.",
    DropReason.UNKNOWN_SAMPLING: "Serve the policy from `spangrad engine` of this version, which says with each answer how it was sampled, "
    "and let the span keep the whole answer.",
    DropReason.OTHER_DISTRIBUTION: "Let gateway.relax take out what the detail names, let the agent sample with a temperature alone "
    "(no top_p, top_k, min_p or penalties, no forced tools or schemas), or accept a bias with builder.reshaped = 'keep'.",
    DropReason.OTHER_MODALITY: "Give the policy text alone, such as an image's description: "
    "the trainer has no pixels or sound to compute with.",
    DropReason.NOT_SELECTED: "Nothing need be done, unless a pattern of builder.selection is narrower than was meant.",
    DropReason.RETRIED: "Nothing need be done: the answer that the agent used was built in its place.",
    DropReason.DUPLICATE: "Nothing need be done: the span that counts was built in its place.",
    DropReason.UNFINISHED: "Let the agent read its streams to the end and end its spans, and flush them before its process exits.",
    DropReason.ATTRIBUTES_DROPPED: "Raise the agent's OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT "
    "(and OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT where it is set): long conversations need more than 128 attributes a span.",
    DropReason.UNKNOWN_CONVENTION: "Use an instrumentation that docs/conventions.md lists, or send the calls through the gateway.",
    DropReason.OVER_LENGTH: "Raise builder.max_tokens, or shorten the agent's prompts.",
}


class AttemptFailure(StrEnum):
    """Why an attempt of a rollout failed: `spangrad.rollout.failure` on its root span.

    Those of `POLICY_FAILURES` are the policy's doing and have a reward (`runner.failure_rewards`); the others are infrastructure's, and
    the rollout is tried again.
    """

    CRASH = "crash"
    """The process that ran the agent died."""
    TIMEOUT = "timeout"
    """The agent was not done in time."""
    EXCEPTION = "exception"
    """The agent raised."""
    EXIT_CODE = "exit_code"
    """The agent's command ended with an exit code other than 0."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The agent raised, or its command failed, because its last prompt was longer than the model's context."""
    MAX_TURNS = "max_turns"
    """The agent used up the turns that it, or its framework, allows."""
    INVALID_OUTPUT = "invalid_output"
    """What the agent gave as rewards are not finite numbers, or its output cannot be read."""
    NO_REWARD = "no_reward"
    """The agent ended well, and nothing said what that is worth."""
    EVALUATION = "evaluation"
    """The evaluator raised, was not done in time, or gave no finite numbers; or the reward service gave no answer that can be read."""
    ENVIRONMENT = "environment"
    """The environment could not be made ready in time, was lost under the agent, or could not be closed."""
    UNCOUNTED = "uncounted"
    """The gateway was restarted meanwhile and cannot say how many calls it answered, so some may be missing."""
    UNFLUSHED = "unflushed"
    """Its spans could not be sent in time, so rewards on them may be missing."""
    CANCELLED = "cancelled"
    """The runner was stopped or lost the gateway, or the rollout was not wanted any more."""
    LOST = "lost"
    """Nothing was heard of its worker for longer than its lease holds, or its worker did not end it when its time was over."""
    RELEASED = "released"
    """Its worker gave it back; it does not count as one of the rollout's attempts."""


POLICY_FAILURES = frozenset(
    {
        AttemptFailure.TIMEOUT,
        AttemptFailure.EXCEPTION,
        AttemptFailure.EXIT_CODE,
        AttemptFailure.CONTEXT_OVERFLOW,
        AttemptFailure.INVALID_OUTPUT,
        AttemptFailure.MAX_TURNS,
    }
)
"""Failures that the policy caused: they may have a reward (`runner.failure_rewards`), and then count."""


class Stage(StrEnum):
    """What an attempt goes through, each part with places of its own."""

    INIT = "init"
    """Its environment is made, or leased."""
    RUN = "run"
    """Its agent runs."""
    EVALUATE = "evaluate"
    """Its output is judged."""


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
class PromptVersion:
    """A version of a prompt that agents fetch."""

    name: str
    version: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question put to an agent."""

    task_id: str
    input: object
    """What the agent is given: any JSON value."""
    prompt: PromptVersion | None = None
    """What every attempt at it fetches under that name. None: what is published when the attempt asks first."""


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
    return transition_ids([call], build_spec, revision)[0]


def transition_ids(calls: Iterable[str], build_spec: str, revision: int) -> list[str]:
    """Name the transitions of many calls."""
    after, sha256 = f":{build_spec}:{revision}".encode(), hashlib.sha256
    return [sha256(call.encode() + after).hexdigest()[:32] for call in calls]
