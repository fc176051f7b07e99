"""Build transitions from the spans of ended rollouts: one pure function.

Invariant: every policy call of every attempt of those rollouts leaves exactly once, in a transition or in a drop with the first
reason that applies (`reconcile`); a rollout whose final attempt has no calls leaves one drop of its own. The same frames give the same
rows, whatever else is among them.

Turn counts a rollout's selected calls that the engine answered, in the order of `calls.order`, from 0: a failed call is
no turn, and neither is a call of another policy. The choices of one call share its turn.
"""

from __future__ import annotations

import polars as pl

from spangrad import semconv
from spangrad.settings import BuilderSettings
from spangrad.types import Stage, transition_ids
from transition_builder import dialects, rewards
from transition_builder.calls import reconcile
from transition_builder.calls.causes import spans_of
from transition_builder.calls.reconstruct import reconstruct
from transition_builder.completeness.resolve import NAMED, owners_at_hand, resolve
from transition_builder.dialects.conventions import gateway
from transition_builder.dialects.reading import attribute
from transition_builder.frames import Built, Frames, Verdict, concat, conform, empty
from transition_builder.schemas import ATTEMPT, DROPS, NAMES, REWARDS, ROLLOUT, SPAN, TIMES, TOOL_CALLS, TRANSITIONS, VERSIONS

REVISION = 0
_TIMED = [semconv.ROOT_SPAN_NAME, *Stage]
"""Names of the runner's spans."""
RETOKENIZED_TEMPERATURE = 1.0
"""Temperature of a retokenised call when none is recorded; it has no logprobs that a wrong temperature could affect."""


def build(frames: Frames, spec: BuilderSettings) -> Built:
    """Conclude every call of every rollout: rows for transitions, drops, rewards and tool_calls, and the times for builds."""
    names = [*NAMES, "RowKind"]
    named = pl.concat([frames.spans.select(names), frames.calls.select(*NAMES, RowKind=pl.lit("span"))])
    owners = owners_at_hand(named, frames.owners)
    nodes, recorded = read(frames, owners)
    placed = reconstruct(nodes, recorded, frames.answers, frames.dropped)
    calls = reconcile.without_arrays(placed.calls)

    final = frames.rollouts[ATTEMPT]
    current = calls.join(final, on=ATTEMPT, how="semi")
    rows = resolve(frames.spans.filter(pl.col("RowKind") != "span"), owners, frames.rollouts)
    rollouts = _without_rewarded_failures(frames.rollouts, rows)
    may_reward = rollouts.filter((pl.col("Verdict") == Verdict.COMPLETE.value) & (pl.col("Failure") == ""))
    evaluations = rows.join(may_reward[ATTEMPT], on=ATTEMPT, how="semi")
    given = rewards.gather(frames, evaluations, nodes, current, placed.caused, may_reward, spec)

    calls = _with_shared(calls, frames, owners)
    concluded = reconcile.conclude(calls, rollouts, given.faults, spec)
    known = concluded.join(final, on=ATTEMPT, how="semi").select(
        *ATTEMPT, "CallId", "Order", "ChoiceIndex", "Turn", Kept=pl.col("Reason") == ""
    )
    return Built(
        transitions=_transitions(
            concluded.filter(pl.col("Reason") == ""), rewards.spread(given.rewards, known), placed.calls.select(*reconcile.ARRAYS), spec
        ),
        drops=concat(
            [_drops(concluded.filter(pl.col("Reason") != ""), spec), _stamp(reconcile.empty_rollouts(rollouts, calls), spec)], DROPS
        ),
        rewards=conform(_stamp(given.rewards, spec), REWARDS),
        tool_calls=_tool_calls(placed.caused, nodes, rollouts, given.rewards, spec),
        times=_times(frames.spans),
    )


