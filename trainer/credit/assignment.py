"""Credit assignment: from the raw rewards of transitions to one advantage a transition.

In: a frame of transitions (one row a policy call) with the columns of `KEY`, `Turn`, `CallId`, `ResponseIds` and `Rewards`, which of them
are trained, the settings of credit, and the function that compares values (an estimator of verl's, from `trainer.credit.estimators`).
Out: one number a trained row, in the order of the rows given. Invariant: pure functions of whole columns; nothing here knows of the
store or of PyTorch, nothing is stored, and the order of rows changes nothing.

Two levels, as in Agent Lightning (https://arxiv.org/abs/2508.03680): first a rollout's rewards become values of its calls, then a
baseline turns values into advantages, which the loss applies to every token of a response. `SCHEMES` has one function a scheme; all
are called the same way, with any estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from spangrad.settings.trainer_learning import CreditScheme, CreditSettings
from trainer.credit.earned import KEY, discounted, split
from trainer.credit.learning import ESTIMATORS, Scope

GROUP = KEY[:3]

_NAMED = "Value."
"""Prefix of the columns that hold one reward name's part of a value."""
_EQUAL = 1e-9
"""Relative tolerance: values of a group that differ by less than this fraction of their size are equal; the rest is rounding."""


@dataclass(frozen=True)
class Units:
    """Rollouts or calls that are compared, each counting once. Every array has one element per unit."""

    values: NDArray[np.float64]
    """Value of each unit: its weighted return or reward."""
    groups: NDArray[np.int64]
    """Group number of each unit; units of a group share a baseline."""
    lengths: NDArray[np.int64]
    """Number of tokens that the policy sampled in each unit, those of masked calls included."""
    named: Mapping[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    """Raw parts of the values by reward name, where the estimator needs them: weighted, they add up to `values`."""
    greedy: NDArray[np.float64] | None = None
    """Return of the greedy rollout of each unit's group. None: the estimator compares with none."""


Normalise = Callable[[Units], NDArray[np.float64]]
"""Function from units to one advantage per unit."""
Compare = Callable[[pl.DataFrame, pl.DataFrame], pl.Series]
"""Function from what names each unit's group, and the units, to one advantage per unit (`compare`)."""


def advantages(
    transitions: pl.DataFrame,
    own: pl.Series,
    credit: CreditSettings | None = None,
    *,
    normalise: Normalise,
    trained: pl.Series | None = None,
    scope: Scope | None = None,
) -> pl.Series:
    """Return the advantage of each of a policy's own calls, by the scheme of the settings, which `trainer.credit.learning.check` accepts.

    Args:
        transitions: all calls of whole rollouts, other policies' too: their rewards count in the values. With `Greedy` (`with_greedy`)
            where the scope is that.
        own: which of them are compared, and get an advantage each, in their order.
        credit: the scheme, the baseline and their parameters. None: the defaults.
        normalise: how values are compared.
        trained: which of those are trained. None: all that are compared.
        scope: what is compared with what. None: as the estimator needs it.
    """
    credit = credit or CreditSettings()
    facts = ESTIMATORS[credit.estimator]
    scope = scope or facts.scope
    if credit.by_role:
        transitions = transitions.with_columns(pl.concat_str("GroupId", "AgentName", separator="\0").alias("GroupId"))
    columns = [*KEY, "Turn", "CallId", *(["PromptIds"] if credit.scheme == "gigpo" else [])]
    columns += ["Greedy"] if scope == "greedy" else []
    calls = transitions.select(*columns, Length=pl.col("ResponseIds").list.len().cast(pl.Int64)).with_columns(
        call_rewards(transitions, credit.reward_weights),
        own.alias("Own"),
        (own if trained is None else trained).alias("Trained"),
        *(_by_name(transitions) if facts.by_name else []),
    )
    if credit.scheme in _BY_CALL:
        calls = calls.with_columns(_values_by_call(transitions, credit))
    return SCHEMES[credit.scheme](calls, credit, partial(compare, scope=scope, normalise=normalise)).filter(own).alias("Advantage")


def identical(calls: pl.DataFrame, credit: CreditSettings, compare: Compare) -> pl.Series:
    """Give every call its rollout's return: V_t = R = sum_k r_k.

    With baseline `rollout` A_t = (R - mean(R)) / (std(R) + 1e-6) over the group's rollouts, each of which counts once however many calls
    it has; with `turn` over the calls at the same turn; with `transition` over all calls of all rollouts of the group, so that a rollout
    of n calls counts n times in mean and standard deviation.

    Source: Agent Lightning (https://arxiv.org/abs/2508.03680), section 3.3: its base rule, and with `transition` its grouping, in which
    the transitions of all executions of a task are one group. The group's comparison is GRPO's (https://arxiv.org/abs/2402.03300,
    section 4.1.2) with verl's sample standard deviation.
    """
    if credit.baseline != "rollout":
        return _among_calls(calls, _spread(calls, _returns(calls), "Return"), credit, compare)
    return _spread(calls, _rollout_advantages(calls, compare), "Advantage")


def final_only(calls: pl.DataFrame, credit: CreditSettings, compare: Compare) -> pl.Series:
    """Give the return to the last of a rollout's trained calls only: V_T = R, V_t = 0 before it; so A_T = A(R) and A_t = 0.

    A(R) is compared as by `identical` with baseline `rollout`. Calls that share the last turn (choices of one request) all have it.

    Source: the plainest reading of a terminal reward (Sutton and Barto, Reinforcement Learning, 2018, section 3.3) without any
    spreading; a control for the other schemes (docs/concepts/credit.md: it learns nothing where earlier calls matter).
    """
    last = (pl.col("Turn") == pl.col("Turn").filter("Trained").max()).over(*KEY).fill_null(value=False)
    spread = _spread(calls, _rollout_advantages(calls, compare), "Advantage")
    return calls.select(pl.when(last).then(spread).otherwise(0.0).alias("Advantage")).to_series()


def reward_to_go(calls: pl.DataFrame, credit: CreditSettings, compare: Compare) -> pl.Series:
    """Give each call the discounted rewards from it onward: V_t = sum_{k >= t} gamma^(k - t) r_k.

    Compared over the calls at the same turn of the group, or (baseline `transition`) over all of its calls.

    Source: Sutton and Barto, Reinforcement Learning (2018), eq. 3.8; the exponent counts policy calls, not tokens.
    """
    return _among_calls(calls, calls["ToGo"], credit, compare)


def own(calls: pl.DataFrame, credit: CreditSettings, compare: Compare) -> pl.Series:
    """Give each call its own reward and nothing of what followed: V_t = r_t.

    Compared over the calls at the same turn of the group, or (baseline `transition`) over all of its calls.

    Source: the contextual bandit, `reward_to_go` with gamma 0 (Sutton and Barto, Reinforcement Learning, 2018, section 2.9); right where
    every call is graded on its own (docs/concepts/credit.md, inbox).
    """
    return _among_calls(calls, calls["Earned"], credit, compare)


def gigpo(calls: pl.DataFrame, credit: CreditSettings, compare: Compare) -> pl.Series:
    """Group-in-group policy optimisation: A_t = A^E + omega A^S_t.

    A^E: the return against the returns of the group's rollouts, each of which counts once. A^S: the step's discounted reward-to-go,
    sum_{k >= t} gamma^(k - t) r_k, against those of all steps of the group that were taken in the same state; 0 in a state that came up
    once. Two calls are in the same state when their prompts' token ids are equal (compared by a 64-bit hash, within the group).

    Source: GiGPO (https://arxiv.org/abs/2505.10978), section 4, normalised by the standard deviation; omega is trainer.credit.step_weight.
    """
    steps = calls.select(*GROUP, State=pl.col("PromptIds").hash())
    step = _among_own(calls, steps, calls["ToGo"], compare)
    return _spread(calls, _rollout_advantages(calls, compare), "Advantage") + credit.step_weight * step


Scheme = Callable[[pl.DataFrame, CreditSettings, Compare], pl.Series]
"""Function from calls (KEY, Turn, CallId, Own, Trained, Reward: what each carries; for the schemes of `_BY_CALL` also Earned and ToGo;
PromptIds for gigpo) to one advantage per row; the advantages of rows that are not Own are not used."""

SCHEMES: Mapping[CreditScheme, Scheme] = {
    "identical": identical,
    "final_only": final_only,
    "reward_to_go": reward_to_go,
    "own": own,
    "gigpo": gigpo,
}

_BY_CALL = frozenset({"own", "reward_to_go", "gigpo"})
"""Schemes whose values depend on the call that earned a reward, and on its turn. To the others only the return matters."""


def live_groups(transitions: pl.DataFrame, own: pl.Series, credit: CreditSettings, trained: pl.Series | None = None) -> pl.DataFrame:
    """Return the groups (columns of `GROUP`) in which a value differs from one that it is compared with; the rest teaches nothing.

    Arguments are those of `advantages`.
    """
    scope: Scope = "greedy" if ESTIMATORS[credit.estimator].scope == "greedy" else "group"
    differs = advantages(transitions, own, credit, normalise=lambda units: np.ones(len(units.values)), trained=trained, scope=scope)
    alive = differs != 0 if trained is None else (differs != 0) & trained.filter(own)
    return transitions.filter(own).select(*GROUP).filter(alive).unique(maintain_order=True)


def call_rewards(transitions: pl.DataFrame, weights: Mapping[str, float] | None = None) -> pl.Series:
    """Return r_t = sum_n w_n r_{t,n}: the weighted sum of the raw rewards of each call, 0 where a call has none."""
    if not weights:
        return transitions["Rewards.Value"].list.sum().cast(pl.Float64).alias("Reward")
    names, values = transitions["Rewards.Name"].explode(empty_as_null=False), transitions["Rewards.Value"].explode(empty_as_null=False)
    weighted = names.replace_strict(dict(weights), default=1.0, return_dtype=pl.Float64) * values.cast(pl.Float64)
    rows = np.repeat(np.arange(len(transitions)), transitions["Rewards.Value"].list.len().to_numpy())
    return pl.Series("Reward", np.bincount(rows, weighted.to_numpy(), len(transitions)).astype(np.float64))


def returns(transitions: pl.DataFrame, weights: Mapping[str, float] | None = None) -> pl.DataFrame:
    """Return R = sum_t r_t of each rollout: columns of `KEY` and `Return`, one row per rollout, in order of first appearance."""
    return _returns(transitions.select(*KEY).with_columns(call_rewards(transitions, weights)))


def with_greedy(transitions: pl.DataFrame, greedy: pl.DataFrame, weights: Mapping[str, float] | None = None) -> pl.DataFrame:
    """Return the transitions with the column `Greedy`: the return of their group's greedy rollout (mean of several; null: none)."""
    of_group = returns(greedy, weights).group_by("RunId", "GroupId").agg(pl.col("Return").mean().alias("Greedy"))
    return transitions.join(of_group, on=["RunId", "GroupId"], how="left", maintain_order="left")


def named_returns(transitions: pl.DataFrame) -> dict[str, float]:
    """Return for each reward name the mean over rollouts of the sum of its raw values: the parts of the return, before weights."""
    rollouts = max(transitions.select(*KEY).unique().height, 1)
    rewards = transitions.select(Name="Rewards.Name", Value="Rewards.Value").explode("Name", "Value", empty_as_null=False)
    sums = rewards.group_by("Name").agg(pl.col("Value").sum()).sort("Name")
    return {str(name): value / rollouts for name, value in sums.rows()}


def _values_by_call(transitions: pl.DataFrame, credit: CreditSettings) -> list[pl.Series]:
    """Return what each call earned itself (Earned, with the rollout's own reward where it carries that) and its reward-to-go (ToGo).

    No call earned the reward of a dropped call: calls before the dropped one see it, those after it do not, whichever of them carries it.
    """
    earned = split(transitions)
    own = call_rewards(earned.calls, credit.reward_weights) + call_rewards(earned.rollouts, credit.reward_weights)
    calls = transitions.select(*KEY, "Turn").with_columns(own.alias("Reward"))
    moved = earned.moved.select(*KEY, "Turn").with_columns(call_rewards(earned.moved, credit.reward_weights))
    return [own.alias("Earned"), discounted(calls, credit.gamma, moved).alias("ToGo")]


def compare(groups: pl.DataFrame, units: pl.DataFrame, *, scope: Scope, normalise: Normalise) -> pl.Series:
    """Compare values, each with those of the rows that agree in every column of `groups`.

    By the scope: `group`: groups of one, whose raw value verl would return, and groups of equal values are 0 and do not reach
    `normalise`. `batch`: groups of one are 0 and do not reach it; those of equal values count in what it knows of the batch. `all`: every
    value reaches it, since none is compared with its group alone. Where all values of every group are equal, there is nothing to compare.
    `greedy`: values that differ from their greedy rollout's reach it, also in groups of one; the others are 0.

    Units have Value, Length, a column a reward's name (`Value.NAME`) where the estimator needs them, and Greedy in that scope.
    """
    rows = units.with_columns(
        groups.select(pl.struct(pl.all()).rank("dense").cast(pl.Int64).alias("Group")).to_series(), pl.int_range(pl.len()).alias("Row")
    )
    values: Any = pl.selectors.starts_with("Value")
    tolerance = _EQUAL * pl.max_horizontal(pl.col("Value").abs().max(), pl.lit(1.0))
    spans = values.max() - values.min()
    shared, differs = pl.len() > 1, pl.any_horizontal(spans > tolerance)
    facts = {"Shared": shared, "Differs": shared & differs}
    if scope == "greedy":
        apart = (pl.col("Value") - pl.col("Greedy")).abs() > tolerance
        facts = {"Shared": apart, "Differs": apart}
    whole = scope in {"all", "greedy"}
    rows = rows.with_columns(**(facts if whole else {name: fact.over("Group") for name, fact in facts.items()}))
    result = np.zeros(len(rows))
    live = rows.filter("Differs" if scope == "group" else "Shared")
    if live["Differs"].any():
        named = {name.removeprefix(_NAMED): live[name].to_numpy() for name in live.columns if name.startswith(_NAMED)}
        greedy = live["Greedy"].to_numpy() if scope == "greedy" else None
        chosen = Units(live["Value"].to_numpy(), live["Group"].to_numpy(), live["Length"].to_numpy(), named, greedy)
        result[live["Row"].to_numpy()] = normalise(chosen)
    return pl.Series("Advantage", result)


def _by_name(transitions: pl.DataFrame) -> list[pl.Series]:
    """Return the raw rewards of each name, one column `Reward.NAME` per name."""
    names = sorted(set(transitions["Rewards.Name"].explode(empty_as_null=False).to_list()))
    alone = ({**dict.fromkeys(names, 0.0), name: 1.0} for name in names)
    return [call_rewards(transitions, weights).alias(f"Reward.{name}") for name, weights in zip(names, alone, strict=True)]


def _returns(calls: pl.DataFrame) -> pl.DataFrame:
    sums: Any = pl.selectors.starts_with("Reward")
    greedy = [pl.col("Greedy").first()] if "Greedy" in calls.columns else []
    return calls.group_by(*KEY, maintain_order=True).agg(sums.sum(), *greedy).rename(lambda name: name.replace("Reward", "Return", 1))


def _rollout_advantages(calls: pl.DataFrame, compare: Compare) -> pl.DataFrame:
    """Return KEY and Advantage of each rollout that has a call of the policy's own: its return among those of its group, counting once."""
    lengths = calls.filter("Own").group_by(*KEY, maintain_order=True).agg(pl.col("Length").sum())
    rollouts = _returns(calls).join(lengths, on=KEY, maintain_order="left")
    units = rollouts.drop(*KEY).rename(lambda name: name.replace("Return", "Value", 1))
    return rollouts.select(*KEY).with_columns(compare(rollouts.select(*GROUP), units))


def _spread(calls: pl.DataFrame, rollouts: pl.DataFrame, column: str) -> pl.Series:
    """Repeat a number of each rollout at each of its calls."""
    return calls.select(*KEY).join(rollouts, on=KEY, how="left", maintain_order="left")[column]


def _among_calls(calls: pl.DataFrame, values: pl.Series, credit: CreditSettings, compare: Compare) -> pl.Series:
    """Compare the value of each own call with those at the same turn of its group, or with all of its group (baseline `transition`)."""
    groups = calls.select(*GROUP, *(["Turn"] if credit.baseline == "turn" else []))
    return _among_own(calls, groups, values, compare)


def _among_own(calls: pl.DataFrame, groups: pl.DataFrame, values: pl.Series, compare: Compare) -> pl.Series:
    """Compare the policy's own calls with each other; the others have 0."""
    own = calls["Own"]
    units = calls.select("Length").with_columns(values.cast(pl.Float64).alias("Value")).filter(own)
    result = np.zeros(len(calls))
    result[own.to_numpy()] = compare(groups.filter(own), units).to_numpy()
    return pl.Series("Advantage", result)
