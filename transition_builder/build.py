"""From the spans of ended rollouts to transitions: one pure function.

In: `Frames` of rollouts that are complete, or that waited in vain. Out: `Built`. Invariant (law 2): every policy call
of every attempt of those rollouts leaves exactly once, in a transition or in a drop with a reason; a rollout whose
final attempt has no calls leaves one drop of its own. The same frames give the same rows, whatever else is among them.

The first reason that holds is the one that is written: what befell the rollout (superseded_attempt, incomplete,
attempt_failed, no_reward), then what the build leaves out (not_selected), then what befell the call.

Turn counts a rollout's selected calls that the engine answered, in the order of `lineage`, from 0: a failed call is
no turn, and neither is another policy's. The choices of one call share its turn.
"""

from __future__ import annotations

import polars as pl

from spangrad.settings import BuilderSettings
from spangrad.types import DropReason, transition_id
from transition_builder import join, lineage, rewards
from transition_builder.dialects import gateway, openinference
from transition_builder.frames import DROPS, REWARDS, TRANSITIONS, Built, Frames, Verdict, concat, conform
from transition_builder.lineage import Forest
from transition_builder.resolve import resolve

REVISION = 0
DEFAULT_TEMPERATURE = 1.0
"""What the engine samples with when a request names no temperature."""
RETOKENIZED = "retokenized"
"""IdsSource of ids that the gateway made from a text."""
_ROLLOUT = ["RunId", "RolloutId"]
_ATTEMPT = [*_ROLLOUT, "Attempt"]
_SPAN = ["TraceId", "SpanId"]
_OF_ROOT = ["Mode", "GroupId", "GroupSize", "TaskId"]


def build(frames: Frames, spec: BuilderSettings) -> Built:
    """Conclude every call of every rollout.

    Args:
        frames: rollouts with their verdicts (none waiting), and all that is known of them.
        spec: what to select, what to reward.

    Returns:
        Rows for otel.transitions, otel.drops and otel.rewards.
    """
    nodes, tree, recorded = read(frames)
    joined = join.join(nodes, tree, recorded, frames.answers)
    calls = _place(joined, nodes)

    final = frames.rollouts.select(*_ATTEMPT)
    current = calls.join(final, on=_ATTEMPT, how="semi")
    may_reward = frames.rollouts.filter((pl.col("Verdict") == Verdict.COMPLETE.value) & (pl.col("Failure") == ""))
    rows = frames.spans.filter(pl.col("RowKind") != "span")
    evaluations = resolve(rows, _named_spans(frames), frames.rollouts).join(may_reward.select(_ATTEMPT), on=_ATTEMPT, how="semi")
    said = rewards.evaluations(evaluations, may_reward, current, nodes)
    earned = rewards.tool_errors(nodes, joined.tree, current, may_reward, spec)
    given = concat([said.filter(pl.col("Value").is_not_null()), earned], REWARDS).sort(*_ATTEMPT, "CallId", "Name", "Source", *_SPAN)

    concluded = _conclude(calls, frames.rollouts, _reward_faults(may_reward, said), spec)
    placed = concluded.join(final, on=_ATTEMPT, how="semi").select(*_ATTEMPT, "CallId", "Order", "Choice", Kept=pl.col("Reason") == "")
    return Built(
        transitions=_transitions(concluded.filter(pl.col("Reason") == ""), rewards.spread(given, placed), spec),
        drops=concat([_drops(concluded.filter(pl.col("Reason") != ""), spec), _empty_rollouts(frames.rollouts, calls, spec)], DROPS),
        rewards=given,
    )


def read(frames: Frames) -> tuple[pl.DataFrame, Forest, pl.DataFrame]:
    """Nodes (described spans of the rollouts, the gateway's among them), their forest, and the gateway's calls."""
    witnesses = _named_spans(frames)
    recorded = gateway.calls(resolve(frames.calls, witnesses, frames.rollouts))
    spans = resolve(frames.spans.filter(pl.col("RowKind") == "span"), witnesses, frames.rollouts)
    # A gateway span's row in otel.calls may become visible before its row in otel.rollout_spans.
    unseen = (
        recorded.unique(_SPAN, maintain_order=True)
        .join(spans, on=_SPAN, how="anti")
        .select(name for name in recorded.columns if name in spans.columns)
    )
    known = pl.concat([spans, unseen], how="diagonal").unique(_SPAN, keep="first", maintain_order=True)
    texts = ["SpanName", "ServiceName", "ScopeName", "StatusCode", "StatusMessage"]
    nodes = openinference.describe(known.with_columns(pl.col(texts).fill_null("")))
    return nodes, lineage.forest(nodes), recorded


def _named_spans(frames: Frames) -> pl.DataFrame:
    names = ["RunId", "RolloutKey", "RolloutKeySource", "Attempt", "TraceId"]
    return pl.concat([frames.spans.select(names), frames.calls.select(names)])


