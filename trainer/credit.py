"""Credit assignment: from the raw rewards of transitions to one advantage a transition.

In: a frame of transitions (one row a policy call) with the columns of `KEY`, `Turn`, `CallId` and `Rewards.Value`, and the
function that compares values within a group (verl's GRPO, from `trainer.engine`). Out: frames with one number a row, in the order of the
rows given. Invariant: pure functions; nothing here knows of the store, of PyTorch or of tokens.

Two levels, as in Agent Lightning (https://arxiv.org/abs/2508.03680): first a rollout's return is spread over its calls
(`identical`, `reward_to_go`), then a baseline turns each call's value into an advantage (`advantages`), which the loss applies to
every token of the response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from spangrad.errors import SettingsError

KEY = ("RunId", "Mode", "GroupId", "RolloutId", "Attempt")
"""What names a rollout's attempt; its first three name the group."""
GROUP = KEY[:3]

Credit = Literal["identical", "reward_to_go"]
Baseline = Literal["rollout", "turn"]
Normalise = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]
"""Values and the group of each -> how far each lies above its group's mean, in standard deviations."""

_EQUAL = 1e-9
"""Values of a group that differ by less than this part of their size are equal: what is left is rounding."""


def call_rewards(transitions: pl.DataFrame) -> pl.Series:
    """r_t: the sum of the raw rewards of each call, 0 where a call has none."""
    return transitions["Rewards.Value"].list.sum().cast(pl.Float64).alias("Reward")


def returns(transitions: pl.DataFrame) -> pl.DataFrame:
    """R = sum_t r_t of each rollout: columns of `KEY` and `Return`, one row a rollout, in order of first appearance."""
    return (
        transitions.select(*KEY)
        .with_columns(call_rewards(transitions))
        .group_by(*KEY, maintain_order=True)
        .agg(Return=pl.col("Reward").sum())
    )


def identical(transitions: pl.DataFrame) -> pl.Series:
    """Value of each call: its rollout's return, V_t = R (Agent Lightning's base rule)."""
    return transitions.select(*KEY).join(returns(transitions), on=KEY, how="left", maintain_order="left")["Return"].alias("Value")


def reward_to_go(transitions: pl.DataFrame, gamma: float) -> pl.Series:
    """Value of each call: what came from it on, V_t = sum_{k >= t} gamma^(k - t) r_k.

    Source: Sutton and Barto, Reinforcement Learning (2018), eq. 3.8; the exponent counts policy calls, not tokens.
    """
    rows = transitions.select(*KEY, "Turn", "CallId").with_columns(call_rewards(transitions), pl.int_range(pl.len()).alias("Row"))
    ordered = rows.sort(*KEY, "Turn", "CallId")
    values = np.zeros(len(rows))
    following, rollout = 0.0, None
    for row in ordered.reverse().select(*KEY, "Reward", "Row").iter_rows():
        *key, reward, index = row
        following = reward + gamma * (following if key == rollout else 0.0)
        rollout = key
        values[index] = following
    return pl.Series("Value", values)


def advantages(
    transitions: pl.DataFrame, own: pl.Series, *, credit: Credit, baseline: Baseline, gamma: float, normalise: Normalise
) -> pl.Series:
    """Advantage of each of a policy's own calls: A_i = (V_i - mean(V)) / (std(V) + 1e-6) over the values that share its baseline.

    Source: group relative policy optimisation, https://arxiv.org/abs/2402.03300, section 4.1.2, as verl computes it (sample
    standard deviation). The baseline says which values are compared:

    - `rollout`: one value a rollout, all rollouts of the group; every call of a rollout has the rollout's advantage. A
      rollout counts once, however many calls it has.
    - `turn`: one value a call, the calls at the same turn of the group's rollouts.

    A value that has nothing to be compared with, and values that are all equal, have advantage 0.

    Args:
        transitions: all calls of whole rollouts, other policies' too: their rewards count in the values.
        own: which of them are the policy's; only those are compared, and get an advantage each, in their order.
        credit: how rewards become values.
        baseline: which values are compared.
        gamma: discount of a call's reward for each call before it.
        normalise: how values are compared within a group.

    Raises:
        SettingsError: the rollout baseline is asked of values that differ within a rollout.
    """
    require_baseline(credit, baseline)
    if baseline == "rollout":
        asked = transitions.filter(own)
        rollouts = returns(transitions).join(asked.select(*KEY).unique(), on=KEY, how="semi", maintain_order="left")
        spread = rollouts.select(*KEY).with_columns(group_relative(rollouts.select(*GROUP), rollouts["Return"], normalise))
        return asked.select(*KEY).join(spread, on=KEY, how="left", maintain_order="left")["Advantage"]
    values = identical(transitions) if credit == "identical" else reward_to_go(transitions, gamma)
    return group_relative(transitions.select(*GROUP, "Turn").filter(own), values.filter(own), normalise)


def require_baseline(credit: str, baseline: str) -> None:
    """Refuse the pair that has no meaning.

    Raises:
        SettingsError: reward-to-go differs from call to call, so a rollout has no one value to compare with other rollouts'.
    """
    if (credit, baseline) == ("reward_to_go", "rollout"):
        raise SettingsError(
            "trainer.credit = 'reward_to_go' gives each call a value of its own, and trainer.baseline = 'rollout' compares one value a "
            "rollout. Set trainer.baseline = 'turn', or trainer.credit = 'identical'."
        )


def group_relative(groups: pl.DataFrame, values: pl.Series, normalise: Normalise) -> pl.Series:
    """Compare each value with those of the rows that agree in every column of `groups`.

    Groups of one, whose raw value verl would return, and groups of equal values are 0 and do not reach `normalise`.
    """
    rows = groups.with_columns(
        values.cast(pl.Float64).alias("Value"),
        pl.struct(pl.all()).rank("dense").cast(pl.Int64).alias("Group"),
        pl.int_range(pl.len()).alias("Row"),
    )
    value: Any = pl.col("Value")
    tolerance = _EQUAL * pl.max_horizontal(value.abs().max(), pl.lit(1.0))
    differs = (pl.len() > 1) & (value.max() - value.min() > tolerance)
    live = rows.filter(differs.over("Group"))
    result = np.zeros(len(rows))
    if len(live):
        result[live["Row"].to_numpy()] = normalise(live["Value"].to_numpy(), live["Group"].to_numpy())
    return pl.Series("Advantage", result)
