"""Domain types, frozen: the values that stages hand to each other when they are not tables.

In: rows of the span store. Out: values that stages hand to each other. Invariant: facts only; anything
that can be derived (returns, advantages, staleness) is a property or a pure function elsewhere.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Purpose of a rollout."""

    TRAIN = "train"
    """May be trained on."""
    VALIDATE = "validate"
    """Held out: measured, never trained."""
    PROBE = "probe"
    """Checks a server or a canary: never trained."""
    GREEDY = "greedy"
    """Greedy baseline at temperature 0, with which its group is compared (ReMax): never trained."""
    TRIAL = "trial"
    """Tries a candidate of a prompt: measured, never trained."""
    PRODUCTION = "production"
    """A service's own traffic: trained only where trainer.modes lists it."""


HELD_OUT_MODES = frozenset({Mode.VALIDATE, Mode.PROBE, Mode.GREEDY, Mode.TRIAL})
"""Modes of rollouts that are measured and never trained."""


class DropReason(StrEnum):
    """Reasons for which a policy call, or a whole rollout, is not a transition."""

    NO_CALLS = "no_calls"
    """The rollout ended without one policy call."""
    INCOMPLETE = "incomplete"
    """Fewer calls arrived in time than the gateway had answered."""
    NO_REWARD = "no_reward"
    """The rollout ended without a reward. Never read as 0."""
    ATTEMPT_FAILED = "attempt_failed"
    """The attempt failed by a cause outside the policy (a crash, a lost worker), and no attempt was left; or its failure has no reward."""
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    """A later attempt of the same rollout counts instead."""
    SHARED_TRACE = "shared_trace"
    """Its own span names no rollout, and its trace names several attempts."""
    NO_TOKEN_IDS = "no_token_ids"
    """Neither the gateway nor the agent's span holds the engine's token ids."""
    RETOKENIZED = "retokenized"
    """Its token ids were computed from its text, and are not those that were sampled."""
    NO_LOGPROBS = "no_logprobs"
    """It has token ids, but no logprobs or not as many."""
    EMPTY_RESPONSE = "empty_response"
    """The engine sampled nothing."""
    CALL_FAILED = "call_failed"
    """The engine or the gateway answered with an error."""
    ABORTED = "aborted"
    """The client disconnected before the response was complete."""
    REDACTED = "redacted"
    """Its token ids were withheld because they would spell redacted text."""
    OTHER_TOKENIZER = "other_tokenizer"
    """Sampled with another tokenizer or chat template than the policy's."""
    MIXED_VERSIONS = "mixed_versions"
    """The engine loaded new weights during the call, so that several policy versions sampled it, and builder.mixed_versions is drop."""
    UNKNOWN_VERSION = "unknown_version"
    """The engine did not report which weights sampled which tokens."""
    UNKNOWN_SAMPLING = "unknown_sampling"
    """The engine did not report the sampling parameters of its response."""
    OTHER_DISTRIBUTION = "other_distribution"
    """Sampled from a distribution that the trainer cannot recompute: top-p, top-k, min-p, penalties, masked tokens."""
    OTHER_MODALITY = "other_modality"
    """Its prompt or response holds images, audio, video or files: placeholders stand for them among the token ids."""
    NOT_SELECTED = "not_selected"
    """The build's selection leaves this agent, model, policy, tool or component out."""
    RETRIED = "retried"
    """The client retried the call; only the response that the agent used counts."""
    DUPLICATE = "duplicate"
    """Another span records the same response, and counts."""
    UNFINISHED = "unfinished"
    """Its span records neither the end of the call nor its result."""
    ATTRIBUTES_DROPPED = "attributes_dropped"
    """The sender dropped attributes of the call's span, the response among them."""
    UNKNOWN_CONVENTION = "unknown_convention"
    """Its span follows a convention that no dialect reads."""
    OVER_LENGTH = "over_length"
    """Prompt and response are longer than builder.max_tokens."""


def remedy(reason: str) -> str:
    """Return what to do about a drop reason, or why no action is needed, in one sentence; empty for a reason of a newer builder."""
    return _REMEDIES.get(reason, "")


