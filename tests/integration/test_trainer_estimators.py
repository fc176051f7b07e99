"""Advantages of every estimator by name: against verl's own functions, on tensors that are laid out here by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from spangrad.settings import TrainerSettings
from tests.conftest import DocsTable
from tests.support.policies import changed, trainer_settings, transition_row
from trainer.credit import assignment, learning
from trainer.credit.estimators import estimator, over_tokens
from trainer.data.batch import layout
from trainer.data.chains import chains
from trainer.data.merge import separate
from trainer.optim.process import prepare_process

prepare_process()  # verl reads its platform when it is first imported

SCHEMA = {"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String)}
WEIGHTS = {"reward": 1.0, "style": 0.5}
TURNS = {  # group, and for each turn the tokens of its response and its rewards
    "a": ("x", [(2, {}), (1, {"style": 1.0}), (3, {"reward": 1.0})]),
    "b": ("x", [(2, {"reward": 0.0})]),
    "c": ("x", [(1, {"style": -1.0}), (4, {"reward": 0.5})]),
    "d": ("y", [(5, {"style": 1.0, "reward": 1.0})]),
    "e": ("y", [(2, {}), (2, {"reward": 0.25})]),
}
"""Rollouts of the fixed batch of the estimators."""
GREEDY = {"x": 0.5, "y": 1.75}
"""Return of each group's greedy rollout."""
ABLE = [name for name, facts in learning.ESTIMATORS.items() if not facts.by_token]


def rollouts() -> pl.DataFrame:
    """The calls of the fixed batch of the estimators."""
    rows: list[dict[str, object]] = []
    for name, (group, turns) in TURNS.items():
        for turn, (length, rewards) in enumerate(turns):
            facts = {"GroupId": group, "ResponseIds": [7] * length, "Logprobs": [-0.5] * length}
            rows.append(transition_row(name, turn, **facts, **{"Rewards.Name": list(rewards), "Rewards.Value": list(rewards.values())}))
    return pl.DataFrame(rows, schema_overrides=SCHEMA)


def advantages_here(settings: TrainerSettings) -> list[float]:
    """Return the advantage of each call by the product's estimator."""
    calls = rollouts()
    if settings.credit.estimator == "remax":
        rows = [transition_row(f"greedy-{group}", Mode="greedy", GroupId=group, rewards=(worth,)) for group, worth in GREEDY.items()]
        calls = assignment.with_greedy(calls, pl.DataFrame(rows), settings.credit.reward_weights)
    return assignment.advantages(calls, calls["Policy"] == "policy", settings.credit, normalise=estimator(settings)).to_list()


def advantages_by_verl(name: str, level: str, **parameters: Any) -> list[float]:
    """Return the advantage of each call by verl's function, on rows of a rollout or a call each, with two observed tokens between turns.

    Args:
        name: the estimator's.
        level: what is a row: `rollout`; `turn`, a call that is worth its own rewards, grouped by turn; `transition`, a call that is worth
            its rollout's return, in one group with all calls of its group.
        parameters: more of the function's.
    """
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rows: list[tuple[str, list[tuple[int, float]], dict[str, float]]] = []
    for group, turns in TURNS.values():
        worth = [sum(WEIGHTS[key] * value for key, value in rewards.items()) for _, rewards in turns]
        named = {key: sum(rewards.get(key, 0.0) for _, rewards in turns) for key in WEIGHTS}
        if level == "rollout":
            rows.append((group, [(length, 0.0) for length, _ in turns[:-1]] + [(turns[-1][0], sum(worth))], named))
        elif level == "turn":
            rows += [(f"{group}-{turn}", [(length, worth[turn])], named) for turn, (length, _) in enumerate(turns)]
        else:
            rows += [(group, [(length, sum(worth))], named) for length, _ in turns]
    mask, rewards, ends = np.zeros((len(rows), 12)), np.zeros((len(rows), 12)), []
    for row, (_, pieces, _) in enumerate(rows):
        at = 0
        for length, value in pieces:
            mask[row, at : at + length] = 1
            rewards[row, at + length - 1] = value
            ends.append((row, at + length - 1))
            at += length + 2
    # GDPO finds a row's last token by its attention.
    attention = np.arange(13) <= np.array([max(end for at, end in ends if at == row) for row in range(len(rows))])[:, None] + 1
    gdpo = {"gdpo_reward_keys": list(WEIGHTS), "gdpo_reward_weights": list(WEIGHTS.values())} if name == "gdpo" else {}
    apart = {
        "non_tensor_batch": {key: np.array([named[key] for _, _, named in rows]) for key in WEIGHTS},
        "batch": {"prompts": torch.ones(len(rows), 1), "attention_mask": torch.from_numpy(attention.astype(np.int64))},
    }
    groups = np.array([group for group, _, _ in rows])
    if name == "grpo_vectorized" or level == "turn":
        groups = np.unique(groups, return_inverse=True)[1]
    facts: dict[str, Any] = {
        "token_level_rewards": torch.from_numpy(rewards),
        "response_mask": torch.from_numpy(mask),
        **({} if name == "reinforce_plus_plus" else {"index": groups}),
        **({"config": AlgoConfig(**gdpo)} if not name.endswith("optimal_token_baseline") else {}),
        **(apart if gdpo else {}),
        **({"reward_baselines": torch.tensor([GREEDY[group] for group, _, _ in rows])} if name == "remax" else {}),
        **parameters,
    }
    advantages, _ = get_adv_estimator_fn(name)(**facts)
    return [float(advantages[row, end]) for row, end in ends]


