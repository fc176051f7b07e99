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
from transition_builder.frames import Verdict
from transition_builder.schemas import ATTEMPT, NANOSECONDS, ROLLOUT, SAMPLING

RETOKENIZED = "retokenized"
"""IdsSource of token ids that the gateway computed from a text."""
ARRAYS = {"PromptIds": "PromptTokens", "ResponseIds": "ResponseTokens", "Logprobs": "LogprobCount"}
"""Array columns of a call, and the columns of their lengths."""
_OF_ROOT = ["Mode", "GroupId", "GroupSize", "TaskId"]
_ABSENT = {
    "Shared": pl.lit(False),
    "Retried": pl.lit(False),
    "DuplicateOf": pl.lit(""),
    "Convention": pl.lit(""),
    "Dropped": pl.lit(False),
    "Modality": pl.lit(""),
    "Unfinished": pl.lit(False),
    "Tools": pl.lit([], pl.List(pl.String)),
    "Components": pl.lit([], pl.List(pl.String)),
}
"""Defaults of columns that a call may lack."""


def without_arrays(calls: pl.DataFrame) -> pl.DataFrame:
    """Replace ARRAYS by their lengths and add Row: decisions need no more, and joins copy what they join."""
    lengths = [pl.col(name).list.len().fill_null(0).alias(length) for name, length in ARRAYS.items()]
    return calls.select(pl.exclude(*ARRAYS), *lengths, Row=pl.int_range(pl.len(), dtype=pl.UInt32))