def read(frames: Frames, owners: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return nodes (described spans of the rollouts, the gateway's among them), and the gateway's calls; `owners`: `owners_at_hand`."""
    recorded = gateway.calls(resolve(frames.calls, owners, frames.rollouts))
    spans = resolve(frames.spans.filter(pl.col("RowKind") == "span"), owners, frames.rollouts)
    # A gateway span's row in spangrad_internal.calls may become visible before its row in spangrad_internal.rollout_spans.
    unseen = recorded[SPAN].with_row_index("row").unique(SPAN, keep="first", maintain_order=True).join(spans, on=SPAN, how="anti")
    if unseen.height:
        texts = ["SpanName", "ServiceName", "ScopeName", "StatusCode", "StatusMessage"]
        rows = recorded[unseen["row"]].select(name for name in recorded.columns if name in spans.columns)
        spans = pl.concat([spans, rows], how="diagonal_relaxed").with_columns(pl.col(texts).fill_null(""))
    if not spans[SPAN].is_unique().all():
        spans = spans.unique(SPAN, keep="first", maintain_order=True)
    return dialects.describe(spans), recorded


def _without_rewarded_failures(rollouts: pl.DataFrame, evaluations: pl.DataFrame) -> pl.DataFrame:
    """Return ROLLOUTS with an empty Failure where the runner gave the failed attempt a reward: the policy caused it, so it counts."""
    if (rollouts["Failure"] == "").all():
        return rollouts
    score = attribute(semconv.EVALUATION_SCORE).cast(pl.Float64, strict=False)
    on_root = evaluations.filter((pl.col("RowKind") == "evaluation_event") & score.is_finite())[[*ROLLOUT, *SPAN]]
    rewarded = on_root.unique().with_columns(rewarded=pl.lit(True))
    marked = rollouts.join(rewarded, on=[*ROLLOUT, *SPAN], how="left", maintain_order="left")
    return marked.with_columns(Failure=pl.when("rewarded").then(pl.lit("")).otherwise("Failure")).drop("rewarded")


def _with_shared(calls: pl.DataFrame, frames: Frames, owners: pl.DataFrame) -> pl.DataFrame:
    """Add the calls that may belong to several attempts: they are part of none, and are dropped from one."""
    rows = resolve(frames.calls, owners, frames.rollouts, shared=True)
    if rows.is_empty():
        return calls.with_columns(Shared=pl.lit(False))
    facts = {"Shared": pl.lit(True), "Order": pl.lit(0), "AgentName": pl.lit(""), "Convention": pl.lit("gateway")}
    shared_calls = gateway.calls(rows).drop("Mode", "RolloutKey", "RolloutKeySource").with_columns(**facts)
    return pl.concat([calls, reconcile.without_arrays(shared_calls)], how="diagonal_relaxed")


def _stamp(frame: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    return frame.with_columns(BuildSpec=pl.lit(spec.spec), Revision=pl.lit(REVISION), Content=pl.lit(0, pl.UInt64))


def _transitions(kept: pl.DataFrame, given: pl.DataFrame, arrays: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    ids = transition_ids(kept["CallId"], spec.spec, REVISION)
    # Retokenised calls name no version, and are kept only where the specification asks for them.
    known = pl.col("Versions.Start").list.len() > 0
    versions = {name: pl.when(known).then(name).otherwise(pl.lit([0], dtype)) for name, dtype in VERSIONS.items()}
    rows = (
        _stamp(kept, spec)
        .with_columns(
            pl.Series("TransitionId", ids, dtype=pl.String),
            pl.col("Temperature").fill_null(RETOKENIZED_TEMPERATURE),
            **versions,
            Version=versions["Versions.Version"].list.first(),
        )
        .join(given, on="CallId", how="left")
        .with_columns(pl.col(f"Rewards.{name}" for name in rewards.SPREAD).fill_null([]))
        .sort(*ATTEMPT, "Turn", "ChoiceIndex", "CallId")
    )
    return conform(rows.hstack(arrays[rows["Row"]]), TRANSITIONS)


def _tool_calls(
    caused: pl.DataFrame, nodes: pl.DataFrame, rollouts: pl.DataFrame, given: pl.DataFrame, spec: BuilderSettings
) -> pl.DataFrame:
    """Return TOOL_CALLS of ROLLOUTS, of `caused` in the order of their attempts; `given` are the rewards, GIVEN."""
    if caused.is_empty():
        return empty(TOOL_CALLS)
    span = nodes.select("Timestamp", Error=pl.when("ToolFailed").then("StatusMessage").otherwise(pl.lit("")))[caused["Tool"]]
    scored = spans_of(caused, nodes).join(given[[*SPAN, "Value"]], on=SPAN).group_by("Tool").agg(Reward=pl.col("Value").sum())
    rows = (
        caused.hstack(span)
        .with_columns(
            pl.col("ToolName", "ToolCallId").fill_null(""),
            Position=pl.int_range(pl.len()).over(ATTEMPT),
            Arguments=pl.col("ToolArguments").fill_null(""),
            Result=pl.col("ToolResult").fill_null(""),
            Failed=pl.col("ToolFailed").fill_null(False),
            AgentName=pl.col("AgentName").fill_null(""),
            Error=pl.col("Error").fill_null(""),
            Requested="Asked",
        )
        .join(scored, on="Tool", how="left", maintain_order="left")
        .join(rollouts.select(*ROLLOUT, "Mode", "GroupId", "GroupSize", "TaskId"), on=ROLLOUT, maintain_order="left")
    )
    return conform(_stamp(rows, spec).sort(*ATTEMPT, "Position"), TOOL_CALLS)


def _times(spans: pl.DataFrame) -> pl.DataFrame:
    """Return TIMES by the runner's spans: roots of attempts, and stages."""
    # Few columns, so that the filter copies little.
    columns = ["RunId", "Attempt", "Timestamp", "SpanName", "ScopeName", "RowKind", "RolloutKeySource", "Attributes"]
    named = (pl.col("RowKind") == "span") & NAMED & pl.col("SpanName").is_in(_TIMED)
    of_runner = spans.select(*columns, RolloutId="RolloutKey", Seconds=pl.col("Duration") / 1e9).filter(named)
    if of_runner.is_empty():
        return empty(TIMES)
    is_root = pl.col("SpanName") == semconv.ROOT_SPAN_NAME
    roots = of_runner.filter(is_root & attribute(semconv.ROLLOUT_FINAL).is_not_null()).sort("Attempt", "Timestamp")
    last = roots.group_by(ROLLOUT).agg(
        Attempts=pl.col("Attempt").n_unique(), StartedAt=pl.col("Timestamp").last(), Seconds=pl.col("Seconds").last()
    )
    stages = of_runner.filter(~is_root & (pl.col("ScopeName") == semconv.RUNNER_SCOPE))
    sums = stages.group_by(*ROLLOUT, "SpanName").agg(pl.col("Seconds").sum()).sort("SpanName")
    listed = sums.group_by(ROLLOUT).agg(**{"StageSeconds.Name": "SpanName", "StageSeconds.Value": "Seconds"})
    return conform(last.join(listed, on=ROLLOUT, how="left"), TIMES)


def _drops(dropped: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    return conform(_stamp(dropped, spec).sort(*ATTEMPT, "Order", "ChoiceIndex", "CallId"), DROPS)
