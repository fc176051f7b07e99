"""Conclusion of each call: kept, or dropped with the first reason that holds.

Invariant: every call gets exactly one conclusion. The first reason that holds is the one that is written, in this order:

1. its rollout and attempt: shared_trace, superseded_attempt;
2. its record: duplicate, unknown_convention;
3. the state of its rollout: incomplete, attempt_failed (the attempt failed, and has no reward for that);
4. the selection of the build: not_selected, by agent, model, policy, tool, component;
5. its outcome: aborted, call_failed, retried, unfinished;
6. its data: redacted, other_modality, attributes_dropped, no_token_ids, retokenized, empty_response, no_logprobs;
7. fitness for training: unknown_version, unknown_sampling, other_tokenizer, mixed_versions (where builder.mixed_versions = drop),
   other_distribution, over_length;
8. the reward of its rollout: no_reward. Last, because a reward fixes no call that lacks something of its own.

So a call that failed is call_failed, whether or not the client retried; retried is one that was answered and not used. A rollout
without calls is incomplete, attempt_failed or no_calls. Rollouts that the trainer skips later (as stale, say) are in its ledger.
"""

from __future__ import annotations

import polars as pl

from spangrad.selection import Condition, conditions
from spangrad.settings import BuilderSettings
from spangrad.types import HELD_OUT_MODES, DropReason
from transition_builder.calls.reconstruct import UNKNOWN
from transition_builder.calls.retries import failed
from transition_builder.frames import Verdict, empty
from transition_builder.schemas import ATTEMPT, DROPS, NANOSECONDS, ROLLOUT, SAMPLING

RETOKENIZED = "retokenized"
"""IdsSource of token ids that the gateway computed from a text."""
ARRAYS = {"PromptIds": "PromptTokens", "ResponseIds": "ResponseTokens", "Logprobs": "LogprobCount"}
"""Array columns of a call, and the columns of their lengths."""
_OF_ROOT = ["Mode", "GroupId", "GroupSize", "TaskId"]


def without_arrays(calls: pl.DataFrame) -> pl.DataFrame:
    """Replace ARRAYS by their lengths and add Row: decisions need no more, and joins copy what they join."""
    lengths = [pl.col(name).list.len().fill_null(0).alias(length) for name, length in ARRAYS.items()]
    return calls.select(pl.exclude(*ARRAYS), *lengths, Row=pl.int_range(pl.len(), dtype=pl.UInt32))


