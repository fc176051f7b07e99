"""Which of several sources is believed.

In: what all sources say, each of a call or of a rollout. Out: what counts. Invariant: for one target, name and role the first source in
RewardSource's order wins; the others' rows are no rewards, and what is wrong with them does no harm.

Within the winning source a span that repeats itself is believed the last time. Different spans add up, and so do different rules.
Where several processes speak of one span, each is believed the last time by its own count and clock; these tell nothing of the others,
so that the lowest of what they say counts, and below all what is no number.
"""

from __future__ import annotations

import polars as pl

from spangrad.types import RewardSource
from transition_builder.schemas import GIVEN, NANOSECONDS, Schema

RANK = {source.value: rank for rank, source in enumerate(RewardSource)}
_ATTEMPT = ["RunId", "RolloutId", "Attempt"]
_TARGET = [*_ATTEMPT, "CallId", "Name", "Role"]

SAID: Schema = {
    **GIVEN,
    "ResponseId": pl.String(),
    "Fault": pl.String(),
    "Speaker": pl.String(),
    "Seq": pl.UInt64(),
    "Timestamp": NANOSECONDS,
    "Choice": pl.UInt64(),
}
"""What a source says. CallId: null where the span or the response id has still to be looked up. Value: null where there is no finite
number, and then Fault says what there is. Speaker: the process that says it, else its service, whose own Seq and Timestamp are."""

NOT_FINITE = "not a finite number"
NO_VALUE = "no value"


def winners(said: pl.DataFrame) -> pl.DataFrame:
    """The rows of SAID (CallId filled in) that count."""
    rank = pl.col("Source").replace_strict(RANK, return_dtype=pl.Int64)
    span = [*_TARGET, "RuleHash", "TraceId", "SpanId"]
    return (
        said.filter(rank == rank.min().over(_TARGET))
        .sort("Seq", "Timestamp", "Choice", nulls_last=True, maintain_order=True)
        .unique([*span, "Speaker"], keep="last", maintain_order=True)
        .sort("Value", nulls_last=False, maintain_order=True)
        .unique(span, keep="first", maintain_order=True)
    )


def faults(rollouts: pl.DataFrame, winning: pl.DataFrame, *, by_rules: bool = False) -> pl.DataFrame:
    """Rollouts whose calls must not be trained for want of a reward: RunId, RolloutId, fault.

    Args:
        rollouts: RunId and RolloutId of those that may have rewards.
        winning: of `winners`. What AIR gives is no final reward: a rollout that has nothing else has none.
        by_rules: whether rules alone may reward a rollout; one for which none found anything has no reward and no fault: its return is 0.
    """
    rollout = ["RunId", "RolloutId"]
    bad = (
        winning.filter(pl.col("Value").is_null())
        .group_by(*rollout, "Fault")
        .agg(pl.col("Name").unique().sort().str.join(", "))
        .with_columns(why=pl.format("{}: {}", "Fault", "Name"))
        .group_by(rollout)
        .agg(pl.col("why").sort().str.join("; "))
    )
    concluded = winning.filter(pl.col("Source") != RewardSource.AIR.value).select(rollout).unique()
    return (
        rollouts.select(rollout)
        .join(bad, on=rollout, how="left")
        .join(concluded.with_columns(concluded=pl.lit(True)), on=rollout, how="left")
        .filter(pl.col("why").is_not_null() | (pl.col("concluded").is_null() & (not by_rules)))
        .select(*rollout, fault=pl.coalesce("why", pl.lit("no evaluation result with a score arrived")))
    )
