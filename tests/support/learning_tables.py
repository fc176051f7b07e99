"""The tables of docs/guides/learning.md: every estimator and loss of verl's by name, what it needs, and its value here and by verl.

In: two fixed batches. Out: Markdown lines. Invariant: "here" goes the way that a training step goes, "verl" calls verl's own function on
tensors that are laid out here by hand. `python -m tests.support.learning_tables` writes them into the page; a test compares.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from spangrad.settings import TrainerSettings
from tests.support.policies import PROMPT, logprobs_of, sample, sampled_rows
from tests.support.sections import trainer_settings, transition_row
from trainer.credit import assignment, learning
from trainer.credit.assignment import CreditRule
from trainer.credit.estimators import estimator, over_tokens
from trainer.data.batch import layout
from trainer.data.chains import chains
from trainer.data.merge import merge, separate
from trainer.optim.losses.corrected import actor_config, correction_of
from trainer.optim.optimizer import VerlOptimizer

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "learning.md"
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
OPTIONS: dict[str, dict[str, float]] = {
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0},
    "dro": {"dro_beta": 0.5},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.5},
}
"""Of losses that are told apart from others only so, on a small batch."""


SEQUENCES: dict[str, dict[str, Any]] = {"weights": {"weights": "sequence"}, "rejects": {"reject": {"seq_sum_k2": "0.3"}}}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "`token-mean`": {},
    "`token-sum`": {"loss__aggregation": "token-sum"},
    "`seq-mean-token-sum`": {"loss__aggregation": "seq-mean-token-sum"},
    "`seq-mean-token-mean`": {"loss__aggregation": "seq-mean-token-mean"},
    "`seq-mean-token-sum-norm`, `loss_scale_factor = 8` (Dr. GRPO)": {
        "loss__aggregation": "seq-mean-token-sum-norm",
        "loss__options": {"loss_scale_factor": 8},
    },
    "`gspo`, `seq-mean-token-mean` (as in its paper)": {
        "loss__name": "gspo",
        "loss__aggregation": "seq-mean-token-mean",
        "clip_ratio": 0.02,
    },
    '`correction.weights = "sequence"`': {"recompute_logprobs": True, "correction": SEQUENCES["weights"]},
    "`correction.reject.seq_sum_k2`, `seq-mean-token-mean`": {
        "recompute_logprobs": True,
        "correction": SEQUENCES["rejects"],
        "loss__aggregation": "seq-mean-token-mean",
    },
    '`bypass_mode`, `correction.weights = "sequence"`, `reinforce`': {
        "loss__name": "bypass_mode",
        "correction": {**SEQUENCES["weights"], "objective": "reinforce"},
    },
    "`bypass_mode`, `correction.reject.seq_sum_k2`, `seq-mean-token-mean`": {
        "loss__name": "bypass_mode",
        "correction": SEQUENCES["rejects"],
        "loss__aggregation": "seq-mean-token-mean",
    },
}
"""Aggregations and corrections of whole sequences, each with the settings that make it."""


def rollouts() -> pl.DataFrame:
    """The calls of the fixed batch of the estimators."""
    rows: list[dict[str, object]] = []
    for name, (group, turns) in TURNS.items():
        for turn, (length, rewards) in enumerate(turns):
            facts = {"GroupId": group, "ResponseIds": [7] * length, "Logprobs": [-0.5] * length}
            rows.append(transition_row(name, turn, **facts, **{"Rewards.Name": list(rewards), "Rewards.Value": list(rewards.values())}))
    return pl.DataFrame(rows, schema_overrides=SCHEMA)


def advantages_here(settings: TrainerSettings) -> list[float]:
    """Of each call."""
    calls = rollouts()
    if settings.credit.estimator == "remax":
        rows = [transition_row(f"greedy-{group}", Mode="greedy", GroupId=group, rewards=(worth,)) for group, worth in GREEDY.items()]
        calls = assignment.with_greedy(calls, pl.DataFrame(rows), settings.credit.reward_weights)
    return assignment.advantages(calls, calls["Policy"] == "policy", CreditRule.of(settings), normalise=estimator(settings)).to_list()


def advantages_by_verl(name: str, level: str, **parameters: Any) -> list[float]:
    """Of each call: verl's function on rows of a rollout each, with an observation of two tokens between turns, or of a call each.

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
    found, _ = get_adv_estimator_fn(name)(**facts)
    return [float(found[row, end]) for row, end in ends]


