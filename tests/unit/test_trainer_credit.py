"""Credit assignment: each formula against numbers worked out by hand, and the laws that hold for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spangrad.errors import SettingsError
from spangrad.settings.trainer_learning import Baseline, CreditScheme, CreditSettings
from tests.support.policies import trainer_settings, transition_row
from trainer.credit import assignment
from trainer.credit.assignment import Units
from trainer.credit.learning import BASELINES, Scope, check

SCHEMA = {"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String)}
PAIRS = [(how, baseline) for how, takes in BASELINES.items() for baseline in takes]
HALF = 0.5**0.5  # of two values each lies this many standard deviations off the mean


def normalise(units: Units) -> np.ndarray:
    """GRPO's formula in NumPy; the trainer uses verl's."""
    values, groups = units.values, units.groups
    result = np.zeros(len(values))
    for group in set(groups.tolist()):
        rows = groups == group
        assert rows.sum() > 1, "a group of one must never reach the normaliser"
        result[rows] = (values[rows] - values[rows].mean()) / (values[rows].std(ddof=1) + 1e-6)
    return result


def units(values: list[float]) -> Units:
    """Return units of one group with these values."""
    return Units(np.array(values), np.zeros(len(values), np.int64), np.ones(len(values), np.int64))


def frame(rows: list[dict[str, object]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema_overrides=SCHEMA)


def advantages(rows: pl.DataFrame, how: CreditScheme, baseline: Baseline, **facts: object) -> list[float]:
    credit = CreditSettings(scheme=how, baseline=baseline, **facts)  # type: ignore[arg-type]
    return assignment.advantages(rows, rows["Policy"] == "policy", credit, normalise=normalise).to_list()


NINE_TURN_WIN = [transition_row("win", turn, rewards=(1.0,) if turn == 8 else ()) for turn in range(9)]
ONE_TURN_LOSS = [transition_row("loss", rewards=(0.0,))]
TWO_TURNS = [
    transition_row("a", 0, rewards=(1.0,)),
    transition_row("a", 1, rewards=(0.0,)),
    transition_row("b", 0, rewards=(0.0,)),
    transition_row("b", 1, rewards=(4.0,)),
]
"""Returns 1 and 4."""


def test_returns_sum_rewards_of_all_calls():
    rows = frame(
        [
            transition_row("a", 0, rewards=(-0.25,)),
            transition_row("b", 0),
            transition_row("a", 1, rewards=(1.0, 0.5)),
            transition_row("a", 0, rewards=(8.0,), GroupId="other"),
        ]
    )
    assert assignment.returns(rows).select("GroupId", "RolloutId", "Return").rows() == [
        ("group", "a", 1.25),
        ("group", "b", 0.0),
        ("other", "a", 8.0),
    ]


def test_reward_weights_multiply_rewards_by_name():
    names = pl.Series([["reward", "brevity"], [], ["other", "brevity", "brevity"]])
    rows = frame([transition_row("a", 0, rewards=(1.0, 0.5)), transition_row("a", 1), transition_row("b", 0, rewards=(2.0, 4.0, 8.0))])
    rows = rows.with_columns(names.alias("Rewards.Name"))
    assert assignment.call_rewards(rows, {"brevity": -0.5, "nobody": 7.0}).to_list() == [0.75, 0.0, -4.0]
    assert assignment.call_rewards(rows, {"reward": 0.0, "other": 0.0}).to_list() == [0.5, 0.0, 12.0]
    assert assignment.call_rewards(rows).to_list() == [1.5, 0.0, 14.0]
    assert assignment.returns(rows, {"brevity": 0.0})["Return"].to_list() == [1.0, 2.0]
    # Without brevity a is worth 1 and b 0: the weight decides who won.
    rows = frame([transition_row("a", rewards=(1.0,)), transition_row("b", rewards=(3.0,))])
    rows = rows.with_columns(pl.Series([["reward"], ["brevity"]]).alias("Rewards.Name"))
    assert advantages(rows, "identical", "rollout") == pytest.approx([-HALF, HALF], abs=1e-4)
    assert advantages(rows, "identical", "rollout", reward_weights={"brevity": 0.0}) == pytest.approx([HALF, -HALF], abs=1e-4)


@pytest.mark.parametrize(
    ("how", "baseline", "facts", "by_hand"),
    [
        # Returns 1 and 4: b is above a at each of its calls.
        ("identical", "rollout", {}, [-HALF, -HALF, HALF, HALF]),
        ("identical", "turn", {}, [-HALF, -HALF, HALF, HALF]),
        ("final_only", "rollout", {}, [0, -HALF, 0, HALF]),
        # Values 1, 0 and 4, 4; with gamma 1/8: 1, 0 and 1/2, 4.
        ("reward_to_go", "turn", {}, [-HALF, -HALF, HALF, HALF]),
        ("reward_to_go", "turn", {"gamma": 0.125}, [HALF, -HALF, -HALF, HALF]),
        ("own", "turn", {}, [HALF, -HALF, -HALF, HALF]),
        # All four calls are one group: 1, 1, 4, 4 (mean 5/2, standard deviation sqrt(3)); 1, 0, 4, 4; 1, 0, 0, 4 (sqrt(43/12)).
        ("identical", "transition", {}, [-1.5 / 3**0.5, -1.5 / 3**0.5, 1.5 / 3**0.5, 1.5 / 3**0.5]),
        ("reward_to_go", "transition", {}, [-1.25 / 2.061553, -2.25 / 2.061553, 1.75 / 2.061553, 1.75 / 2.061553]),
        ("own", "transition", {}, [-0.25 / 1.892969, -1.25 / 1.892969, -1.25 / 1.892969, 2.75 / 1.892969]),
        # All four prompts are equal: one state. Steps 1, 0, 4, 4 with gamma 1: mean 9/4, standard deviation sqrt(51/12).
        ("gigpo", "rollout", {}, [-HALF - 1.25 / 2.061553, -HALF - 2.25 / 2.061553, HALF + 1.75 / 2.061553, HALF + 1.75 / 2.061553]),
        ("gigpo", "rollout", {"step_weight": 0.0}, [-HALF, -HALF, HALF, HALF]),
    ],
)
def test_advantages_of_each_scheme_match_hand_computation(
    how: CreditScheme, baseline: Baseline, facts: dict[str, float], by_hand: list[float]
):
    assert advantages(frame(TWO_TURNS), how, baseline, **facts) == pytest.approx(by_hand, abs=1e-4)


def test_baseline_transition_counts_a_rollout_once_a_call():
    """Agent Lightning's grouping: three calls of a return of 1 and one of 0 have mean 3/4 and standard deviation 1/2."""
    rows = frame([*(transition_row("a", turn, rewards=(1.0,) if turn == 2 else ()) for turn in range(3)), transition_row("b")])
    assert advantages(rows, "identical", "transition") == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-4)
    assert advantages(rows, "identical", "rollout") == pytest.approx([HALF, HALF, HALF, -HALF], abs=1e-4)


