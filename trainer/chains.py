"""Rollouts as chains of rows, for estimators that look at each token.

In: transitions of whole groups, and which of them are trained. Out: the trained ones in order, with a `Chains` that says which row
follows which, and what was paid for each. Invariant: the rewards of a chain add up to its rollout's return, whichever of its calls are
trained; a pure function, and the order of rows given changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.credit import GROUP, KEY, call_rewards


@dataclass(frozen=True)
class Chains:
    """The rollouts that a batch's rows are the turns of. Arrays have an element a real row; rows of a rollout lie together, in order."""

    rollout: NDArray[np.int64]
    """Numbered from 0, in order."""
    group: NDArray[np.int64]
    rewards: NDArray[np.float64]
    """What was paid for the call, and for what came after it and is not trained."""


def chains(transitions: pl.DataFrame, trained: pl.Series, weights: Mapping[str, float]) -> tuple[pl.DataFrame, Chains]:
    """The trained transitions by rollout and turn, and how they follow each other.

    Rewards of a call that is not trained (another policy's, not selected, too long) go to the trained call before it, or to the first one
    where none is before.

    Args:
        transitions: all calls of whole rollouts.
        trained: which of them are trained.
        weights: what rewards of a name are multiplied by; 1 for a name that is not here.
    """
    calls = transitions.select(*KEY, "Turn", "CallId", Row=pl.int_range(pl.len())).with_columns(
        call_rewards(transitions, weights), trained.alias("Trained")
    )
    holder = pl.when("Trained").then("Row").forward_fill().backward_fill().over(*KEY)
    calls = calls.sort(*KEY, "Turn", "CallId").with_columns(holder.alias("Holder"))
    paid = calls.group_by("Holder").agg(pl.col("Reward").sum())
    kept = calls.filter("Trained").drop("Reward").join(paid, left_on="Row", right_on="Holder", how="left", maintain_order="left")
    numbers = kept.select(pl.struct(*KEY).rle_id().alias("Rollout"), pl.struct(*GROUP).rle_id().alias("Group")).cast(pl.Int64)
    links = Chains(numbers["Rollout"].to_numpy(), numbers["Group"].to_numpy(), kept["Reward"].to_numpy())
    return transitions[kept["Row"].to_list()], links