def conclude(calls: pl.DataFrame, rollouts: pl.DataFrame, faults: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    """Add the facts of the root, Reason (empty: kept), Detail, Reshaping (what reshaped the sampling distribution) and Turn.

    Args:
        calls: canonical, placed calls `without_arrays`: columns of `reconstruct`, AgentName and Order among them, and those of
            `_ABSENT` that are known.
        rollouts: ROLLOUTS, all of the calls' among them.
        faults: rollouts without a usable reward: RunId, RolloutId, fault (why).
        spec: the selection, and the conditions on calls.
    """
    facts = rollouts.select(*ROLLOUT, *_OF_ROOT, "Failure", "Verdict", "Attempt", "Detail").rename(
        {"Attempt": "final_attempt", "Detail": "root_detail"}
    )
    known = calls.with_columns(**{name: value for name, value in _ABSENT.items() if name not in calls.columns})
    known = known.join(facts, on=ROLLOUT).join(faults, on=ROLLOUT, how="left")
    known = known.with_columns(Reshaping=_reshaping())
    rules = _rules(spec)
    reason, detail = _first_reasons(known, rules)
    unselected = pl.any_horizontal(holds.fill_null(False) for reason, holds, _ in rules if reason in _UNSELECTED)
    counts = ~unselected & ~failed() & ~pl.col("Retried") & (pl.col("Attempt") == pl.col("final_attempt"))
    concluded = known.with_columns(reason, detail, counts=counts)
    turn = pl.when(pl.col("counts")).then("Order").rank("dense").over(ATTEMPT).cast(pl.Int64) - 1
    return concluded.with_columns(Turn=turn)


Rule = tuple[DropReason, pl.Expr, pl.Expr]
_UNSELECTED = {DropReason.DUPLICATE, DropReason.UNKNOWN_CONVENTION, DropReason.NOT_SELECTED}
"""Reasons of calls that are no turn of the rollout."""


def _rules(spec: BuilderSettings) -> list[Rule]:
    """Return the reasons in their order: when each holds, and its detail."""
    model = pl.when(pl.col("Model") != "").then(pl.format("model {}", "Model")).otherwise(pl.lit(""))
    superseded = pl.col("Attempt") != pl.col("final_attempt")
    return [
        (DropReason.SHARED_TRACE, pl.col("Shared"), pl.format("trace {}", "TraceId")),
        (DropReason.SUPERSEDED_ATTEMPT, superseded, pl.format("attempt {} counts", "final_attempt")),
        (DropReason.DUPLICATE, pl.col("DuplicateOf") != "", pl.format("call {} counts", "DuplicateOf")),
        (DropReason.UNKNOWN_CONVENTION, pl.col("Convention") == UNKNOWN, model),
        (DropReason.INCOMPLETE, pl.col("Verdict") == Verdict.INCOMPLETE.value, pl.col("root_detail")),
        (DropReason.ATTEMPT_FAILED, pl.col("Failure") != "", pl.col("Failure")),
        *_selection(spec),
        *_outcome(),
        *_known(spec),
        *_trainable(spec),
        (DropReason.NO_REWARD, pl.col("fault").is_not_null(), pl.col("fault")),
    ]


def _selection(spec: BuilderSettings) -> list[Rule]:
    def detail(condition: Condition) -> pl.Expr:
        return pl.format(f"{condition.what} {{}}", pl.when(condition.value != "").then(condition.value).otherwise(pl.lit("none")))

    return [(DropReason.NOT_SELECTED, ~condition.holds, detail(condition)) for condition in conditions(spec.selection)]


def _outcome() -> list[Rule]:
    silent = pl.col("ByGateway") & (pl.col("HttpStatus") == 0) & (pl.col("FinishReason") == "")
    nothing = pl.lit("")
    # Records of a failure do not always have its status.
    status, kind = pl.when(pl.col("HttpStatus") > 0).then(pl.format("HTTP {}", "HttpStatus")), pl.when(pl.col("ErrorType") != "")
    failure = pl.concat_str(status, kind.then("ErrorType"), separator=" ", ignore_nulls=True)
    return [
        (DropReason.ABORTED, pl.col("Aborted"), nothing),
        (DropReason.CALL_FAILED, failed(), failure),
        (DropReason.RETRIED, pl.col("Retried"), nothing),
        (DropReason.UNFINISHED, (silent | pl.col("Unfinished")) & (pl.col("ResponseTokens") == 0), nothing),
    ]


def _known(spec: BuilderSettings) -> list[Rule]:
    prompt, response, logprobs = (pl.col(name) for name in ARRAYS.values())
    retokenized = pl.col("IdsSource") == RETOKENIZED
    nothing = pl.lit("")
    return [
        (DropReason.REDACTED, pl.col("Redacted") & (prompt == 0), nothing),
        (DropReason.OTHER_MODALITY, pl.col("Modality") != "", pl.col("Modality")),
        (DropReason.ATTRIBUTES_DROPPED, pl.col("Dropped") & (prompt == 0), nothing),
        (DropReason.NO_TOKEN_IDS, prompt == 0, nothing),
        (DropReason.RETOKENIZED, retokenized & (not spec.retokenized), pl.format("by tokenizer {}", "TokenizerHash")),
        (DropReason.EMPTY_RESPONSE, response == 0, nothing),
        (DropReason.NO_LOGPROBS, ~retokenized & (logprobs != response), pl.format("{} logprobs for {} tokens", logprobs, response)),
    ]


def _trainable(spec: BuilderSettings) -> list[Rule]:
    sampled = pl.col("IdsSource") != RETOKENIZED
    tokens = pl.col("PromptTokens") + pl.col("ResponseTokens")
    unknown = pl.any_horizontal(pl.col(name).is_null() for name in SAMPLING)
    rules: list[Rule] = [
        (DropReason.UNKNOWN_VERSION, sampled & ~_knows_versions(), pl.lit("")),
        (DropReason.UNKNOWN_SAMPLING, sampled & unknown, pl.lit("")),
    ]
    if spec.tokenizer_hash is not None:
        rules.append((DropReason.OTHER_TOKENIZER, pl.col("TokenizerHash") != spec.tokenizer_hash, pl.col("TokenizerHash")))
    if spec.mixed_versions == "drop":
        versions = pl.col("Versions.Version")
        named = pl.format("versions {}", versions.cast(pl.List(pl.String)).list.join(", "))
        rules.append((DropReason.MIXED_VERSIONS, versions.list.n_unique() > 1, named))
    reshaped = _dropped_where_reshaped(spec) & (pl.col("Reshaping") != "")
    rules.append((DropReason.OTHER_DISTRIBUTION, reshaped, pl.format("sampled with {}", "Reshaping")))
    if spec.max_tokens is not None:
        rules.append(
            (DropReason.OVER_LENGTH, tokens > spec.max_tokens, pl.format(f"{{}} tokens; builder.max_tokens = {spec.max_tokens}", tokens))
        )
    return rules


def _knows_versions() -> pl.Expr:
    """Return whether the versions of all response tokens are known: the first begins at token 0, each later one at a later token."""
    starts, versions = pl.col("Versions.Start").cast(pl.List(pl.Int64)), pl.col("Versions.Version")
    rising = starts.list.diff(null_behavior="drop").list.min().fill_null(1) > 0
    within = (starts.list.first() == 0) & (starts.list.last() < pl.col("ResponseTokens")) & (starts.list.len() == versions.list.len())
    return (rising & within).fill_null(False)


_NEUTRAL = {
    "TopP": ("top_p", 1.0),
    "TopK": ("top_k", 0),
    "MinP": ("min_p", 0.0),
    "PresencePenalty": ("presence_penalty", 0.0),
    "FrequencyPenalty": ("frequency_penalty", 0.0),
    "RepetitionPenalty": ("repetition_penalty", 1.0),
}
"""Columns of sampling parameters -> their names in requests, and the values that leave the model's distribution unchanged."""


def _reshapes(column: str) -> pl.Expr:
    value = pl.col(column)
    # vLLM takes top_k = 0 and -1 alike for "all tokens".
    return (value > 0 if column == "TopK" else value != _NEUTRAL[column][1]).fill_null(False)


def _dropped_where_reshaped(spec: BuilderSettings) -> pl.Expr:
    """Return whether a reshaped call is dropped; calls of held-out rollouts are measured and never trained, so they stay."""
    return pl.lit(spec.reshaped == "drop") & ~pl.col("Mode").is_in([mode.value for mode in HELD_OUT_MODES])


def _reshaping() -> pl.Expr:
    """Describe what reshaped the distribution, so that a temperature alone does not define it; empty: nothing."""
    named = [pl.when(_reshapes(column)).then(pl.format(f"{name}={{}}", column)) for column, (name, _) in _NEUTRAL.items()]
    masked = pl.when(pl.col("Constrained").fill_null(False)).then(pl.lit("masked tokens"))
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
    incomplete = pl.col("Verdict") == Verdict.INCOMPLETE.value
    attempt_failed = pl.col("Failure") != ""
    alone = rollouts.join(calls.select(ATTEMPT), on=ATTEMPT, how="anti").with_columns(
        Reason=pl.when(incomplete)
        .then(pl.lit(DropReason.INCOMPLETE.value))
        .when(attempt_failed)
        .then(pl.lit(DropReason.ATTEMPT_FAILED.value))
        .otherwise(pl.lit(DropReason.NO_CALLS.value)),
        Detail=pl.when(incomplete).then("Detail").otherwise("Failure"),
        ChoiceIndex=pl.lit(0),
        Timestamp=pl.lit(0, pl.Int64).cast(NANOSECONDS),
        **{name: pl.lit("") for name in ("CallId", "AgentName", "Policy", "Model", "Convention")},
    )
    return alone.sort(ATTEMPT)
