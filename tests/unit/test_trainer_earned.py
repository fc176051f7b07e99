"""Rewards of dropped calls: they stay in the return, and count for another call only where it led to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.settings.trainer_learning import Baseline, CreditScheme, CreditSettings
from tests.support.policies import transition_row
from trainer.credit.assignment import Units, advantages, returns
from trainer.data.chains import chains
from transition_builder.rewards.spread import SPREAD, spread
from transition_builder.schemas import GIVEN

SCHEMA = {"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String), "Rewards.CallId": pl.List(pl.String)}
KEPT, DROPPED, NO_TURN = "kept", "dropped", "no turn"
"""Outcomes of a call: a transition; a policy call that was dropped; a call that failed or is not selected, which is no turn."""


@dataclass(frozen=True)
class Call:
    """A call of a rollout, in order."""

    reward: float = 0.0
    outcome: str = KEPT


Rollouts = Sequence[Sequence[Call]]
LAST = 100.0
"""The reward of each rollout itself."""


def turns(rollout: Sequence[Call]) -> list[int]:
    """Return the time of each call: its turn or, for a call that is no turn, the next turn."""
    counted = np.cumsum([call.outcome != NO_TURN for call in rollout])
    return [int(count) - (call.outcome != NO_TURN) for call, count in zip(rollout, counted, strict=True)]


def transitions(rollouts: Rollouts) -> pl.DataFrame:
    """The transitions that the builder makes of rollouts, whose kept calls carry all rewards."""
    given_rows, placed = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, rollout in enumerate(rollouts):
        attempt = {"RunId": "run", "RolloutId": f"r{name}", "Attempt": 0}
        about = {"Mode": "train", "Role": "", "RuleHash": "", "TraceId": "t", "SpanId": "s"}
        given_rows.append({**attempt, **about, "CallId": "", "Name": "reward", "Value": LAST, "Source": "runner"})
        for order, (call, turn) in enumerate(zip(rollout, turns(rollout), strict=True)):
            identity = {**attempt, "CallId": f"r{name}-{order}"}
            given_rows.append({**identity, **about, "Name": "air", "Value": call.reward, "Source": "air"})
            of_turn = None if call.outcome == NO_TURN else turn
            placed.append({**identity, "Order": order, "ChoiceIndex": 0, "Turn": of_turn, "Kept": call.outcome == KEPT})
    rows = pl.DataFrame(placed, schema_overrides={"Turn": pl.Int64, "Attempt": pl.UInt16})
    lists = {row["CallId"]: row for row in spread(pl.DataFrame(given_rows, schema=dict(GIVEN)), rows).iter_rows(named=True)}
    kept = [
        transition_row(row["RolloutId"], row["Turn"], CallId=row["CallId"], **_lists(lists.get(row["CallId"], {})))
        for row in rows.filter("Kept").iter_rows(named=True)
    ]
    return pl.DataFrame(kept, schema_overrides=SCHEMA)


def _lists(row: dict[str, Any]) -> dict[str, object]:
    return {f"Rewards.{name}": row.get(f"Rewards.{name}", []) for name in SPREAD if name != "Source"}


def values(
    frame: pl.DataFrame, how: CreditScheme, baseline: Baseline = "turn", gamma: float = 1.0, trained: pl.Series | None = None
) -> dict[str, float]:
    """The value of each trained call, which the comparison is told and gives back."""
    own = pl.repeat(value=True, n=len(frame), eager=True) if trained is None else trained
    compared = list[np.ndarray]()

    def comparison(units: Units) -> np.ndarray:
        compared.append(units.values)
        return units.values

    credit = CreditSettings(scheme=how, baseline=baseline, gamma=gamma)
    result = advantages(frame, own, credit, normalise=comparison, scope="all")
    # Where all values are equal nothing is compared; such examples tell nothing.
    return dict(zip(frame.filter(own)["CallId"], result, strict=True)) if compared else {}


ONE = [[Call(1.0), Call(2.0, DROPPED), Call(4.0, NO_TURN), Call(8.0)], [Call(16.0, DROPPED), Call(32.0, NO_TURN), Call(64.0)]]
"""Kept are r0-0 (turn 0), r0-3 (turn 2) and r1-2 (turn 1)."""


def test_spread_of_dropped_calls_keeps_call_id_and_turn_of_rewards() -> None:
    rows = transitions(ONE).select("CallId", "Turn", "Rewards.Value", "Rewards.CallId", "Rewards.Turn").rows()
    assert rows == [
        ("r0-0", 0, [1.0, 2.0, 4.0], ["r0-0", "r0-1", "r0-2"], [0, 1, 2]),
        ("r0-3", 2, [LAST, 8.0], ["", "r0-3"], [2, 2]),
        ("r1-2", 1, [LAST, 16.0, 32.0, 64.0], ["", "r1-0", "r1-1", "r1-2"], [1, 0, 1, 1]),
    ]


@pytest.mark.parametrize(
    ("how", "gamma", "expected"),
    [
        ("own", 1.0, {"r0-0": 1.0, "r0-3": LAST + 8, "r1-2": LAST + 64}),
        ("reward_to_go", 1.0, {"r0-0": LAST + 15, "r0-3": LAST + 8, "r1-2": LAST + 64}),
        # One turn later the dropped one, two turns later what is no turn and the last.
        ("reward_to_go", 0.5, {"r0-0": 1 + 2 / 2 + (4 + 8 + LAST) / 4, "r0-3": LAST + 8, "r1-2": LAST + 64}),
    ],
)
def test_advantages_use_rewards_earned_and_caused_not_carried(how: CreditScheme, gamma: float, expected: dict[str, float]) -> None:
    assert values(transitions(ONE), how, gamma=gamma) == pytest.approx(expected)


def test_returns_count_every_reward_of_any_call() -> None:
    frame = transitions(ONE)
    assert returns(frame)["Return"].to_list() == [LAST + 15, LAST + 112]
    assert set(values(frame, "identical", "rollout").values()) == {LAST + 15, LAST + 112}


def test_gigpo_step_values_are_reward_to_go() -> None:
    frame = transitions(ONE)
    # All prompts are alike: one state, whose steps are compared by their reward-to-go.
    returned, togo = values(frame, "identical", "rollout"), values(frame, "reward_to_go")
    assert values(frame, "gigpo", "rollout") == pytest.approx({call: returned[call] + togo[call] for call in returned})


def test_reward_weights_multiply_rewards_of_dropped_calls() -> None:
    frame = transitions(ONE)
    credit = CreditSettings(scheme="reward_to_go", baseline="turn", reward_weights={"air": 0.5})
    own = pl.repeat(value=True, n=len(frame), eager=True)
    computed = advantages(frame, own, credit, normalise=lambda units: units.values, scope="all")
    assert computed.to_list() == [LAST + 7.5, LAST + 4, LAST + 32]


def test_chains_rewards_start_at_first_trained_call() -> None:
    frame = transitions(ONE)
    rows, rewards = chains(frame, pl.repeat(value=True, n=len(frame), eager=True), {})
    assert dict(zip(rows["CallId"], rewards, strict=True)) == {"r0-0": 7.0, "r0-3": LAST + 8, "r1-2": LAST + 64}


def test_chains_reward_of_masked_call_goes_to_predecessor() -> None:
    frame = transitions([[Call(1.0), Call(2.0), Call(4.0)], [Call(8.0), Call(16.0), Call(32.0)]])
    trained = frame["CallId"].is_in(["r0-0", "r0-2", "r1-1", "r1-2"])
    assert values(frame, "own", trained=trained) == {"r0-0": 1.0, "r0-2": LAST + 4, "r1-1": 16.0, "r1-2": LAST + 32}
    assert values(frame, "reward_to_go", trained=trained)["r0-0"] == LAST + 7
    rows, rewards = chains(frame, trained, {})
    assert dict(zip(rows["CallId"], rewards, strict=True)) == {"r0-0": 3.0, "r0-2": LAST + 4, "r1-1": 16.0, "r1-2": LAST + 32}


outcomes = st.sampled_from([KEPT, KEPT, DROPPED, NO_TURN])
calls = st.builds(Call, st.integers(-8, 8).map(float), outcomes)
some_rollouts = st.lists(
    st.lists(calls, min_size=1, max_size=6).filter(lambda rollout: any(call.outcome == KEPT for call in rollout)), min_size=2, max_size=4
)


@given(some_rollouts)
def test_returns_are_independent_of_dropped_calls(rollouts: Rollouts) -> None:
    expected = [LAST + sum(call.reward for call in rollout) for rollout in rollouts]
    assert returns(transitions(rollouts))["Return"].to_list() == pytest.approx(expected)


@given(some_rollouts, st.sampled_from([1.0, 0.5, 0.0]), st.data())
def test_advantages_of_kept_calls_equal_those_of_whole_rollout(rollouts: Rollouts, gamma: float, data: st.DataObject) -> None:
    """Own values leave out the rewards of dropped calls; reward-to-go includes all later rewards, those of dropped calls too."""
    own, togo = dict[str, float](), dict[str, float]()
    for name, rollout in enumerate(rollouts):
        when = turns(rollout)
        last = max(at for at, call in enumerate(rollout) if call.outcome == KEPT)
        for at, call in enumerate(rollout):
            if call.outcome != KEPT:
                continue
            own[f"r{name}-{at}"] = call.reward + LAST * (at == last)
            after = sum(gamma ** (when[later] - when[at]) * rollout[later].reward for later in range(at + 1, len(rollout)))
            togo[f"r{name}-{at}"] = call.reward + after + LAST * gamma ** (when[last] - when[at])
    frame = transitions(rollouts).sample(fraction=1.0, shuffle=True, seed=data.draw(st.integers(0, 9)))
    for computed, expected in ((values(frame, "own"), own), (values(frame, "reward_to_go", gamma=gamma), togo)):
        assert not computed or computed == pytest.approx(expected)


@given(some_rollouts, st.data())
def test_chains_rewards_from_any_call_sum_to_its_reward_to_go(rollouts: Rollouts, data: st.DataObject) -> None:
    frame = transitions(rollouts)
    trained = pl.Series(data.draw(st.lists(st.booleans(), min_size=len(frame), max_size=len(frame))), dtype=pl.Boolean)
    rows, rewards = chains(frame, trained, {})
    assert rows["CallId"].to_list() == frame.filter(trained)["CallId"].to_list()
    for place, call in enumerate(rows["CallId"]):
        name, at = (int(part) for part in call.removeprefix("r").split("-"))
        following = rewards[place:][(rows["RolloutId"] == rows["RolloutId"][place]).to_numpy()[place:]]
        assert following.sum() == pytest.approx(LAST + sum(one.reward for one in rollouts[name][at:]))