_REMEDIES: Mapping[str, str] = {
    DropReason.NO_CALLS: "Let the agent call the policy through the gateway, or through an instrumented client.",
    DropReason.INCOMPLETE: "Find the spans that did not arrive (the exporter's log, the gateway's spill), "
    "or raise builder.incomplete_after_seconds: those that come late make a new revision.",
    DropReason.NO_REWARD: "Give one: an event gen_ai.evaluation.result with a finite score, or a query of builder.sql_rewards; "
    "rules of builder.rules are enough only with builder.rewards_from = 'rules'.",
    DropReason.ATTEMPT_FAILED: "Fix the cause of the failure (the attempt's root span names it), or allow more attempts.",
    DropReason.SUPERSEDED_ATTEMPT: "No action needed: the attempt that counts was built in its place.",
    DropReason.SHARED_TRACE: "Let the caller name its rollout, by the path /rollout/ID/attempt/N/v1 or by baggage, "
    "or give each attempt a trace of its own.",
    DropReason.NO_TOKEN_IDS: "Send the agent's calls through the gateway, or serve them from `spangrad engine`, "
    "whose responses carry the ids: without them calls can be exported for SFT only.",
    DropReason.RETOKENIZED: "Serve the policy from an engine that returns token ids, or accept ids computed from its text "
    "with builder.retokenized.",
    DropReason.NO_LOGPROBS: "Have the engine return a logprob for each sampled token: the gateway and `spangrad engine` ask for them.",
    DropReason.EMPTY_RESPONSE: "Check the prompt and the stop words: a response of no tokens holds nothing to learn from.",
    DropReason.CALL_FAILED: "Fix the cause that the error names: a call without a response is no action.",
    DropReason.ABORTED: "Give the agent a longer timeout, or let it read its streams to the end.",
    DropReason.REDACTED: "Redact less, or keep the ids of redacted calls with gateway.redact_keep_ids.",
    DropReason.OTHER_TOKENIZER: "Serve the policy with the tokenizer and chat template that it is trained with, "
    "or fix builder.tokenizer_hash.",
    DropReason.MIXED_VERSIONS: "Set builder.mixed_versions = keep: each token is then trained as sampled by its own version.",
    DropReason.UNKNOWN_VERSION: "Serve the policy from `spangrad engine`, which reports with each response the weights that sampled it.",
    DropReason.UNKNOWN_SAMPLING: "Serve the policy from `spangrad engine` of this version, which reports with each response how it was "
    "sampled, and let the span keep the whole response.",
    DropReason.OTHER_DISTRIBUTION: "Let gateway.relax remove what the detail names, let the agent sample with a temperature alone "
    "(no top_p, top_k, min_p or penalties, no forced tools or schemas), or accept a bias with builder.reshaped = 'keep'.",
    DropReason.OTHER_MODALITY: "Give the policy text alone, such as an image's description: "
    "the trainer has no pixels or sound to compute with.",
    DropReason.NOT_SELECTED: "No action needed, unless a pattern of builder.selection is narrower than intended.",
    DropReason.RETRIED: "No action needed: the response that the agent used was built in its place.",
    DropReason.DUPLICATE: "No action needed: the span that counts was built in its place.",
    DropReason.UNFINISHED: "Let the agent read its streams to the end and end its spans, and flush them before its process exits.",
    DropReason.ATTRIBUTES_DROPPED: "Raise the agent's OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT "
    "(and OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT where it is set): long conversations need more than 128 attributes for each span.",
    DropReason.UNKNOWN_CONVENTION: "Use an instrumentation of docs/reference/conventions.md, or send the calls through the gateway.",
    DropReason.OVER_LENGTH: "Raise builder.max_tokens, or shorten the agent's prompts.",
}


