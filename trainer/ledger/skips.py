"""Reasons for which a group of rollouts is skipped, and the settings and versions that each of them depends on.

Invariant: a skip names everything that it depends on, so that it is judged again once that has changed, and only then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from spangrad.settings import TrainerSettings


class SkipReason(StrEnum):
    """Reason for which a ready group is not trained; of several that hold, the first in this order is given."""

    CANCELLED = "cancelled"
    """A rollout of it was cancelled: it has not ended by itself, and the queue does not count the group."""
    NO_TRANSITIONS = "no_transitions"
    """Every call of this policy in it was dropped, or is not selected."""
    CONTRADICTORY = "contradictory"
    """A call of it is inconsistent: no prompt, no response, not as many logprobs as response tokens, or a token that the policy lacks."""
    NOT_FINITE = "not_finite"
    """A logprob, a reward or the gradient is not a finite number."""
    ONE_ROLLOUT = "one_rollout"
    """Only one of its rollouts left transitions, so there is nothing to compare it with."""
    UNKNOWN_VERSION = "unknown_version"
    """Its calls were sampled by versions that are not in this branch's lineage."""
    STALE = "stale"
    """Its calls were sampled by weights too many versions behind (trainer.sampling.max_staleness)."""
    OTHER_PHASE = "other_phase"
    """A call of another policy in it was answered by a version that plays another phase (trainer.phase_policies)."""
    OTHER_TOKENIZER = "other_tokenizer"
    """Its calls were sampled with another tokenizer or chat template than the policy's."""
    GREEDY = "greedy"
    """Its calls were sampled at temperature 0: that distribution has no logprobs to compare."""
    TOO_LONG = "too_long"
    """Its calls are longer than a device takes (trainer.max_tokens_per_device)."""
    TRUNCATED = "truncated"
    """Its calls were cut at their limit of tokens, and trainer.sampling.truncated leaves such calls, or their rollouts, out."""
    NO_BASELINE = "no_baseline"
    """Its greedy rollout, which the estimator compares with, failed, left no transitions, or was not sampled greedily by weights within
    trainer.sampling.max_staleness."""
    EQUAL = "equal"
    """No value in it differs from one that it is compared with, and trainer.sampling.skip_equal_groups is set."""
    ALREADY_TRAINED = "already_trained"
    """A rollout of it has the id of one that another group's batch has trained."""
    LOGPROB_GAP = "logprob_gap"
    """The trainer's logprobs of its tokens are not those that the engine sampled with."""

    @property
    def remedy(self) -> str:
        """Return what helps where many groups are skipped for it."""
        return _REMEDIES[self]


MASKS = (
    SkipReason.UNKNOWN_VERSION,
    SkipReason.STALE,
    SkipReason.OTHER_TOKENIZER,
    SkipReason.GREEDY,
    SkipReason.TOO_LONG,
    SkipReason.TRUNCATED,
)
"""Reasons that apply to a call: it is masked, its reward counts, and its group is skipped only where every call is masked."""

FAILURES = (SkipReason.CONTRADICTORY, SkipReason.NOT_FINITE, SkipReason.ALREADY_TRAINED, SkipReason.LOGPROB_GAP)
"""Reasons that indicate a fault in recorded or computed values; trainer.alarms.max_failed_share bounds the share of groups with them."""