def _place(joined: join.Joined, nodes: pl.DataFrame) -> pl.DataFrame:
    """Add AgentName and Order."""
    at = joined.calls["Node"].to_numpy()
    where = lineage.paths(nodes, joined.tree, at)
    return joined.calls.with_columns(
        lineage.agent_names(nodes, joined.tree, at).alias("AgentName"), lineage.order(joined.calls, where).alias("Order")
    )


def _reward_faults(rollouts: pl.DataFrame, said: pl.DataFrame) -> pl.DataFrame:
    """Rollouts whose calls must not be trained for want of a reward: RunId, RolloutId, fault."""
    verdicts = said.group_by(_ROLLOUT).agg(pl.col("Name").filter(pl.col("Value").is_null()).unique().sort().str.join(", ").alias("bad"))
    return (
        rollouts.select(_ROLLOUT)
        .join(verdicts, on=_ROLLOUT, how="left")
        .filter(pl.col("bad").is_null() | (pl.col("bad") != ""))
        .select(
            *_ROLLOUT,
            fault=pl.when(pl.col("bad").is_null())
            .then(pl.lit("no evaluation result with a score arrived"))
            .otherwise(pl.format("not a finite number: {}", "bad")),
        )
    )


def _conclude(calls: pl.DataFrame, rollouts: pl.DataFrame, faults: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    """Add what the root knows, Reason (empty: kept), Detail and Turn."""
    facts = rollouts.select(*_ROLLOUT, *_OF_ROOT, "Failure", "Verdict", "Attempt", "Detail").rename(
        {"Attempt": "final_attempt", "Detail": "root_detail"}
    )
    known = calls.join(facts, on=_ROLLOUT).join(faults, on=_ROLLOUT, how="left")
    reason, detail = _first(_rollout_reasons() + _selection(spec) + _call_reasons(spec))
    selected, _ = _first(_selection(spec))
    counts = (selected == "") & ~_failed() & (pl.col("Attempt") == pl.col("final_attempt"))
    turned = known.with_columns(Reason=reason, Detail=detail, counts=counts)
    turn = pl.when(pl.col("counts")).then("Order").rank("dense").over(_ATTEMPT).cast(pl.Int64) - 1
    return turned.with_columns(Turn=turn)


Rule = tuple[DropReason, pl.Expr, pl.Expr]


def _rollout_reasons() -> list[Rule]:
    return [
        (
            DropReason.SUPERSEDED_ATTEMPT,
            pl.col("Attempt") != pl.col("final_attempt"),
            pl.format("attempt {} counts", "final_attempt"),
        ),
        (DropReason.INCOMPLETE, pl.col("Verdict") == Verdict.INCOMPLETE.value, pl.col("root_detail")),
        (DropReason.ATTEMPT_FAILED, pl.col("Failure") != "", pl.col("Failure")),
        (DropReason.NO_REWARD, pl.col("fault").is_not_null(), pl.col("fault")),
    ]


def _selection(spec: BuilderSettings) -> list[Rule]:
    agent = pl.col("AgentName").str.contains(f"^(?:{spec.agent_pattern})$")
    rules = [(DropReason.NOT_SELECTED, ~agent, pl.format("agent {}", "AgentName"))]
    if spec.policy is not None:
        # A call that failed before the engine answered names no policy: it was asked for by its model's name.
        policy = pl.when(pl.col("Policy") != "").then("Policy").otherwise("Model")
        rules.append((DropReason.NOT_SELECTED, ~policy.is_in([spec.policy, ""]), pl.format("policy {}", policy)))
    return rules


def _failed() -> pl.Expr:
    return (pl.col("ErrorType") != "") | (pl.col("HttpStatus") >= 400)


def _call_reasons(spec: BuilderSettings) -> list[Rule]:
    prompt, response, logprobs = (pl.col(name).list.len() for name in ("PromptIds", "ResponseIds", "Logprobs"))
    nothing = pl.lit("")
    retokenized = pl.col("IdsSource") == RETOKENIZED
    sampled = ~retokenized
    rules = [
        (DropReason.ABORTED, pl.col("Aborted"), nothing),
        (DropReason.CALL_FAILED, _failed(), pl.format("HTTP {} {}", "HttpStatus", "ErrorType")),
        (DropReason.REDACTED, pl.col("Redacted") & (prompt == 0), nothing),
        (DropReason.NO_TOKEN_IDS, prompt == 0, nothing),
        (DropReason.RETOKENIZED, retokenized & (not spec.retokenized), pl.format("by tokenizer {}", "TokenizerHash")),
        (DropReason.EMPTY_RESPONSE, response == 0, nothing),
        (DropReason.NO_LOGPROBS, sampled & (logprobs != response), pl.format("{} logprobs for {} tokens", logprobs, response)),
        (
            DropReason.UNKNOWN_VERSION,
            sampled & (pl.col("VersionStart").is_null() | pl.col("VersionEnd").is_null()),
            nothing,
        ),
        (
            DropReason.MIXED_VERSIONS,
            pl.col("VersionStart") != pl.col("VersionEnd"),
            pl.format(
                "from {} to {}", pl.col("VersionStart").cast(pl.String).fill_null("?"), pl.col("VersionEnd").cast(pl.String).fill_null("?")
            ),
        ),
        (DropReason.OTHER_DISTRIBUTION, _reshaped(), pl.format("sampled with {}", _reshaping())),
    ]
    if spec.tokenizer_hash is not None:
        rules.insert(-3, (DropReason.OTHER_TOKENIZER, pl.col("TokenizerHash") != spec.tokenizer_hash, pl.col("TokenizerHash")))
    return rules


_NEUTRAL = {"TopP": 1.0, "TopK": 0, "MinP": 0.0, "PresencePenalty": 0.0, "FrequencyPenalty": 0.0, "RepetitionPenalty": 1.0}
"""Sampling parameters and the values that leave the distribution as the model gives it; what is not known counts as neutral."""


def _reshapes(name: str) -> pl.Expr:
    value = pl.col(name)
    # vLLM takes top_k = 0 and -1 alike for "all tokens".
    return (value > 0 if name == "TopK" else value != _NEUTRAL[name]).fill_null(False)


def _reshaped() -> pl.Expr:
    """Whether a temperature alone does not say what the response was sampled from."""
    unknown = pl.col("Temperature").is_null() & pl.col("ByGateway")
    return pl.col("Constrained").fill_null(False) | unknown | pl.any_horizontal(_reshapes(name) for name in _NEUTRAL)


def _reshaping() -> pl.Expr:
    """The names of the parameters that did it."""
    named = [pl.when(_reshapes(name)).then(pl.lit(name)) for name in _NEUTRAL]
    masked = pl.when(pl.col("Constrained").fill_null(False)).then(pl.lit("masked tokens"))
    unknown = pl.when(pl.col("Temperature").is_null() & pl.col("ByGateway")).then(pl.lit("an unknown temperature"))
    return pl.concat_str([*named, masked, unknown], separator=", ", ignore_nulls=True)


def _first(rules: list[Rule]) -> tuple[pl.Expr, pl.Expr]:
    """The reason and the detail of the first rule that holds; empty texts where none does."""
    reason = detail = pl.lit("")
    for name, holds, why in reversed(rules):
        reason = pl.when(holds).then(pl.lit(name.value)).otherwise(reason)
        detail = pl.when(holds).then(why).otherwise(detail)
    return reason, detail


def _stamp(frame: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    return frame.with_columns(BuildSpec=pl.lit(spec.spec), Revision=pl.lit(REVISION))


def _transitions(kept: pl.DataFrame, given: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    name = spec.spec
    ids = [transition_id(call, name, REVISION) for call in kept["CallId"]]
    return conform(
        _stamp(kept, spec)
        .with_columns(
            pl.Series("TransitionId", ids, dtype=pl.String),
            pl.col("Temperature").fill_null(DEFAULT_TEMPERATURE),
            # What was retokenised names no version, and is kept only where somebody asks for it.
            Version=pl.col("VersionStart").fill_null(0),
        )
        .join(given, on="CallId", how="left")
        .with_columns(pl.col("Rewards.Name", "Rewards.Value", "Rewards.Source").fill_null([]))
        .sort(*_ATTEMPT, "Turn", "Choice", "CallId"),
        TRANSITIONS,
    )


def _drops(dropped: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    return conform(_stamp(dropped, spec).sort(*_ATTEMPT, "Order", "Choice", "CallId"), DROPS)


def _empty_rollouts(rollouts: pl.DataFrame, calls: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    """One drop for each rollout whose final attempt has no calls."""
    incomplete = pl.col("Verdict") == Verdict.INCOMPLETE.value
    failed = pl.col("Failure") != ""
    alone = rollouts.join(calls.select(_ATTEMPT), on=_ATTEMPT, how="anti").with_columns(
        Reason=pl.when(incomplete)
        .then(pl.lit(DropReason.INCOMPLETE.value))
        .when(failed)
        .then(pl.lit(DropReason.ATTEMPT_FAILED.value))
        .otherwise(pl.lit(DropReason.NO_CALLS.value)),
        Detail=pl.when(incomplete).then("Detail").otherwise("Failure"),
        CallId=pl.lit(""),
        Choice=pl.lit(0),
        Policy=pl.lit(""),
    )
    return conform(_stamp(alone, spec).sort(_ATTEMPT), DROPS)
