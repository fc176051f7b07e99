"""The same rows through the optimizer of one process and through verl's trainer with 2 ranks: the same loss and gradient.

Each test gives the shared optimizers another loss or estimator, and all of them step alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from spangrad.settings import TrainerSettings
from tests.integration.ray_cluster.optimizers import RayOptimizers, settings, use
from tests.support.policies import NO_ALARM, chained, sampled_rows, transition_row
from tests.support.trainers import LOSS_OPTIONS, mostly_slow
from trainer.credit import assignment, learning
from trainer.credit.estimators import estimator
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer

pytestmark = pytest.mark.timeout(600)
BASE: dict[str, Any] = {"max_tokens_per_device": 1, "alarms__logprob": NO_ALARM}
"""One micro-batch a row: what `clip_cov` and `kl_cov` compare is then the same on any number of ranks. Logprobs are made up."""
ROWS = 7
"""Odd, so that two ranks need a no-op row."""
NEAR = {"rel": 1e-3, "abs": 1e-6}
COMPARED = (
    *("loss", "grad_norm", "advantage_std", "reference_kl", "entropy", "clip_fraction", "clip_low", "clip_high", "ppo_kl", "updated"),
)
"""Metrics that do not depend on the division into micro-batches."""


QUICK = {"vanilla", "gspo", "grpo", "gae"}
"""Losses and estimators of the ordinary suite: a token's, a response's, a group's, a critic's."""


@pytest.fixture(scope="module")
def optimizers(ray_optimizers: RayOptimizers) -> dict[int, VerlOptimizer]:
    """Optimizers with no and 2 ranks under Ray, each with a critic and a reference."""
    return ray_optimizers.reset(**BASE)


def step(optimizer: VerlOptimizer, chosen: TrainerSettings, batch: Batch) -> dict[str, float]:
    """Step by another loss and estimator than the optimizer was made with."""
    use(optimizer, chosen)
    return optimizer.step(batch)


def require_alike(steps: dict[int, dict[str, float]]) -> None:
    alone, ranks = steps[0], steps[2]
    assert ranks.keys() == alone.keys()
    compared = [name for name in COMPARED if name in alone]
    assert [ranks[name] for name in compared] == pytest.approx([alone[name] for name in compared], **NEAR), compared


def batch_of(rows: pl.DataFrame, worth: pl.Series, optimizer: VerlOptimizer) -> Batch:
    """Rows that were sampled by a policy a little away, so that ratios and KL terms are not those of one."""
    batch = layout(separate(rows, worth), lineage=[0], divisor=optimizer.data_parallel_size)
    away = np.random.default_rng(3).normal(0, 0.2, batch.logprobs.shape)[:1].astype(np.float32)
    mask = batch.response_mask.astype(np.float32)
    return replace(batch, logprobs=(batch.logprobs + away) * mask, staleness=np.full_like(batch.staleness, -1))


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> pl.DataFrame:
    return pl.DataFrame(sampled_rows(tiny_model, 4, temperature=1.0, seed=1) + sampled_rows(tiny_model, ROWS - 4, temperature=0.7, seed=2))


@pytest.mark.parametrize("name", mostly_slow(list(learning.LOSSES), QUICK))
def test_loss_on_ranks_equals_one_process(name: Any, optimizers: dict[int, VerlOptimizer], tiny_model: Path, rows: pl.DataFrame) -> None:
    chosen = settings(tiny_model, **BASE, loss__name=name, loss__options=LOSS_OPTIONS.get(name, {}))
    worth = pl.Series(np.linspace(-1, 1, ROWS))
    steps = {count: step(optimizer, chosen, batch_of(rows, worth, optimizer)) for count, optimizer in optimizers.items()}
    require_alike(steps)
    assert steps[0]["grad_norm"] > 0
    alone, ranks = optimizers[0].token_values, optimizers[2].token_values
    assert ranks.logprobs[:ROWS] == pytest.approx(alone.logprobs[:ROWS], abs=1e-4)
    assert ranks.entropies[:ROWS] == pytest.approx(alone.entropies[:ROWS], abs=1e-4)


@pytest.mark.parametrize("name", mostly_slow([name for name, facts in learning.ESTIMATORS.items() if not facts.by_token], QUICK))
def test_estimator_on_ranks_equals_one_process(
    name: Any, optimizers: dict[int, VerlOptimizer], tiny_model: Path, rows: pl.DataFrame
) -> None:
    weights = {"reward": 1.0, "style": 0.5} if name == "gdpo" else {}
    chosen = settings(tiny_model, **BASE, estimator=name, reward_weights=weights)
    rewards = [
        {name: value for name, value in transition_row("", rewards=(at % 3 / 2, at % 2)[: 1 + bool(weights)]).items() if "Rewards" in name}
        | {"Rewards.Name": ["reward", "style"][: 1 + bool(weights)], "GroupId": "xy"[at % 2]}
        for at in range(ROWS)
    ]
    calls = rows.drop("GroupId", *[column for column in rows.columns if "Rewards" in column]).hstack(pl.DataFrame(rewards))
    graded = calls
    if name == "remax":
        greedy = [transition_row(f"greedy-{group}", Mode="greedy", GroupId=group, rewards=(0.5,)) for group in "xy"]
        graded = assignment.with_greedy(calls, pl.DataFrame(greedy), chosen.credit.reward_weights)
    worth = assignment.advantages(graded, graded["Policy"] == "policy", chosen.credit, normalise=estimator(chosen))
    require_alike({count: step(optimizer, chosen, batch_of(calls, worth, optimizer)) for count, optimizer in optimizers.items()})


@pytest.mark.parametrize("name", mostly_slow([name for name, facts in learning.ESTIMATORS.items() if facts.by_token], QUICK))
def test_token_estimator_on_ranks_equals_one_process(name: Any, optimizers: dict[int, VerlOptimizer], tiny_model: Path) -> None:
    """GAE's step is the one of PPO with a critic."""
    chosen = settings(tiny_model, **BASE, estimator=name)
    steps: dict[int, dict[str, float]] = {}
    for count, optimizer in optimizers.items():
        batch = chained(tiny_model, 6, divisor=optimizer.data_parallel_size)
        steps[count] = step(optimizer, chosen, replace(batch, staleness=np.full_like(batch.staleness, -1)))
    require_alike(steps)
    assert ("critic_loss" in steps[0]) == (name == "gae")
    if name == "gae":
        assert steps[2]["critic_loss"] == pytest.approx(steps[0]["critic_loss"], **NEAR)