_REMEDIES: Mapping[SkipReason, str] = {
    SkipReason.CANCELLED: "No action needed: the queue counts it as none, and gives another group for it.",
    SkipReason.NO_TRANSITIONS: "See with `spangrad rollout why` why its calls were dropped, or widen trainer.selection.",
    SkipReason.CONTRADICTORY: (
        "See what wrote those rows: a transition has a prompt, a response, a logprob for each response token, and token ids of the policy."
    ),
    SkipReason.NOT_FINITE: "Fix what gives rewards or logprobs that are not finite; lower trainer.optim.learning_rate if gradients grew.",
    SkipReason.ONE_ROLLOUT: "See with `spangrad rollout why` why the others left none; raise runner.group_size, or take another estimator.",
    SkipReason.UNKNOWN_VERSION: "Train the branch whose versions sampled them; a rollback to one of them makes them known.",
    SkipReason.STALE: "Raise trainer.sampling.max_staleness, or let fewer rollouts run ahead of the trainer.",
    SkipReason.OTHER_PHASE: "No action needed where it began before the other policy's phase; else see trainer.phase_policies.",
    SkipReason.OTHER_TOKENIZER: "Serve the policy with the tokenizer and chat template of trainer.model.",
    SkipReason.GREEDY: "Let the agent sample at a temperature above 0 in the modes that are trained.",
    SkipReason.TOO_LONG: "Raise trainer.max_tokens_per_device, or shorten prompts and responses.",
    SkipReason.TRUNCATED: "Raise the agent's limit of tokens, or train such calls by another trainer.sampling.truncated.",
    SkipReason.NO_BASELINE: "See with `spangrad rollout why` what became of the group's greedy rollout.",
    SkipReason.EQUAL: "No action needed: nothing can be learnt from it. Many of them: take tasks of another difficulty.",
    SkipReason.ALREADY_TRAINED: "Give rollouts ids of their own in each run.",
    SkipReason.LOGPROB_GAP: (
        "See that engine and trainer hold the same weights and tokenizer and that the recorded sampling parameters are those in effect "
        "(docs/guides/learning.md)."
    ),
}


@dataclass(frozen=True, slots=True)
class _Dependence:
    """Dependence of a reason on more than the group's own rows."""

    versions: bool = False
    """True if the reason depends on the versions that led to the one about to be trained, so that a rollback may end it."""
    settings: tuple[str, ...] = ()
    """Keys below `trainer` of the settings that the reason depends on."""


_OF_CALLS = ("policy", "selection", "sampling.max_staleness", "sampling.agent_staleness", "max_tokens_per_device", "sampling.truncated")
_OF_VALUES = (
    "credit.overlong_tokens",
    "credit.overlong_buffer",
    "credit.scheme",
    "credit.step_weight",
    "credit.baseline",
    "credit.gamma",
    "credit.estimator",
    "credit.reward_weights",
    "credit.reward_roles",
    "credit.by_role",
)
_MASKED = _Dependence(versions=True, settings=_OF_CALLS)
DEPENDENCES: Mapping[SkipReason, _Dependence] = {
    SkipReason.CANCELLED: _Dependence(),
    SkipReason.NO_TRANSITIONS: _Dependence(settings=("policy", "selection")),
    SkipReason.CONTRADICTORY: _Dependence(),
    SkipReason.NOT_FINITE: _Dependence(),
    SkipReason.ONE_ROLLOUT: _Dependence(settings=("policy", "selection", "credit.estimator", "credit.baseline")),
    **dict.fromkeys(MASKS, _MASKED),
    SkipReason.OTHER_PHASE: _Dependence(versions=True, settings=("phase_policies",)),
    SkipReason.NO_BASELINE: _Dependence(versions=True, settings=("policy", "credit.estimator", "sampling.max_staleness")),
    SkipReason.EQUAL: _Dependence(versions=True, settings=("sampling.skip_equal_groups", *_OF_VALUES, *_OF_CALLS)),
    SkipReason.ALREADY_TRAINED: _Dependence(),
    SkipReason.LOGPROB_GAP: _Dependence(settings=("dtype", "alarms.logprob")),
}


@dataclass(frozen=True, slots=True)
class Skip:
    """Reason for which a group is skipped, with a detail."""

    reason: SkipReason
    detail: str = ""
    """Sentence about this group for the user; empty: the reason is enough."""


def bases(settings: TrainerSettings) -> dict[SkipReason, str]:
    """Return the settings that each reason depends on, as JSON: equal texts are equal settings."""
    return {reason: json.dumps(settings.values_of(depends.settings), sort_keys=True) for reason, depends in DEPENDENCES.items()}