def told(name: str, tokens: int) -> dict[str, np.ndarray]:
    """What a forward pass might say of the tokens of the fixed batch, in their order."""
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
    rows, links = chains(calls, calls["Policy"] == "policy", settings.credit.reward_weights)
    batch = replace(layout(separate(rows, pl.zeros(len(rows), eager=True)), lineage=[0], divisor=4), chains=links)
    cells = batch.response_mask.astype(bool)
    known: dict[str, np.ndarray] = {}
    for key, flat in told(settings.credit.estimator, int(cells.sum())).items():
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
    for key, flat in told(settings.credit.estimator, int(cells.sum())).items():
        whole = np.full(cells.shape, 99.0)  # what is said of observations must not matter
        whole[cells] = flat
        facts[key] = torch.from_numpy(whole)
    groups = (
        {"gamma": settings.credit.gamma, "lam": settings.credit.gae_lambda}
        if settings.credit.estimator == "gae"
        else {"index": [one for one, _ in TURNS.values()]}
    )
    found, _ = get_adv_estimator_fn(settings.credit.estimator)(**facts, **groups)
    return found.numpy()[cells].tolist()


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
        ours, theirs = (" ".join(f"{values[first]:+.3f}" for first in at) for values in columns)
        lines.append(f"| `{name}` | {scopes[facts.scope]} | {facts.needs or ''} | {ours} | {theirs} |")
    return lines


def baseline_table() -> list[str]:
    """A line a baseline: GRPO's advantage of each call of the group `x`, with credit `identical`."""
    lines = ["| `trainer.credit.baseline`, `trainer.credit.estimator` | here | verl |", "| --- | --- | --- |"]
    calls = sum(len(turns) for group, turns in TURNS.values() if group == "x")
    for baseline, name in [("rollout", "grpo"), ("transition", "grpo"), ("transition", "rloo"), ("transition", "opo")]:
        settings = trainer_settings(estimator=name, baseline=baseline, reward_weights=WEIGHTS)  # type: ignore[arg-type]
        columns = (advantages_here(settings), advantages_by_verl(name, baseline))
        ours, theirs = (" ".join(f"{value:+.3f}" for value in values[:calls]) for values in columns)
        lines.append(f"| `{baseline}`, `{name}` | {ours} | {theirs} |")
    return lines


def sampled(model: Path) -> tuple[pl.DataFrame, pl.Series]:
    """The fixed batch of the losses: 12 responses whose logprobs are those of other weights, so that some ratios are clipped."""
    off = np.random.default_rng(5)
    rows = pl.DataFrame(sampled_rows(model, 12, temperature=1.0, seed=1, Version=-1))
    moved = [[float(np.float32(min(one + off.normal(0, 0.4), -1e-3))) for one in row] for row in rows["Logprobs"].to_list()]
    return rows.with_columns(pl.Series("Logprobs", moved)), pl.Series(np.linspace(-1.5, 1, 12))


def loss_settings(name: str, **changes: Any) -> TrainerSettings:
    """Of a loss with its options for the fixed batch."""
    return trainer_settings(loss__name=name, loss__options=OPTIONS.get(name, {}), **changes)  # type: ignore[arg-type]


def loss_here(model: Path, settings: TrainerSettings) -> float:
    """The loss of an optimizer step on the fixed batch."""
    rows, worth = sampled(model)
    engine = VerlOptimizer(model, settings)
    torch.manual_seed(0)
    return engine.step(layout(separate(rows, worth), lineage=[0]))["loss"]


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Rows of different lengths in one tensor."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


