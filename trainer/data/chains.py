"""Rollouts as chains of rows, for estimators that work by token.

Invariant: the rewards of a chain add up to its rollout's return without the rewards of calls that are not trained and came before its
first row; a pure function, and the order of rows given changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.credit.assignment import KEY, call_rewards
from trainer.credit.earned import split


def chains(transitions: pl.DataFrame, trained: pl.Series, weights: Mapping[str, float]) -> tuple[pl.DataFrame, NDArray[np.float64]]:
    """Return the trained transitions by rollout and turn, and the reward of each, with those of later calls that are not trained.

    A trained call has what it earned. What a call earned that is not trained (dropped, another policy's, not selected, masked) goes to
    the trained call before it, of which it is a consequence as any later reward is; where none came before it, no chain has it. The
    rollout's own reward goes to the last trained call up to the one that carries it, or to the first.

    Args:
        transitions: all calls of whole rollouts.
        trained: which of them are trained.
        weights: factor of the rewards of each name; 1 for a name that is not listed.
    """
    earned = split(transitions)
    own, of_rollout = (call_rewards(part, weights) for part in (earned.calls, earned.rollouts))
    calls = transitions.select(*KEY, "CallId", pl.col("Turn").cast(pl.Int64), Row=pl.int_range(pl.len()))
    kept = calls.with_columns((own + of_rollout).alias("Reward")).filter(trained).sort(*KEY, "Turn", "CallId")
    others = calls.filter(~trained).select(*KEY, "Turn")
    moved = earned.moved.select(*KEY, pl.col("Turn").cast(pl.Int64)).with_columns(call_rewards(earned.moved, weights))
    by_call = pl.concat([others.with_columns(own.filter(~trained)), moved]).with_columns(Until=pl.col("Turn") - 1)
    by_rollout = others.with_columns(of_rollout.filter(~trained), Until="Turn")
    first = kept.unique(KEY, keep="first", maintain_order=True).select(*KEY, First="Row")
    held = [
        _held(by_call, kept).filter(pl.col("Row").is_not_null()),
        _held(by_rollout, kept).join(first, on=KEY).with_columns(pl.coalesce("Row", "First").alias("Row")),
    ]
    paid = pl.concat([rows.select("Row", Paid="Reward") for rows in held]).group_by("Row").agg(pl.col("Paid").sum())
    kept = kept.join(paid, on="Row", how="left", maintain_order="left").with_columns(pl.col("Reward") + pl.col("Paid").fill_null(0.0))
    return transitions[kept["Row"].to_list()], kept["Reward"].to_numpy()


def _held(rewards: pl.DataFrame, kept: pl.DataFrame) -> pl.DataFrame:
    """Return rewards with the Row of the last trained call of their rollout at a turn up to Until; null where there is none."""
    holders = kept.sort("Turn", "CallId").select(*KEY, "Row", Until="Turn")
    return rewards.sort("Until").join_asof(holders, on="Until", by=KEY, strategy="backward", check_sortedness=False)