class AttemptFailure(StrEnum):
    """Reasons for which an attempt of a rollout failed: `spangrad.rollout.failure` on its root span.

    The policy causes those of `POLICY_FAILURES`, which have a reward (`runner.failure_rewards`); infrastructure causes the others, and
    the rollout is retried.
    """

    CRASH = "crash"
    """The process that ran the agent died, or could not be started."""
    TIMEOUT = "timeout"
    """The agent exceeded its time limit."""
    EXCEPTION = "exception"
    """The agent raised an exception."""
    EXIT_CODE = "exit_code"
    """The agent's command ended with an exit code other than 0."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The agent raised an exception, or its command failed, because its last prompt was longer than the model's context."""
    MAX_TURNS = "max_turns"
    """The agent used up the turns that it, or its framework, allows."""
    TOKEN_BUDGET = "token_budget"
    """The agent's calls generated as many tokens as `runner.max_output_tokens` allows, and it failed when the next one was refused."""
    CALL_BUDGET = "call_budget"
    """The agent made as many calls as `runner.max_calls` allows, and failed when the next one was refused."""
    INVALID_OUTPUT = "invalid_output"
    """The agent's rewards are not finite numbers, or its output cannot be read."""
    NO_REWARD = "no_reward"
    """The agent ended normally, but its attempt has no reward."""
    EVALUATION = "evaluation"
    """The evaluator raised, exceeded its time limit or gave no finite numbers; or the reward service gave no readable response."""
    ENVIRONMENT = "environment"
    """The environment was not ready in time, was lost while the agent used it, or could not be closed; a prompt was not given; or the
    players of the settings are not those of the environment."""
    SANDBOX = "sandbox"
    """The attempt's sandbox could not be set up, or its worker's are weaker than the task demands."""
    UNCOUNTED = "uncounted"
    """The gateway restarted meanwhile and cannot report how many calls it answered, so that some may be missing."""
    UNFLUSHED = "unflushed"
    """The attempt's spans could not be sent in time, so that rewards on them may be missing."""
    CANCELLED = "cancelled"
    """The runner was stopped or lost the gateway, or the rollout was no longer requested."""
    LOST = "lost"
    """The worker sent no heartbeat for longer than its lease holds, or did not end the attempt at its time limit."""
    NO_HANDLER = "no_handler"
    """The worker has no handler for the rollout's data source, or its handler cannot do what the request asks for; it is not retried."""
    RELEASED = "released"
    """The worker gave the attempt back; it does not count as one of the rollout's attempts."""


class SandboxRung(StrEnum):
    """Kinds of sandboxes, the weakest first."""

    NONE = "none"
    """No sandbox."""
    REMOTE = "remote"
    """A server elsewhere that speaks SWE-ReX, and confines as it was set up to, which cannot be known here."""
    LANDLOCK = "landlock"
    """The machine's own network and processes, confined by Landlock, a filter of system calls and limits."""
    BUBBLEWRAP = "bubblewrap"
    """Mounts, network, processes and users of its own, by bubblewrap."""

    def reaches(self, least: SandboxRung) -> bool:
        """Return whether this rung confines as much as another one."""
        rungs = list(SandboxRung)
        return rungs.index(self) >= rungs.index(least)


POLICY_FAILURES = frozenset(
    {
        AttemptFailure.TIMEOUT,
        AttemptFailure.EXCEPTION,
        AttemptFailure.EXIT_CODE,
        AttemptFailure.CONTEXT_OVERFLOW,
        AttemptFailure.INVALID_OUTPUT,
        AttemptFailure.MAX_TURNS,
        AttemptFailure.TOKEN_BUDGET,
        AttemptFailure.CALL_BUDGET,
    }
)
"""Failures that the policy caused: they may have a reward (`runner.failure_rewards`), and then count."""


class Stage(StrEnum):
    """Stages of an attempt, each with slots of its own."""

    INIT = "init"
    """Its environment is initialised, or leased."""
    RUN = "run"
    """Its agent runs."""
    EVALUATE = "evaluate"
    """Its output is evaluated."""


class RewardSource(StrEnum):
    """Sources of rewards, in order of precedence: the first source that names a reward wins."""

    RUNNER = "runner"
    EVALUATION_EVENT = "evaluation_event"
    EVALUATION_LOG = "evaluation_log"
    SPAN_ATTRIBUTE = "span_attribute"
    SQL = "sql"
    AIR = "air"


class VersionStatus(StrEnum):
    """State of a policy version."""

    COMMITTED = "committed"
    """Durable, with its batch; it may be published."""
    ORPHANED = "orphaned"
    """Its number was assigned, but the trainer stopped before the commit."""


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
    """Number of the version, from 1."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task for an agent."""

    task_id: str
    input: object
    """Input of the agent: any JSON value."""
    prompt: PromptVersion | None = None
    """Version that every attempt at the task fetches under that name. None: the version that is published when the attempt fetches
    first."""
    least_sandbox: SandboxRung | None = None
    """Weakest kind of sandbox that an attempt at the task may run in. None: any, and none as well."""
    data_source: str = ""
    """Source that the task comes from, which selects the handler of its attempts. Empty: none is named."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of an agent on a task, requested by the runner."""

    key: RolloutKey
    task: Task
    mode: Mode
    group_id: str
    group_size: int
    """Number of rollouts that share the group's baseline."""


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
    """Multiset checksum of the parameters; see docs/concepts/architecture.md."""
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


def canary_bucket(rollout_id: str) -> float:
    """Return the place of a rollout in [0, 1), the same for all of its calls: below a canary's share the canary answers them."""
    return zlib.crc32(rollout_id.encode("utf-8", "replace")) / 2**32
