"""Rewards of transitions by the calls that earned them, and the discounted reward-to-go of each call.

Invariant: each reward is in exactly one of the parts: a return is the sum over all of them.

A builder gives the reward of a dropped call to a kept one to carry, so that no reward is lost to the return. What the carrier itself did
is worth nothing more for that, and where the carrier came after the dropped call, nothing that the carrier led to either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

KEY = ("RunId", "Mode", "GroupId", "RolloutId", "Attempt")
"""Columns that identify a rollout's attempt; the first three identify its group."""
LISTS = "Rewards."
"""Prefix of the names of the lists that hold a row's rewards."""


@dataclass(frozen=True)
class Earned:
    """Rewards of transitions, by what earned them: the call, the whole rollout, or a dropped call."""

    calls: pl.DataFrame
    """The transitions with the rewards that their own calls earned."""
    rollouts: pl.DataFrame
    """The transitions with the rewards of the whole rollout that they carry."""
    moved: pl.DataFrame
    """A row for each reward of a dropped call: KEY, Turn (when it was earned), and its lists, each of one element."""


def split(transitions: pl.DataFrame) -> Earned:
    """Split the rewards of transitions by what earned them."""
    names = [name for name in transitions.columns if name.startswith(LISTS)]
    entries = transitions.select(*KEY, "CallId", *names, Row=pl.int_range(pl.len())).explode(names, empty_as_null=False, keep_nulls=False)
    of_rollout, of_call = pl.col("Rewards.CallId") == "", pl.col("Rewards.CallId") == pl.col("CallId")
    moved = entries.filter(~of_rollout & ~of_call).select(
        *KEY, pl.col("Rewards.Turn").cast(transitions.schema["Turn"]).alias("Turn"), *(pl.concat_list(name) for name in names)
    )
    return Earned(
        only_rewards(transitions, entries.filter(of_call & ~of_rollout), names),
        only_rewards(transitions, entries.filter(of_rollout), names),
        moved,
    )


def only_rewards(transitions: pl.DataFrame, entries: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """Return the transitions with these rewards alone: `entries` has a row each, with Row, the number of its transition."""
    lists = entries.group_by("Row").agg(names)
    rows = transitions.select(Row=pl.int_range(pl.len()))
    held = rows.join(lists, on="Row", how="left", maintain_order="left").select(pl.col(name).fill_null([]) for name in names)
    return transitions.with_columns(held)


def discounted(calls: pl.DataFrame, gamma: float, moved: pl.DataFrame | None = None) -> pl.Series:
    """Return G_t = r_t + sum_{k > t} gamma^(k - t) r_k of each call: k and t are turns, so that dropped calls count as time.

    Calls that share a turn (choices of one request) do not see each other's rewards, and what comes after sees both.

    Args:
        calls: KEY, Turn and Reward.
        gamma: discount factor per turn.
        moved: KEY, Turn and Reward of what calls earned that are not among `calls`: calls of earlier turns see it.

    Source: Sutton and Barto, Reinforcement Learning (2018), eq. 3.8; summed in log2(turns) passes over whole columns (Hillis and Steele,
    Data parallel algorithms, 1986).
    """
    paid = [frame.select(*KEY, "Turn", "Reward") for frame in (calls, moved) if frame is not None]
    turns = pl.concat(paid).group_by(*KEY, "Turn").agg(pl.col("Reward").sum()).sort(*KEY, "Turn")
    rollout = turns.select(pl.struct(*KEY).rle_id()).to_series().to_numpy()
    turn = turns["Turn"].cast(pl.Float64).to_numpy()
    size = len(turns)
    # What follows of row i lies in row i + 1, if that is of the same rollout; its weight is gamma to the power of the turns between.
    linked = np.append(rollout[1:] == rollout[:-1], [False]) if size else np.zeros(0, bool)
    weight = np.where(linked, np.power(gamma, np.append(turn[1:] - turn[:-1], [1.0])[:size] * linked), 0.0)
    total, reach = turns["Reward"].to_numpy().copy(), 1
    link = weight.copy()
    while reach < size and link.any():
        total[:-reach] += link[:-reach] * total[reach:].copy()
        link = np.append(link[:-reach] * link[reach:], np.zeros(reach))
        reach *= 2
    after = np.append(total[1:], [0.0])[:size] * weight
    following = turns.select(*KEY, "Turn").with_columns(After=after)
    return (calls["Reward"] + calls.join(following, on=[*KEY, "Turn"], how="left", maintain_order="left")["After"]).alias("Value")