def test_gigpo_compares_steps_of_equal_prompts_within_the_group():
    home, item, cart = [1, 2], [1, 2, 3], [3, 2, 1]
    rows = frame(
        [
            transition_row("a", 0, PromptIds=home),
            transition_row("a", 1, PromptIds=item, rewards=(1.0,)),
            transition_row("b", 0, PromptIds=home),
            transition_row("b", 1, PromptIds=home),
            transition_row("b", 2, PromptIds=item),
            transition_row("c", 0, PromptIds=cart, rewards=(1.0,)),
            transition_row("d", 0, PromptIds=item, rewards=(0.5,), GroupId="other"),
        ]
    )
    episode = normalise(units([1.0, 0.0, 1.0]))
    at_home = normalise(units([0.5, 0.0, 0.0]))  # a came to 1 a step later, at gamma 1/2; b was there twice
    at_item = normalise(units([1.0, 0.0]))
    by_hand = [
        episode[0] + 2 * at_home[0],
        episode[0] + 2 * at_item[0],
        episode[1] + 2 * at_home[1],
        episode[1] + 2 * at_home[2],
        episode[1] + 2 * at_item[1],
        episode[2],
        0,
    ]
    assert advantages(rows, "gigpo", "rollout", gamma=0.5, step_weight=2.0) == pytest.approx(by_hand, abs=1e-4)


