"""Rollouts as chains of rows: who follows whom, and where rewards go."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tests.support.policies import trainer_settings, transition_row
from trainer.credit.assignment import returns
from trainer.data.assemble import assemble, with_token_values
from trainer.data.batch import TokenValues
from trainer.data.chains import chains
from trainer.data.source import BatchRollout, Group, Loaded

SCHEMA = {"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String)}


def test_chains_rewards_of_untrained_calls_go_to_call_before_or_first():
    rows = pl.DataFrame(
        [
            transition_row("a", 0, rewards=(1.0,), Policy="other"),
            transition_row("a", 1, rewards=(2.0,)),
            transition_row("a", 2, rewards=(4.0,), Policy="other"),
            transition_row("a", 3, rewards=(8.0,)),
            transition_row("b", 0, rewards=(16.0,)),
            transition_row("b", 1, rewards=(32.0,), Policy="other"),
            transition_row("c", 0, rewards=(64.0,), GroupId="later"),
            transition_row("d", 0, rewards=(128.0,), Policy="other"),
        ],
        schema_overrides=SCHEMA,
    )
    calls, rewards = chains(rows[::-1], rows[::-1]["Policy"] == "policy", {"reward": 0.5})
    assert calls["CallId"].to_list() == ["call-a-1", "call-a-3", "call-b-0", "call-c-0"]
    assert rewards.tolist() == [3.5, 4.0, 24.0, 32.0]


@given(st.lists(st.lists(st.tuples(st.integers(-8, 8), st.booleans()), min_size=1, max_size=4), min_size=1, max_size=5), st.randoms())
def test_chains_rewards_sum_to_return_in_any_order(rollouts: list[list[tuple[int, bool]]], chance: object):
    rows = [
        transition_row(f"r{i}", turn, rewards=(float(reward),), Policy="policy" if own else "other")
        for i, turns in enumerate(rollouts)
        for turn, (reward, own) in enumerate(turns)
    ]
    chance.shuffle(rows)  # type: ignore[attr-defined]
    frame = pl.DataFrame(rows, schema_overrides=SCHEMA)
    own = frame["Policy"] == "policy"
    calls, rewards = chains(frame, own, {})
    expected = dict(returns(frame).select("RolloutId", "Return").rows())
    assert len(calls) == own.sum() == len(rewards)
    assert calls["RolloutId"].to_list() == sorted(calls["RolloutId"])
    for name in set(calls["RolloutId"]):
        rows_of = [row for row, other in enumerate(calls["RolloutId"]) if other == name]
        assert sum(rewards[rows_of].tolist()) == expected[name]
        assert calls["Turn"][rows_of].to_list() == sorted(calls["Turn"][rows_of].to_list())


def test_assemble_for_token_estimator_leaves_advantages_to_optimizer():
    rows = pl.DataFrame(
        [
            transition_row("b", 0, rewards=(1.0,)),
            transition_row("a", 0),
            transition_row("a", 1, rewards=(2.0,)),
            transition_row("a", 2, rewards=(4.0,), PromptIds=[1] * 99),
        ],
        schema_overrides=SCHEMA,
    )
    loaded = Loaded([BatchRollout(Group("run", "train", "spec", "group"), name, 0, 0) for name in "ab"], rows)

    def never(_: object) -> object:
        raise AssertionError

    batch, facts, calls = assemble(loaded, trainer_settings(estimator="gae", max_tokens_per_device=9), never, lineage=[0], divisor=4)  # type: ignore[arg-type]
    assert batch.call_rewards is not None
    assert (batch.rollout.tolist(), batch.group.tolist(), batch.call_rewards.tolist()) == ([0, 0, 1, -1], [0, 0, 0, -1], [0, 6, 1, 0])
    assert not batch.advantages.any()
    assert (batch.real_rows, facts["transitions"], facts["masked_too_long"]) == (3, 3, 1)
    # The engine gives each token its own; the mean over a call's tokens is kept.
    of_tokens = np.array([[1, 3], [2, 2], [-1, 0], [9, 9]], np.float32)
    kept = with_token_values(calls, batch.response_mask, TokenValues(of_tokens, batch.logprobs, batch.logprobs))
    assert kept.select("CallId", "Return", "Advantage").rows() == [("call-a-0", 6, 2), ("call-a-1", 6, 2), ("call-b-0", 1, -0.5)]
    assert kept.select("Staleness", "SampledVersions", "InputTokens", "OutputTokens", "Reward").row(1) == (0, [0], 3, 2, 2)


def test_with_token_values_of_merged_calls_divides_a_row_by_call():
    rows = pl.DataFrame(
        [
            transition_row("a", 0, PromptIds=[1], ResponseIds=[2, 3]),
            transition_row("a", 1, rewards=(1.0,), PromptIds=[1, 2, 3, 9], ResponseIds=[4], Logprobs=[-1.0]),
        ],
        schema_overrides=SCHEMA,
    )
    loaded = Loaded([BatchRollout(Group("run", "train", "spec", "group"), "a", 0, 0)], rows)
    settings = trainer_settings(merge=True)
    batch, _, calls = assemble(loaded, settings, lambda units: units.values, lineage=[0], divisor=1)  # type: ignore[arg-type]
    assert batch.response_mask.tolist() == [[1, 1, 0, 1]]
    values = TokenValues(*(np.array([row], np.float32) for row in ([1, 2, 99, 6], [-1, -2, 99, -3], [0.5, 1, 99, 2])))
    kept = with_token_values(calls, batch.response_mask, values)
    names = ("CallId", "Advantage", "TrainerLogprobs", "Entropies")
    assert kept.select(names).rows() == [("call-a-0", 1.5, [-1, -2], [0.5, 1]), ("call-a-1", 6, [-3], [2])], "an observation has no value"
