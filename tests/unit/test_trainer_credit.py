"""Credit assignment: whole values, and the laws that hold for all of them."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import transition_row
from spangrad.errors import SettingsError
from trainer import credit

SCHEMA = {"Rewards.Value": pl.List(pl.Float64)}


def normalise(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """GRPO's formula in NumPy; the trainer uses verl's."""
    result = np.zeros(len(values))
    for group in set(groups.tolist()):
        rows = groups == group
        assert rows.sum() > 1, "a group of one must never reach the normaliser"
        result[rows] = (values[rows] - values[rows].mean()) / (values[rows].std(ddof=1) + 1e-6)
    return result


def frame(rows: list[dict[str, object]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema_overrides=SCHEMA)


def advantages(rows: pl.DataFrame, how: str, baseline: str, gamma: float = 1.0) -> list[float]:
    return credit.advantages(rows, rows["Policy"] == "policy", credit=how, baseline=baseline, gamma=gamma, normalise=normalise).to_list()


NINE_TURN_WIN = [transition_row("win", turn, rewards=(1.0,) if turn == 8 else ()) for turn in range(9)]
ONE_TURN_LOSS = [transition_row("loss", rewards=(0.0,))]


def test_the_return_is_the_sum_of_all_rewards_of_all_calls():
    rows = frame(
        [
            transition_row("a", 0, rewards=(-0.25,)),
            transition_row("b", 0),
            transition_row("a", 1, rewards=(1.0, 0.5)),
            transition_row("a", 0, rewards=(8.0,), GroupId="other"),
        ]
    )
    assert credit.returns(rows).select("GroupId", "RolloutId", "Return").rows() == [
        ("group", "a", 1.25),
        ("group", "b", 0.0),
        ("other", "a", 8.0),
    ]
    assert credit.identical(rows).to_list() == [1.25, 0.0, 1.25, 8.0]


def test_reward_to_go_counts_what_follows_whatever_the_order_of_rows():
    rows = frame(
        [
            transition_row("a", 2, rewards=(4.0,)),
            transition_row("b", 0, rewards=(16.0,)),
            transition_row("a", 0, rewards=(1.0,)),
            transition_row("a", 1, rewards=(2.0,)),
        ]
    )
    assert credit.reward_to_go(rows, 0.5).to_list() == [4.0, 16.0, 3.0, 4.0]
    assert credit.reward_to_go(rows, 0.0).to_list() == [4.0, 16.0, 1.0, 2.0]


def test_a_rollout_counts_once_however_many_turns_it_has():
    found = advantages(frame(NINE_TURN_WIN + ONE_TURN_LOSS), "identical", "rollout")
    assert found == pytest.approx([0.7071] * 9 + [-0.7071], abs=1e-4)


def test_turn_groups_compare_calls_of_the_same_turn_only():
    rows = frame(
        [
            transition_row("a", 0, rewards=(0.0,)),
            transition_row("a", 1, rewards=(1.0,)),
            transition_row("b", 0, rewards=(0.0,)),
            transition_row("b", 1, rewards=(0.0,)),
            transition_row("c", 0, rewards=(0.0,)),
        ]
    )
    first = normalise(np.array([1.0, 0.0, 0.0]), np.zeros(3))
    assert advantages(rows, "reward_to_go", "turn") == pytest.approx([first[0], 0.7071, first[1], -0.7071, first[2]], abs=1e-4)
    assert advantages(rows, "reward_to_go", "turn", gamma=0.0) == pytest.approx([0, 0.7071, 0, -0.7071, 0], abs=1e-4)


def test_one_value_alone_and_equal_values_have_no_advantage():
    assert advantages(frame(ONE_TURN_LOSS), "identical", "rollout") == [0.0]
    third = 0.1 + 0.2  # 0.30000000000000004
    rows = frame([transition_row("a", rewards=(third,)), transition_row("b", rewards=(0.3,)), transition_row("c", 1, rewards=(7.0,))])
    assert advantages(rows.head(2), "identical", "rollout") == [0.0, 0.0]
    assert advantages(rows, "identical", "turn") == [0.0, 0.0, 0.0]


def test_groups_and_modes_are_never_compared_with_each_other():
    rows = frame(
        [
            transition_row("a", rewards=(1.0,)),
            transition_row("b", rewards=(0.0,), GroupId="other"),
            transition_row("c", rewards=(0.0,), Mode="production"),
        ]
    )
    assert advantages(rows, "identical", "rollout") == [0.0, 0.0, 0.0]


def test_reward_to_go_has_no_one_value_a_rollout():
    with pytest.raises(SettingsError, match=r"trainer\.baseline = 'turn'"):
        advantages(frame(NINE_TURN_WIN), "reward_to_go", "rollout")


ROLLOUTS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=6)


@given(rollouts=ROLLOUTS, data=st.data())
def test_laws(rollouts: list[list[float]], data: st.DataObject):
    rows = [
        transition_row(str(i), turn, rewards=(reward,), GroupId=str(i % 2))
        for i, rewards in enumerate(rollouts)
        for turn, reward in enumerate(rewards)
    ]
    whole = frame(rows)
    by_rollout = np.array(advantages(whole, "identical", "rollout"))
    shuffled = data.draw(st.permutations(range(len(rows))))

    assert credit.reward_to_go(whole, 1.0).filter(whole["Turn"] == 0).to_list() == pytest.approx([sum(one) for one in rollouts], abs=1e-9)
    assert np.array(advantages(whole[shuffled], "identical", "rollout")) == pytest.approx(by_rollout[shuffled], abs=1e-6)
    per_rollout = whole.with_columns(Advantage=pl.Series(by_rollout)).group_by("GroupId", "RolloutId").agg(pl.col("Advantage").unique())
    assert per_rollout["Advantage"].list.len().to_list() == [1] * len(rollouts), "every call of a rollout has the rollout's advantage"
    sums = per_rollout.group_by("GroupId").agg(pl.col("Advantage").list.first().sum())["Advantage"].to_numpy()
    assert sums == pytest.approx(np.zeros(len(sums)), abs=1e-3), "a group's advantages cancel, each rollout counting once"


def test_rewards_on_another_policys_calls_count_and_only_own_calls_get_an_advantage():
    rows = frame(
        [
            transition_row("won", 0, Policy="planner"),
            transition_row("won", 1, rewards=(1.0,)),
            transition_row("lost", 0, Policy="planner"),
            transition_row("lost", 1, rewards=(0.0,)),
        ]
    )
    planner = rows["Policy"] == "planner"
    for how, baseline in (("identical", "rollout"), ("identical", "turn"), ("reward_to_go", "turn")):
        found = credit.advantages(rows, planner, credit=how, baseline=baseline, gamma=1.0, normalise=normalise)
        assert found.to_list() == pytest.approx([0.7071, -0.7071], abs=1e-4)