def test_reward_to_go_sums_later_rewards_in_any_row_order():
    rows = frame(
        [
            transition_row("a", 2, rewards=(4.0,)),
            transition_row("b", 0, rewards=(16.0,)),
            transition_row("a", 0, rewards=(1.0,)),
            transition_row("a", 1, rewards=(2.0,)),
        ]
    ).with_columns(Reward=pl.Series([4.0, 16.0, 1.0, 2.0]))
    assert assignment.discounted(rows, 0.5).to_list() == [4.0, 16.0, 3.0, 4.0]
    assert assignment.discounted(rows, 0.0).to_list() == [4.0, 16.0, 1.0, 2.0]


def test_discounted_counts_dropped_calls_and_not_choices_as_time():
    rows = frame([transition_row("a", turn) for turn in (0, 0, 3)]).with_columns(Reward=pl.Series([1.0, 2.0, 8.0]))
    assert assignment.discounted(rows, 0.5).to_list() == [2.0, 3.0, 8.0]


@pytest.mark.parametrize(("how", "baseline"), [(how, baseline) for how, baseline in PAIRS if baseline == "rollout"])
def test_advantages_count_rollout_once_for_any_number_of_turns(how: CreditScheme, baseline: Baseline):
    """A 9-turn win and a 1-turn loss weigh the same; grouped by rows, as verl does, they would be +0.32 and -2.85."""
    prompts = [{**row, "PromptIds": [i + 1]} for i, row in enumerate(NINE_TURN_WIN + ONE_TURN_LOSS)]
    earlier = 0.0 if how == "final_only" else HALF
    assert advantages(frame(prompts), how, baseline) == pytest.approx([earlier] * 8 + [HALF, -HALF], abs=1e-4)


def test_baseline_turn_compares_calls_of_same_turn_only():
    rows = frame(
        [
            transition_row("a", 0, rewards=(0.0,)),
            transition_row("a", 1, rewards=(1.0,)),
            transition_row("b", 0, rewards=(0.0,)),
            transition_row("b", 1, rewards=(0.0,)),
            transition_row("c", 0, rewards=(0.0,)),
        ]
    )
    first = normalise(units([1.0, 0.0, 0.0]))
    assert advantages(rows, "reward_to_go", "turn") == pytest.approx([first[0], HALF, first[1], -HALF, first[2]], abs=1e-4)
    assert advantages(rows, "own", "turn") == pytest.approx([0, HALF, 0, -HALF, 0], abs=1e-4)


@pytest.mark.parametrize(("how", "baseline"), PAIRS)
def test_advantages_of_single_or_equal_values_are_0(how: CreditScheme, baseline: Baseline):
    assert advantages(frame(ONE_TURN_LOSS), how, baseline) == [0.0]
    third = 0.1 + 0.2  # 0.30000000000000004
    assert advantages(frame([transition_row("a", rewards=(third,)), transition_row("b", rewards=(0.3,))]), how, baseline) == [0.0, 0.0]


@pytest.mark.parametrize(("how", "baseline"), PAIRS)
def test_advantages_compare_within_group_and_mode_only(how: CreditScheme, baseline: Baseline):
    rows = frame(
        [
            transition_row("a", rewards=(1.0,)),
            transition_row("b", rewards=(0.0,), GroupId="other"),
            transition_row("c", rewards=(0.0,), Mode="production"),
        ]
    )
    assert advantages(rows, how, baseline) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("how", "baseline", "says"),
    [
        (
            "reward_to_go",
            "rollout",
            r"'reward_to_go' does not go with .*Set trainer.credit.baseline = 'turn', or .*'identical', 'final_only', 'gigpo'",
        ),
        ("own", "rollout", "Set trainer.credit.baseline = 'turn'"),
        ("final_only", "turn", "Set trainer.credit.baseline = 'rollout', or .*'identical', 'reward_to_go', 'own'"),
        ("gigpo", "turn", "Set trainer.credit.baseline = 'rollout'"),
        ("final_only", "transition", "compares all calls of a group. Set trainer.credit.baseline = 'rollout'"),
    ],
)
def test_check_of_unsupported_scheme_and_baseline_raises(how: CreditScheme, baseline: Baseline, says: str):
    with pytest.raises(SettingsError, match=says):
        check(trainer_settings(credit__scheme=how, credit__baseline=baseline))
    assert (how, baseline) not in PAIRS