def test_step_with_one_reshaped_row_on_ranks_equals_one_process(optimizers: dict[int, VerlOptimizer], tiny_model: Path, rows: pl.DataFrame):
    """Its own pass has no loss, and a no-op row that the batch of four has not."""
    chosen = settings(tiny_model, **BASE)
    steps: dict[int, dict[str, float]] = {}
    for count, optimizer in optimizers.items():
        batch = batch_of(rows[:4], pl.Series(np.linspace(-1, 1, 4)), optimizer)
        assert len(batch.reshaped) == 4
        steps[count] = step(optimizer, chosen, replace(batch, reshaped=np.arange(4) == 1))
    require_alike(steps)
    assert steps[2]["reshaped_weight_mean"] == pytest.approx(steps[0]["reshaped_weight_mean"], **NEAR)


def test_three_grpo_steps_on_ranks_equal_one_process(optimizers: dict[int, VerlOptimizer], tiny_model: Path, rows: pl.DataFrame) -> None:
    """Rows leave the queue after each step."""
    import transfer_queue

    chosen = settings(tiny_model, **BASE, recompute_logprobs=True, epochs=2, mini_batches=2)
    worth = pl.Series(np.linspace(-1, 1, ROWS))
    for _ in range(3):
        require_alike({count: step(optimizer, chosen, batch_of(rows, worth, optimizer)) for count, optimizer in optimizers.items()})
        assert not any(transfer_queue.kv_list().values())