def forward_values(name: str, tokens: int) -> dict[str, np.ndarray]:
    """Return made-up results of a forward pass over the tokens of the fixed batch, in their order."""
    rng = np.random.default_rng(11)
    if name == "gae":
        return {"values": rng.normal(0, 0.5, tokens).astype(np.float32)}
    return {
        "old_log_probs": np.log(rng.uniform(0.2, 0.9, tokens)).astype(np.float32),
        "sum_pi_squared": rng.uniform(0.2, 0.9, tokens).astype(np.float32),
    }


def tokens_here(settings: TrainerSettings) -> list[float]:
    """The advantage of each sampled token, by rollout and turn, of an estimator that looks at each."""
    calls = rollouts().sample(fraction=1, shuffle=True, seed=3)
    rows, rewards = chains(calls, calls["Policy"] == "policy", settings.credit.reward_weights)
    batch = layout(separate(rows, pl.zeros(len(rows), eager=True)), lineage=[0], divisor=4, rewards=rewards)
    cells = batch.response_mask.astype(bool)
    known: dict[str, np.ndarray] = {}
    for key, flat in forward_values(settings.credit.estimator, int(cells.sum())).items():
        known[key] = np.zeros(cells.shape, np.float32)
        known[key][cells] = flat
    advantages, _ = over_tokens(settings, batch, **known)
    return advantages[cells].tolist()


def tokens_by_verl(settings: TrainerSettings, *, observation: int) -> list[float]:
    """The same by verl's function on rows of a rollout each, with so many tokens of observation between turns."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask, rewards = np.zeros((len(TURNS), 16)), np.zeros((len(TURNS), 16))
    for row, (_, turns) in enumerate(TURNS.values()):
        at = 0
        for length, paid in turns:
            mask[row, at : at + length] = 1
            rewards[row, at + length - 1] = sum(WEIGHTS[key] * value for key, value in paid.items())
            at += length + observation
    cells = mask.astype(bool)
    facts: dict[str, Any] = {"token_level_rewards": torch.from_numpy(rewards), "response_mask": torch.from_numpy(mask)}
    for key, flat in forward_values(settings.credit.estimator, int(cells.sum())).items():
        whole = np.full(cells.shape, 99.0)  # what is said of observations must not matter
        whole[cells] = flat
        facts[key] = torch.from_numpy(whole)
    groups = (
        {"gamma": settings.credit.gamma, "lam": settings.credit.gae_lambda}
        if settings.credit.estimator == "gae"
        else {"index": [group for group, _ in TURNS.values()]}
    )
    advantages, _ = get_adv_estimator_fn(settings.credit.estimator)(**facts, **groups)
    return advantages.numpy()[cells].tolist()


def estimator_table() -> list[str]:
    """A line an estimator: the advantage of each of the five rollouts at its first token; most have it at all of them."""
    lines = ["| `trainer.credit.estimator` | compares | needs | here | verl |", "| --- | --- | --- | --- | --- |"]
    scopes = {"group": "a group", "batch": "a group, scaled by the batch", "all": "the batch", "greedy": "a rollout with its greedy one"}
    firsts = np.cumsum([0, *(len(turns) for _, turns in TURNS.values())])[:-1]
    tokens = np.cumsum([0, *(sum(length for length, _ in turns) for _, turns in TURNS.values())])[:-1]
    for name, facts in learning.ESTIMATORS.items():
        settings = trainer_settings(estimator=name, reward_weights=WEIGHTS)
        if facts.by_token:
            columns, at = (tokens_here(settings), tokens_by_verl(settings, observation=0)), tokens
        else:
            columns, at = (advantages_here(settings), advantages_by_verl(name, "rollout")), firsts
        ours, verl = (" ".join(f"{values[first]:+.3f}" for first in at) for values in columns)
        lines.append(f"| `{name}` | {scopes[facts.scope]} | {facts.needs or ''} | {ours} | {verl} |")
    return lines


def baseline_table() -> list[str]:
    """A line a baseline: GRPO's advantage of each call of the group `x`, with credit `identical`."""
    lines = ["| `trainer.credit.baseline`, `trainer.credit.estimator` | here | verl |", "| --- | --- | --- |"]
    calls = sum(len(turns) for group, turns in TURNS.values() if group == "x")
    for baseline, name in [("rollout", "grpo"), ("transition", "grpo"), ("transition", "rloo"), ("transition", "opo")]:
        settings = trainer_settings(estimator=name, baseline=baseline, reward_weights=WEIGHTS)  # type: ignore[arg-type]
        columns = (advantages_here(settings), advantages_by_verl(name, baseline))
        ours, verl = (" ".join(f"{value:+.3f}" for value in values[:calls]) for values in columns)
        lines.append(f"| `{baseline}`, `{name}` | {ours} | {verl} |")
    return lines