@pytest.mark.parametrize("facts", [{"reward_weights": {"speed": float("nan")}}, {"step_weight": float("inf")}])
def test_credit_settings_with_weights_that_are_not_finite_are_refused(facts: dict[str, Any]):
    with pytest.raises(ValidationError, match="finite number"):
        CreditSettings(**facts)


POLICIES = st.sampled_from(["policy", "policy", "other"])
ROLLOUTS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=6)


@given(rollouts=ROLLOUTS, pair=st.sampled_from(PAIRS), gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]), data=st.data())
def test_advantages_of_any_rollouts_obey_credit_laws(
    rollouts: list[list[float]], pair: tuple[CreditScheme, Baseline], gamma: float, data: st.DataObject
):
    rows = [
        transition_row(
            str(i), turn, rewards=(reward,), GroupId=str(i % 2), PromptIds=[data.draw(st.integers(1, 2))], Policy=data.draw(POLICIES)
        )
        for i, rewards in enumerate(rollouts)
        for turn, reward in enumerate(rewards)
    ]
    whole = frame(rows)
    shuffled = data.draw(st.permutations(range(len(rows))))
    own = whole["Policy"] == "policy"
    named = whole.with_columns(N=pl.int_range(pl.len()))
    own_calls = [table.filter(pl.col("Policy") == "policy")["N"].to_list() for table in (named, named[shuffled])]

    credited = dict(zip(own_calls[0], advantages(whole, *pair, gamma=gamma), strict=True))
    assert advantages(whole[shuffled], *pair, gamma=gamma) == pytest.approx([credited[n] for n in own_calls[1]], abs=1e-6)

    calls = whole.with_columns(assignment.call_rewards(whole), own.alias("Own"))
    assert assignment.discounted(calls, 1.0).filter(whole["Turn"] == 0).to_list() == pytest.approx(
        [sum(rewards) for rewards in rollouts], abs=1e-9
    )
    by_hand = [sum(gamma**k * reward for k, reward in enumerate(rewards[turn:])) for rewards in rollouts for turn in range(len(rewards))]
    assert assignment.discounted(calls, gamma).to_list() == pytest.approx(by_hand, abs=1e-9)


@given(rollouts=ROLLOUTS)
def test_advantages_of_group_sum_to_0_and_final_only_sums_to_that_of_rollout(rollouts: list[list[float]]):
    whole = frame(
        [
            transition_row(str(i), turn, rewards=(reward,), GroupId=str(i % 2))
            for i, rewards in enumerate(rollouts)
            for turn, reward in enumerate(rewards)
        ]
    )
    whole = whole.with_columns(
        Everywhere=pl.Series(advantages(whole, "identical", "rollout")), Last=pl.Series(advantages(whole, "final_only", "rollout"))
    )
    per_rollout = whole.group_by("GroupId", "RolloutId").agg(pl.col("Everywhere").unique(), pl.col("Last").sum())
    assert per_rollout["Everywhere"].list.len().to_list() == [1] * len(rollouts), "every call of a rollout has the rollout's advantage"
    assert per_rollout["Everywhere"].list.first().to_list() == pytest.approx(per_rollout["Last"].to_list(), abs=1e-9)
    sums = per_rollout.group_by("GroupId").agg(pl.col("Last").sum())["Last"].to_numpy()
    assert sums == pytest.approx(np.zeros(len(sums)), abs=1e-3), "a group's advantages cancel, each rollout counting once"


def test_final_only_gives_return_to_last_call_that_is_not_masked():
    rows = frame([*(transition_row("a", turn) for turn in range(3)), transition_row("b", 0), transition_row("b", 1, rewards=(1.0,))])
    own, credit = pl.repeat(value=True, n=5, eager=True), CreditSettings(scheme="final_only")
    for masked, expected in ([2, 4], [0, -HALF, 0, HALF, 0]), ([0, 3], [0, 0, -HALF, 0, HALF]), ([3, 4], [0, 0, -HALF, 0, 0]):
        trained = pl.Series([row not in masked for row in range(5)])
        credited = assignment.advantages(rows, own, credit, normalise=normalise, trained=trained)
        assert credited.to_list() == pytest.approx(expected, abs=1e-4), "masked calls count in the comparison"
        assert assignment.live_groups(rows, own, credit, trained).height == 1