def conclude(calls: pl.DataFrame, rollouts: pl.DataFrame, faults: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    """Add the facts of the root, Reason (empty: kept), Detail, Reshaping (what reshaped the sampling distribution) and Turn.

    Args:
        calls: canonical, placed calls `without_arrays`: columns of `reconstruct`, and Shared (its trace belongs to several attempts).
        rollouts: ROLLOUTS, all of the calls' among them.
        faults: rollouts without a usable reward: RunId, RolloutId, fault (why).
        spec: the selection, and the conditions on calls.
    """
    facts = rollouts.select(*ROLLOUT, *_OF_ROOT, "Failure", "Verdict", final_attempt="Attempt", root_detail="Detail")
    known = calls.join(facts, on=ROLLOUT).join(faults, on=ROLLOUT, how="left").with_columns(Reshaping=_reshaping())
    rules = _rules(spec)
    unselected = pl.any_horizontal(holds.fill_null(False) for reason, holds, _ in rules if reason in _UNSELECTED)
    counts = ~unselected & ~failed() & ~pl.col("Retried") & (pl.col("Attempt") == pl.col("final_attempt"))
    turn = pl.when(counts).then("Order").rank("dense").over(ATTEMPT).cast(pl.Int64) - 1
    return known.with_columns(*_first_reasons(known, rules), Turn=turn)


Rule = tuple[DropReason, pl.Expr, pl.Expr]
"""A reason, when it holds, and its detail."""
_UNSELECTED = {DropReason.DUPLICATE, DropReason.UNKNOWN_CONVENTION, DropReason.NOT_SELECTED}
"""Reasons of calls that are no turn of the rollout."""
_NOTHING = pl.lit("")
_OF_ROLLOUT: list[Rule] = [
    (DropReason.INCOMPLETE, pl.col("Verdict") == Verdict.INCOMPLETE.value, pl.col("root_detail")),
    (DropReason.ATTEMPT_FAILED, pl.col("Failure") != "", pl.col("Failure")),
]


def _rules(spec: BuilderSettings) -> list[Rule]:
    """Return the rules in their order; a comparison with a setting that is not given is null, and never holds."""
    prompt, response, logprobs = (pl.col(name) for name in ARRAYS.values())
    model = pl.when(pl.col("Model") != "").then(pl.format("model {}", "Model")).otherwise(_NOTHING)
    # Records of a failure do not always have its status, and its type is often the status again.
    status, kind = pl.when(pl.col("HttpStatus") > 0).then(pl.format("HTTP {}", "HttpStatus")), pl.col("ErrorType")
    named = pl.when((kind != "") & (kind != pl.col("HttpStatus").cast(pl.String))).then(kind)
    failure = pl.concat_str(status, named, separator=" ", ignore_nulls=True)
    silent = pl.col("ByGateway") & (pl.col("HttpStatus") == 0) & (pl.col("FinishReason") == "")
    retokenized, tokens, versions = pl.col("IdsSource") == RETOKENIZED, prompt + response, pl.col("Versions.Version")
    unknown_sampling = pl.any_horizontal(pl.col(name).is_null() for name in SAMPLING)
    mixed = pl.lit(spec.mixed_versions == "drop") & (versions.list.n_unique() > 1)
    max_tokens = pl.lit(spec.max_tokens, pl.Int64)
    # Calls of held-out rollouts are measured and never trained, so they stay.
    reshaped = (
        pl.lit(spec.reshaped == "drop") & ~pl.col("Mode").is_in([mode.value for mode in HELD_OUT_MODES]) & (pl.col("Reshaping") != "")
    )
    return [
        (DropReason.SHARED_TRACE, pl.col("Shared"), pl.format("trace {}", "TraceId")),
        (DropReason.SUPERSEDED_ATTEMPT, pl.col("Attempt") != pl.col("final_attempt"), pl.format("attempt {} counts", "final_attempt")),
        (DropReason.DUPLICATE, pl.col("DuplicateOf") != "", pl.format("call {} counts", "DuplicateOf")),
        (DropReason.UNKNOWN_CONVENTION, pl.col("Convention") == UNKNOWN, model),
        *_OF_ROLLOUT,
        *((DropReason.NOT_SELECTED, ~condition.holds, _unmatched(condition)) for condition in conditions(spec.selection)),
        (DropReason.ABORTED, pl.col("Aborted"), _NOTHING),
        (DropReason.CALL_FAILED, failed(), failure),
        (DropReason.RETRIED, pl.col("Retried"), _NOTHING),
        (DropReason.UNFINISHED, (silent | pl.col("Unfinished")) & (response == 0), _NOTHING),
        (DropReason.REDACTED, pl.col("Redacted") & (prompt == 0), _NOTHING),
        (DropReason.OTHER_MODALITY, pl.col("Modality") != "", pl.col("Modality")),
        (DropReason.ATTRIBUTES_DROPPED, pl.col("Dropped") & (prompt == 0), _NOTHING),
        (DropReason.NO_TOKEN_IDS, prompt == 0, _NOTHING),
        (DropReason.RETOKENIZED, retokenized & (not spec.retokenized), pl.format("by tokenizer {}", "TokenizerHash")),
        (DropReason.EMPTY_RESPONSE, response == 0, _NOTHING),
        (DropReason.NO_LOGPROBS, ~retokenized & (logprobs != response), pl.format("{} logprobs for {} tokens", logprobs, response)),
        (DropReason.UNKNOWN_VERSION, ~retokenized & ~_knows_versions(), _NOTHING),
        (DropReason.UNKNOWN_SAMPLING, ~retokenized & unknown_sampling, _NOTHING),
        (DropReason.OTHER_TOKENIZER, pl.col("TokenizerHash") != pl.lit(spec.tokenizer_hash, pl.String), pl.col("TokenizerHash")),
        (DropReason.MIXED_VERSIONS, mixed, pl.format("versions {}", versions.cast(pl.List(pl.String)).list.join(", "))),
        (DropReason.OTHER_DISTRIBUTION, reshaped, pl.format("sampled with {}", "Reshaping")),
        (DropReason.OVER_LENGTH, tokens > max_tokens, pl.format("{} tokens; builder.max_tokens = {}", tokens, max_tokens)),
        (DropReason.NO_REWARD, pl.col("fault").is_not_null(), pl.col("fault")),
    ]


def _unmatched(condition: Condition) -> pl.Expr:
    return pl.format(f"{condition.what} {{}}", pl.when(condition.value != "").then(condition.value).otherwise(pl.lit("none")))


def _knows_versions() -> pl.Expr:
    """Return whether the versions of all response tokens are known: the first begins at token 0, each later one at a later token."""
    starts, versions = pl.col("Versions.Start").cast(pl.List(pl.Int64)), pl.col("Versions.Version")
    rising = starts.list.diff(null_behavior="drop").list.min().fill_null(1) > 0
    within = (starts.list.first() == 0) & (starts.list.last() < pl.col("ResponseTokens")) & (starts.list.len() == versions.list.len())
    return (rising & within).fill_null(False)


_RESHAPING = {
    "top_p": ("TopP", pl.col("TopP") != 1.0),
    # vLLM takes top_k = 0 and -1 alike for "all tokens".
    "top_k": ("TopK", pl.col("TopK") > 0),
    "min_p": ("MinP", pl.col("MinP") != 0.0),
    "presence_penalty": ("PresencePenalty", pl.col("PresencePenalty") != 0.0),
    "frequency_penalty": ("FrequencyPenalty", pl.col("FrequencyPenalty") != 0.0),
    "repetition_penalty": ("RepetitionPenalty", pl.col("RepetitionPenalty") != 1.0),
}
"""Names of sampling parameters -> their columns, and when they change the model's distribution."""


def _reshaping() -> pl.Expr:
    """Describe what reshaped the distribution, so that a temperature alone does not define it; empty: nothing."""
    named = [pl.when(reshapes).then(pl.format(f"{name}={{}}", column)) for name, (column, reshapes) in _RESHAPING.items()]
    masked = pl.when("Constrained").then(pl.lit("masked tokens"))
    return pl.concat_str([*named, masked], separator=", ", ignore_nulls=True)


def _first_reasons(calls: pl.DataFrame, rules: list[Rule]) -> tuple[pl.Series, pl.Series]:
    """Return Reason and Detail of the first rule that holds for each call; empty texts where none does."""
    first = calls.select(pl.coalesce(pl.when(holds).then(rule_number) for rule_number, (_, holds, _) in enumerate(rules))).to_series()
    reasons, details = (pl.repeat("", calls.height, dtype=pl.String, eager=True) for _ in range(2))
    for rule_number in first.drop_nulls().unique():
        rows = (first == rule_number).arg_true()
        reason, _, detail = rules[rule_number]
        reasons[rows] = reason.value
        details[rows] = calls[rows].with_columns(detail.alias("Detail"))["Detail"]
    return reasons.alias("Reason"), details.alias("Detail")


def empty_rollouts(rollouts: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return one drop for each rollout whose final attempt has no calls."""
    alone = rollouts.join(calls[ATTEMPT], on=ATTEMPT, how="anti")
    if alone.is_empty():
        return empty(DROPS)
    alone = alone.rename({"Detail": "root_detail"})
    return alone.with_columns(
        *_first_reasons(alone, [*_OF_ROLLOUT, (DropReason.NO_CALLS, pl.lit(True), _NOTHING)]),
        ChoiceIndex=pl.lit(0),
        Timestamp=pl.lit(0, pl.Int64).cast(NANOSECONDS),
        **{name: pl.lit("") for name in ("CallId", "AgentName", "Policy", "Model", "Convention")},
    ).sort(ATTEMPT)
