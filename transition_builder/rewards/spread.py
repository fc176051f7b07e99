"""Which transition carries which reward.

In: rewards of rollouts and of calls, kept and dropped. Out: the lists of each kept call. Invariant: the rewards of a rollout's transitions
sum to the rollout's rewards.
"""

from __future__ import annotations

import polars as pl

from transition_builder.rewards.precedence import RANK

_ATTEMPT = ["RunId", "RolloutId", "Attempt"]
_SPAN = ["TraceId", "SpanId"]
SPREAD = ("Name", "Value", "Source", "CallId", "Role")
"""Columns of a transition's `Rewards`. CallId: the call that earned the reward, empty where it is the rollout's own."""
_BEYOND = 2**62
"""A place after every call's."""


def spread(rewards: pl.DataFrame, placed: pl.DataFrame) -> pl.DataFrame:
    """Give every reward to a kept call: CallId and the lists `Rewards.Name` and so on (SPREAD), for calls that got any.

    The rollout's own go to its last kept call; those of a dropped call to the nearest earlier kept one, else to the
    first. Rewards of rollouts that keep no call go nowhere.

    Args:
        rewards: GIVEN rows.
        placed: all calls of final attempts with RunId, RolloutId, Attempt, CallId, Order, Choice and Kept.
    """
    calls = placed.sort("Order", "Choice", "CallId").with_columns(at=pl.int_range(pl.len(), dtype=pl.Int64))
    kept = calls.filter("Kept").select(*_ATTEMPT, "at", pl.col("CallId").alias("target"))
    first = kept.unique(_ATTEMPT, keep="first", maintain_order=True).select(*_ATTEMPT, pl.col("target").alias("first"))
    return (
        rewards.join(calls.select(*_ATTEMPT, "CallId", "at"), on=[*_ATTEMPT, "CallId"], how="left")
        .with_columns(pl.col("at").fill_null(_BEYOND))
        .sort("at")
        .join_asof(kept, on="at", by=_ATTEMPT, strategy="backward", check_sortedness=False)
        .join(first, on=_ATTEMPT)
        .with_columns(target=pl.coalesce("target", "first"), rank=pl.col("Source").replace_strict(RANK, return_dtype=pl.Int64))
        .sort("rank", "Name", "Role", *_SPAN)
        .group_by("target", maintain_order=True)
        .agg(pl.col(name).alias(f"Rewards.{name}") for name in SPREAD)
        .rename({"target": "CallId"})
    )