@pytest.mark.parametrize(("how", "baseline"), [pair for pair in PAIRS if pair[0] != "own"])
def test_advantages_count_rewards_of_other_policies_and_go_to_own_calls(how: CreditScheme, baseline: Baseline):
    rows = frame(
        [
            transition_row("won", 0, Policy="planner", PromptIds=[1]),
            transition_row("won", 1, rewards=(1.0,)),
            transition_row("lost", 0, Policy="planner", PromptIds=[2]),
            transition_row("lost", 1, rewards=(0.0,)),
        ]
    )
    credited = assignment.advantages(rows, rows["Policy"] == "planner", CreditSettings(scheme=how, baseline=baseline), normalise=normalise)
    assert credited.to_list() == pytest.approx([HALF, -HALF], abs=1e-4)


SCOPES = [
    transition_row("a", rewards=(1.0,), GroupId="mixed"),
    transition_row("b", rewards=(0.0,), GroupId="mixed"),
    transition_row("c", rewards=(1.0,), GroupId="equal"),
    transition_row("d", rewards=(1.0,), GroupId="equal"),
    transition_row("e", rewards=(3.0,), GroupId="lonely"),
]


@pytest.mark.parametrize(("scope", "seen"), [("group", [1, 0]), ("batch", [1, 0, 1, 1]), ("all", [1, 0, 1, 1, 3])])
def test_advantages_scope_selects_compared_values(scope: Scope, seen: list[float]):
    rows, compared = frame(SCOPES), list[float]()

    def watch(units: Units) -> np.ndarray:
        compared.extend(units.values.tolist())
        assert units.lengths.tolist() == [2] * len(units.values)
        return units.values + 10

    credited = assignment.advantages(rows, rows["Policy"] == "policy", scope=scope, normalise=watch)
    assert compared == seen
    assert credited.to_list() == [row["Rewards.Value"][0] + 10 if i < len(seen) else 0 for i, row in enumerate(SCOPES)]  # type: ignore[index]


@pytest.mark.parametrize("scope", ["batch", "all"])
def test_advantages_of_equal_values_skip_normalise(scope: Scope):
    rows = frame(SCOPES[2:4])
    credited = assignment.advantages(rows, rows["Policy"] == "policy", scope=scope, normalise=lambda _: np.full(2, np.nan))
    assert credited.to_list() == [0, 0]


def test_advantages_units_separate_rewards_by_name():
    names = {"Rewards.Name": ["reward", "style"]}
    rows = frame([transition_row("a", rewards=(1.0, 0.0), **names), transition_row("b", rewards=(0.0, 2.0), **names)])
    compared: list[Units] = []

    def watch(units: Units) -> np.ndarray:
        compared.append(units)
        return units.values

    credit = CreditSettings(estimator="gdpo", reward_weights={"style": 0.5})
    assignment.advantages(rows, rows["Policy"] == "policy", credit, normalise=watch)
    (units,) = compared
    assert {name: part.tolist() for name, part in units.named.items()} == {"reward": [1, 0], "style": [0, 2]}
    assert units.values.tolist() == [1, 1], "equal values, unlike parts: GDPO tells them apart"


def test_live_groups_have_differing_values():
    rows = frame([*SCOPES, transition_row("f", rewards=(9.0,), GroupId="equal", Policy="other")])
    own = rows["Policy"] == "policy"
    assert assignment.live_groups(rows, own, CreditSettings())["GroupId"].to_list() == ["mixed"]
    turns = frame(
        [transition_row("a", 0, rewards=(1.0,)), transition_row("a", 1), transition_row("b", 0), transition_row("b", 1, rewards=(1.0,))]
    )
    own = turns["Policy"] == "policy"
    assert assignment.live_groups(turns, own, CreditSettings()).is_empty()
    assert len(assignment.live_groups(turns, own, CreditSettings(scheme="own", baseline="turn"))) == 1
