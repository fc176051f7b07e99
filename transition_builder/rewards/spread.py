"""Assignment of rewards to the transitions that carry them.

Invariant: the rewards of a rollout's transitions sum to the rollout's rewards.
"""

from __future__ import annotations

import polars as pl

from transition_builder.rewards.precedence import RANK
from transition_builder.schemas import ATTEMPT, SPAN

SPREAD = ("Name", "Value", "Source", "CallId", "Role", "Turn")
"""Columns of a transition's `Rewards`. CallId: the call that earned the reward, empty where it is the rollout's own. Turn: that at
which it was earned: of the call; for a call that is no turn, the next one; for the rollout's own, that of the transition that has it."""
_BEYOND = 2**62
"""Order after every call's."""


def spread(rewards: pl.DataFrame, placed: pl.DataFrame) -> pl.DataFrame:
    """Give every reward to a kept call: CallId and the lists `Rewards.Name` and so on (SPREAD), for calls that got any.

    The rollout's own go to its last kept call; those of a dropped call to the nearest earlier kept one, else to the
    first. Rewards of rollouts that keep no call go nowhere. The call that carries a reward has not necessarily earned it: credit schemes
    use CallId and Turn.

    Args:
        rewards: GIVEN rows.
        placed: all calls of final attempts with ATTEMPT, CallId, Order, ChoiceIndex, Turn (null: no turn) and Kept.
    """
    calls = placed.sort("Order", "ChoiceIndex", "CallId").with_columns(at=pl.int_range(pl.len(), dtype=pl.Int64))
    kept = calls.filter("Kept").select(*ATTEMPT, "at", target="CallId", of_target="Turn")
    first = kept.group_by(ATTEMPT, maintain_order=True).agg(first=pl.col("target").first(), of_first=pl.col("of_target").first())
    given = (
        rewards.join(calls[[*ATTEMPT, "CallId", "at"]], on=[*ATTEMPT, "CallId"], how="left")
        .with_columns(pl.col("at").fill_null(_BEYOND))
        .sort("at")
        .join_asof(kept, on="at", by=ATTEMPT, strategy="backward", check_sortedness=False)
        .join(first, on=ATTEMPT)
        .with_columns(
            target=pl.coalesce("target", "first"),
            Turn=pl.coalesce("of_target", "of_first"),
            rank=pl.col("Source").replace_strict(RANK, return_dtype=pl.Int64),
        )
    )
    moved = (pl.col("CallId") != "") & (pl.col("CallId") != pl.col("target"))
    if given.select(moved.any()).item():
        earned = given.join(_turns(calls), on=[*ATTEMPT, "CallId"], how="left", maintain_order="left")["earned"]
        given = given.with_columns(Turn=pl.when(moved).then(earned).otherwise("Turn"))
    return (
        given.sort("rank", "Name", "Role", *SPAN)
        .group_by(CallId="target", maintain_order=True)
        .agg(pl.col(name).alias(f"Rewards.{name}") for name in SPREAD)
    )


def _turns(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the turn at which each call earned its rewards: its own, or of a call that is no turn, the next one."""
    orders = calls.group_by(*ATTEMPT, "Order").agg(pl.col("Turn").max()).sort(*ATTEMPT, "Order")
    before = pl.col("Turn").forward_fill().over(ATTEMPT)
    earned = orders.select(*ATTEMPT, "Order", earned=pl.coalesce("Turn", before + 1, pl.lit(0)))
    return calls[[*ATTEMPT, "CallId", "Order"]].join(earned, on=[*ATTEMPT, "Order"]).drop("Order")