def loss_by_verl(model: Path, settings: TrainerSettings) -> float:
    """Verl's function on the fixed batch, with logprobs by transformers."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    rows, worth = sampled(model)
    current = [logprobs_of(model, p, r) for p, r in zip(rows["PromptIds"].to_list(), rows["ResponseIds"].to_list(), strict=True)]
    old = rows["Logprobs"].to_list()
    config = actor_config(settings, None)
    config.global_batch_info.clear()
    torch.manual_seed(0)
    loss, _ = get_policy_loss_fn(settings.loss.name)(
        old_log_prob=padded(old),
        log_prob=padded(current),
        advantages=padded([[value] * len(row) for value, row in zip(worth, old, strict=True)]),
        response_mask=padded([[1.0] * len(row) for row in old]).bool(),
        loss_agg_mode=settings.loss.aggregation,
        config=config,
    )
    return float(loss)


def loss_table(model: Path) -> list[str]:
    """A line a loss."""
    lines = [
        "| `trainer.loss.name` | `trainer.loss.options` | looks at | here, a row a call | here, merged | verl, a row a rollout |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, facts in learning.LOSSES.items():
        settings = loss_settings(name, clip_ratio=0.02)
        options = ", ".join(f"`{one}`" for one in facts.options)
        numbers = " | ".join(f"{value:+.4f}" for value in losses(model, settings))
        lines.append(f"| `{name}` | {options} | {'rollouts' if facts.by_rollout else 'tokens'} | {numbers} |")
    return lines


def aggregation_table(model: Path) -> list[str]:
    """A line an aggregation, and a line a correction of whole sequences."""
    lines = ["| settings | here, a row a call | here, merged | verl, a row a rollout |", "| --- | --- | --- | --- |"]
    for named, facts in AGGREGATIONS.items():
        settings = trainer_settings(**facts)
        numbers = " | ".join(f"{value:+.4f}" for value in losses(model, settings))
        lines.append(f"| {named} | {numbers} |")
    return lines


def losses(model: Path, settings: TrainerSettings) -> tuple[float, float, float]:
    """The loss of the fixed rollouts with a row a call, with merged rows, and by verl with a row a rollout."""
    merged = settings.model_copy(update={"merge": True})
    rows, worth = trajectories(model)
    apart, together = (step(model, one, rows, worth)["loss"] for one in (settings, merged))
    return apart, together, trajectory_loss_by_verl(model, settings)


@functools.lru_cache(maxsize=2)
def trajectories(model: Path) -> tuple[pl.DataFrame, pl.Series]:
    """The fixed rollouts of the losses: of four, three, two and one calls, whose prompts repeat all before; one that rewrites its history.

    Their logprobs are those of other weights, so that some ratios are clipped.
    """
    off = np.random.default_rng(7)
    rows: list[dict[str, object]] = []
    worth: list[float] = []
    for number, calls in enumerate([4, 3, 2, 1, 3]):
        history = [*PROMPT[:3], PROMPT[3] + number % 4, *PROMPT[4:]]
        for turn in range(calls):
            if number == 4 and turn == 2:
                history = list(PROMPT)
            response, logprobs = sample(model, history, 1 + (turn + 2 * number) % 4, 1.0, seed=100 * number + turn)
            moved = [float(np.float32(min(value + off.normal(0, 0.3), -1e-3))) for value in logprobs]
            facts = {"PromptIds": list(history), "ResponseIds": response, "Logprobs": moved, "Version": -1}
            rows.append(transition_row(f"r{number}", turn, **facts))
            worth.append([1.0, -0.5, 0.25, -1.5, 0.75][number])
            history = [*history, *response, 2, 1, 4]
    return pl.DataFrame(rows, schema_overrides=SCHEMA), pl.Series(worth)


def step(model: Path, settings: TrainerSettings, rows: pl.DataFrame, worth: pl.Series) -> dict[str, float]:
    """Metrics of an optimizer step on calls."""
    engine = VerlOptimizer(model, settings)
    torch.manual_seed(0)
    return engine.step(layout((merge if settings.merge else separate)(rows, worth), lineage=[0]))


def trajectory_loss_by_verl(model: Path, settings: TrainerSettings) -> float:
    """Verl's function on a row a rollout, an observation of two masked tokens between its calls; logprobs by transformers."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    rows, worth = trajectories(model)
    columns: dict[str, dict[str, list[float]]] = {}
    for row, value in zip(rows.iter_rows(named=True), worth, strict=True):
        current = logprobs_of(model, row["PromptIds"], row["ResponseIds"])
        of = columns.setdefault(row["RolloutId"], {"old": [], "current": [], "mask": [], "advantage": []})
        for name, values in (("old", row["Logprobs"]), ("current", current), ("mask", [1.0] * len(current))):
            of[name] += [*values, 0.0, 0.0]
        of["advantage"] += [value] * (len(current) + 2)
    old, current, mask, advantages = (padded([of[name] for of in columns.values()]) for name in ("old", "current", "mask", "advantage"))
    config = actor_config(settings, None)
    config.global_batch_info.clear()
    config.global_batch_info.update(global_batch_size=len(columns), loss_scale_factor=config.loss_scale_factor)
    weights = None
    if settings.loss.recompute_logprobs:
        found, mask, _ = compute_rollout_correction_and_rejection_mask(current, old, mask, **correction_of(settings))
        weights, old = found.batch["rollout_is_weights"] if found else None, current
    loss, _ = get_policy_loss_fn(settings.loss.name)(
        old_log_prob=old,
        log_prob=current,
        advantages=advantages,
        response_mask=mask.bool(),
        loss_agg_mode=settings.loss.aggregation,
        config=config,
        rollout_is_weights=weights,
    )
    return float(loss)


def write(page: Path, tables: list[list[str]]) -> None:
    """Put tables in the place of those with the same first line."""
    text = page.read_text()
    for table in tables:
        head, _, rest = text.partition(table[0] + "\n")
        after = rest.splitlines(keepends=True)
        while after and after[0].startswith("|"):
            after.pop(0)
        text = head + "\n".join(table) + "\n" + "".join(after)
    page.write_text(text)


if __name__ == "__main__":
    from examples.two_tools.model import build_model

    with tempfile.TemporaryDirectory() as directory:
        build_model(Path(directory), seed=0)
        write(PAGE, [estimator_table(), baseline_table(), loss_table(Path(directory)), aggregation_table(Path(directory))])
