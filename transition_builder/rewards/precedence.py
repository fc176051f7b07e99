"""Precedence among several reward sources.

Invariant: for one target, name and role the first source in RewardSource's order wins; the others' rows are no rewards, and their faults
are ignored.

Within the winning source the last of repeated reports on a span counts. Different spans add up, and so do different rules.
Where several processes report on one span, the last report of each counts, by its own sequence and clock; clocks of different processes
are not comparable, so that the lowest of these values counts, and a value that is no number comes below all.
"""

from __future__ import annotations

import polars as pl

from spangrad.types import RewardSource
from transition_builder.frames import conform
from transition_builder.schemas import ATTEMPT, GIVEN, NANOSECONDS, ROLLOUT, Schema

RANK = {source.value: rank for rank, source in enumerate(RewardSource)}
_TARGET = [*ATTEMPT, "CallId", "Name", "Role"]

REPORTED: Schema = {
    **GIVEN,
    "ResponseId": pl.String(),
    "Fault": pl.String(),
    "Speaker": pl.String(),
    "Seq": pl.UInt64(),
    "Timestamp": NANOSECONDS,
    "EventIndex": pl.UInt64(),
}
"""Reward that a source reports. CallId: null where the span or the response id has still to be looked up. Value: null where there is no
finite number; Fault then describes it. Speaker: the process that reports it, else its service; Seq and Timestamp are the speaker's."""

NOT_FINITE = "not a finite number"
NO_VALUE = "no value"


def as_reported(rows: pl.DataFrame) -> pl.DataFrame:
    """Return REPORTED rows of rows with Value, which becomes null where it is not finite; of what they lack, nothing is known."""
    lacking = {"RuleHash": pl.lit(""), "Role": pl.lit(""), "Fault": pl.lit(NOT_FINITE)}
    lacking = {name: lacking.get(name, pl.lit(None, dtype)) for name, dtype in REPORTED.items() if name not in rows.columns}
    return conform(rows.with_columns(Value=pl.when(pl.col("Value").is_finite()).then("Value"), **lacking), REPORTED)


def by_precedence(reported: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of REPORTED (CallId filled in) that count."""
    rank = pl.col("Source").replace_strict(RANK, return_dtype=pl.Int64)
    span = [*_TARGET, "RuleHash", "TraceId", "SpanId"]
    return (
        reported.filter(rank == rank.min().over(_TARGET))
        .sort("Seq", "Timestamp", "EventIndex", nulls_last=True, maintain_order=True)
        .unique([*span, "Speaker"], keep="last", maintain_order=True)
        .sort("Value", nulls_last=False, maintain_order=True)
        .unique(span, keep="first", maintain_order=True)
    )


def faults(rollouts: pl.DataFrame, chosen: pl.DataFrame, *, by_rules: bool = False) -> pl.DataFrame:
    """Return rollouts whose calls must not be trained because they lack a reward: RunId, RolloutId, fault.

    Args:
        rollouts: RunId and RolloutId of those that may have rewards.
        chosen: of `by_precedence`. Rewards of AIR are no final rewards: a rollout that has nothing else has none.
        by_rules: rules alone may reward a rollout; one for which no rule found anything has no reward and no fault: its return is 0.
    """
    concluded = chosen.filter(pl.col("Source") != RewardSource.AIR.value)
    unrewarded = rollouts[ROLLOUT].clear() if by_rules else rollouts[ROLLOUT].join(concluded, on=ROLLOUT, how="anti")
    unrewarded = unrewarded.with_columns(fault=pl.lit("no evaluation result with a score arrived"))
    if not chosen["Value"].has_nulls():
        return unrewarded
    without_value = _without_value(chosen).join(rollouts, on=ROLLOUT, how="semi")
    return pl.concat([without_value, unrewarded.join(without_value, on=ROLLOUT, how="anti")])


def _without_value(chosen: pl.DataFrame) -> pl.DataFrame:
    """Return the rollouts with a reward that has no value, and the reasons: RunId, RolloutId, fault."""
    return (
        chosen.filter(pl.col("Value").is_null())
        .group_by(*ROLLOUT, "Fault")
        .agg(pl.col("Name").unique().sort().str.join(", "))
        .group_by(ROLLOUT)
        .agg(fault=pl.format("{}: {}", "Fault", "Name").sort().str.join("; "))
    )
