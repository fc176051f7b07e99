"""ReMax: what a group is compared with, when it has nothing to be compared with, and what a step makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.policies import changed, trainer_settings, transition_row
from tests.support.trainers import SPEC, FakeOptimizer, FakeSource, committed, group, settings, wired, write_base
from trainer.credit import assignment
from trainer.data.group_checks import find_skips
from trainer.data.source import Group, Loaded
from trainer.ledger.skips import SkipReason

REMAX = trainer_settings(estimator="remax", run_id="run", reward_weights={"style": 0.5})
GROUP = Group("run", "train", "spec", "group")


def minus_greedy(units: assignment.Units):
    assert units.greedy is not None
    return units.values - units.greedy


def greedy(reward: float = 0.5, **changes: object) -> dict[str, object]:
    return transition_row("greedy", rewards=(reward,), **{"Mode": "greedy", "Temperature": 0.0, **changes})


def rollouts(*rewards: float) -> list[dict[str, object]]:
    return [transition_row(f"r{i}", rewards=(reward,)) for i, reward in enumerate(rewards)]


def loaded(rows: list[dict[str, object]], of_greedy: list[dict[str, object]]) -> Loaded:
    schema = pl.DataFrame([greedy()]).schema
    return Loaded([], pl.DataFrame(rows), pl.DataFrame(of_greedy, schema=schema))


def reasons(rows: list[dict[str, object]], of_greedy: list[dict[str, object]], **changes: object) -> dict[Group, SkipReason]:
    chosen = changed(REMAX, changes)
    skips = find_skips([GROUP], loaded(rows, of_greedy), chosen, lineage=(0, 1, 2, 3), tokenizer_hash="tokenizer")
    return {group: skip.reason for group, skip in skips.items()}


NEW = {"Version": 3, "Versions.Start": [0], "Versions.Version": [3]}


@pytest.mark.parametrize(
    ("of_greedy", "reason"),
    [
        ([greedy(**NEW)], None),
        ([], SkipReason.NO_BASELINE),
        ([greedy(**NEW, GroupId="another")], SkipReason.NO_BASELINE),
        ([greedy(**NEW, Temperature=1.0)], SkipReason.NO_BASELINE),
        ([greedy(Version=2)], SkipReason.NO_BASELINE),
        ([greedy(**NEW), {**greedy(Version=2), "Turn": 1}], SkipReason.NO_BASELINE),
        # Another model's call, a judge's say: it is part of the task.
        ([greedy(**NEW), {**greedy(Policy="judge", Temperature=1.0), "Turn": 1}], None),
        ([greedy(Policy="judge")], SkipReason.NO_BASELINE),
    ],
)
def test_find_skips_remax_group_without_sound_greedy_rollout_is_no_baseline(of_greedy: list[dict[str, object]], reason: SkipReason | None):
    rows = [{**row, **NEW} for row in rollouts(1.0, 0.0)]
    assert reasons(rows, of_greedy) == ({GROUP: reason} if reason else {})


def test_find_skips_remax_max_staleness_applies_to_greedy_rollout():
    rows = [{**row, **NEW} for row in rollouts(1.0, 0.0)]
    assert reasons(rows, [greedy(Version=2)], max_staleness=1) == {}
    assert reasons(rows, [greedy(Version=1)], max_staleness=1) == {GROUP: SkipReason.NO_BASELINE}


def test_find_skips_remax_single_rollout_is_trained_and_one_equal_to_greedy_skipped():
    for rewards, skip, reason in (
        ((1.0,), True, None),
        ((1.0, 1.0), True, None),
        ((0.5, 0.5), True, SkipReason.EQUAL),
        ((0.5,), False, None),
    ):
        rows = [{**row, **NEW} for row in rollouts(*rewards)]
        assert reasons(rows, [greedy(**NEW)], skip_equal_groups=skip) == ({GROUP: reason} if reason else {})


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.lists(st.floats(-2, 2), min_size=1, max_size=3), st.randoms())
def test_minus_greedy_advantage_is_return_less_mean_greedy_return(rewards: list[float], of_greedy: list[float], random):
    """Law: for each rollout by itself, whatever others there are and in whatever order; several greedy rollouts count as their mean."""
    rows, names = rollouts(*rewards), {"Rewards.Name": ["reward"]}
    baselines = [{**greedy(reward), **names, "RolloutId": f"greedy-{i}"} for i, reward in enumerate(of_greedy)]
    random.shuffle(rows)
    frame = assignment.with_greedy(pl.DataFrame(rows), pl.DataFrame(baselines))
    advantages = assignment.advantages(frame, frame["Policy"] == "policy", REMAX.credit, normalise=minus_greedy)
    mean = sum(of_greedy) / len(of_greedy)
    assert advantages.to_list() == pytest.approx([row["Rewards.Value"][0] - mean for row in rows], abs=1e-8)  # type: ignore[index]


def test_minus_greedy_weights_rewards_on_both_sides():
    turns = [
        transition_row("r0", 0),
        transition_row("r0", 1, rewards=(1.0,)),
        {**transition_row("r1", rewards=(3.0,)), "Rewards.Name": ["style"]},
    ]
    frame = pl.DataFrame(turns, schema_overrides={"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String)})
    rows = assignment.with_greedy(frame, pl.DataFrame([{**greedy(2.0), "Rewards.Name": ["style"]}]), REMAX.credit.reward_weights)
    advantages = assignment.advantages(rows, rows["Policy"] == "policy", REMAX.credit, normalise=minus_greedy)
    assert advantages.to_list() == [0.0, 0.0, 0.5]


@dataclass
class WithGreedy(FakeSource):
    """Each group has a greedy rollout, whose return is told; None: it failed."""

    returns: dict[str, float | None] = field(default_factory=dict)

    def load(self, groups: Sequence[Group]) -> Loaded:
        loaded_groups = super().load(groups)
        facts = loaded_groups.transitions.row(0, named=True)
        rows = [
            greedy(worth, GroupId=group.group_id, BuildSpec=SPEC, **{name: facts[name] for name in ("TokenizerHash", "Version")})
            for group in groups
            if (worth := self.returns[group.group_id]) is not None
        ]
        return replace(loaded_groups, greedy=pl.DataFrame(rows, schema=pl.DataFrame([greedy()]).schema))


def test_remax_trainer_step_uses_greedy_returns(tmp_path: Path):
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", estimator="remax")
    optimizer = FakeOptimizer()
    source = WithGreedy(["a", "b", "c"], returns={"a": 1.0, "b": None, "c": 0.25})
    trainer = wired(chosen, source, optimizer)
    trainer.normalise = minus_greedy
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "c-0", "c-1"]}, "greedy rollouts are in no batch"
    assert trainer.ledger.skips.reasons() == {group("b"): SkipReason.NO_BASELINE}
    (batch,) = optimizer.batches
    assert batch.advantages[:, 0].tolist() == [0.0, -1.0, 0.75, -0.25]
    metrics = trainer.ledger.versions()[-1].metrics
    assert (metrics["mean_return"], metrics["greedy_return"], metrics["rollouts"]) == (0.5, 0.625, 4)