@pytest.mark.parametrize("name", ABLE)
def test_advantages_over_rollouts_match_verl(name: Any):
    ours = advantages_here(trainer_settings(estimator=name, reward_weights=WEIGHTS))
    assert ours == pytest.approx(advantages_by_verl(name, "rollout"), abs=1e-6)
    assert len(set(ours)) > 1


# A turn that only one rollout reached counts in what verl knows of a batch, and not here: scope `batch` is left out.
@pytest.mark.parametrize(
    "name", [name for name in ABLE if learning.ESTIMATORS[name].scope not in {"batch", "greedy"} and name != "grpo_passk"]
)
def test_advantages_over_turns_match_verl(name: Any):
    settings = trainer_settings(estimator=name, credit__scheme="own", baseline="turn", reward_weights=WEIGHTS)
    calls = rollouts()
    alone = calls.select((calls.select("GroupId", "Turn").is_duplicated()).alias("shared"))["shared"].to_list()
    by_verl = advantages_by_verl(name, "turn")
    if learning.ESTIMATORS[name].scope == "group":  # verl leaves a value that stands alone as it is
        by_verl = [value if shared else 0.0 for value, shared in zip(by_verl, alone, strict=True)]
    assert advantages_here(settings) == pytest.approx(by_verl, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in ABLE if learning.ESTIMATORS[name].needs is None and name != "gdpo"])
def test_advantages_over_transitions_match_verl(name: Any):
    settings = trainer_settings(estimator=name, baseline="transition", reward_weights=WEIGHTS)
    ours = advantages_here(settings)
    assert ours == pytest.approx(advantages_by_verl(name, "transition"), abs=1e-6)
    if name in {"grpo", "rloo"}:
        by_rollout = advantages_here(changed(settings, {"baseline": "rollout"}))
        assert ours != pytest.approx(by_rollout, abs=1e-3), "a rollout of three calls counts three times"


@pytest.mark.parametrize(
    ("facts", "observation"),
    [
        ({"estimator": "gae"}, 2),
        ({"estimator": "gae", "gamma": 0.9, "gae_lambda": 0.8}, 2),
        ({"estimator": "optimal_token_baseline"}, 0),  # verl's goes by columns, observations among them; a chain here has none
        ({"estimator": "tir_optimal_token_baseline"}, 2),
    ],
)
def test_advantages_over_tokens_match_verl(facts: dict[str, Any], observation: int):
    settings = trainer_settings(reward_weights=WEIGHTS, **facts)
    assert tokens_here(settings) == pytest.approx(tokens_by_verl(settings, observation=observation), abs=1e-6)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_advantages_over_tokens_of_chain_alone_in_its_group_are_0(name: Any):
    """The second rollout is masked whole: by verl's function the first would have its raw return."""
    settings = trainer_settings(estimator=name)
    worth = {"a": ("x", 1.0), "b": ("x", 1.0), "c": ("y", 1.0), "d": ("y", 0.0)}
    rows = pl.DataFrame([transition_row(rollout, rewards=(reward,), GroupId=group) for rollout, (group, reward) in worth.items()])
    calls, rewards = chains(rows, rows["RolloutId"] != "b", {})
    batch = layout(separate(calls, pl.zeros(len(calls), eager=True)), lineage=[0], divisor=4, rewards=rewards)
    halves = np.full(batch.logprobs.shape, 0.5, np.float32)
    advantages, _ = over_tokens(settings, batch, old_log_probs=np.log(halves), sum_pi_squared=halves)
    assert advantages[batch.response_mask.astype(bool)].tolist() == pytest.approx([0, 0, 0.5, 0.5, -0.5, -0.5])


def test_norm_by_std_false_matches_dr_grpo():
    ours = advantages_here(trainer_settings(norm_by_std=False, reward_weights=WEIGHTS))
    assert ours == pytest.approx(advantages_by_verl("grpo", "rollout", norm_adv_by_std_in_grpo=False))


def test_advantages_match_tables_of_learning_page(docs_table: DocsTable):
    docs_table("guides/learning.md", estimator_table())
    docs_table("guides/learning.md", baseline_table())
