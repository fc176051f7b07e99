"""A step that is refused leaves no trace: weights, moments and gradients are as before, wherever its bad row lay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from spangrad.errors import BadRowsError, LedgerError, TrainerError
from tests.support.policies import sampled_rows, state_facts, trainer_settings
from tests.support.trainers import save
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.phases import StepPhases

ROWS = 8
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "max_tokens_per_device": 24}
"""Two rows a micro-batch, and a rate at which any trace shows."""


@pytest.fixture(scope="module")
def good(tiny_model: Path) -> Batch:
    return batch(tiny_model, seed=5)


@pytest.fixture(scope="module")
def other(tiny_model: Path) -> Batch:
    return batch(tiny_model, seed=1)


def batch(model: Path, *, seed: int) -> Batch:
    rows = pl.DataFrame(sampled_rows(model, ROWS, temperature=1.0, seed=seed))
    return layout(separate(rows, pl.Series(np.resize([1.0, -1.0], ROWS))), lineage=[0])


def wrong_at(batch: Batch, row: int) -> Batch:
    """The batch with one row whose logprobs are not those of the weights that it names."""
    logprobs = batch.logprobs.copy()
    logprobs[row] -= 9 * batch.response_mask[row]
    return replace(batch, logprobs=logprobs)


def micro_batches(engine: VerlOptimizer, batch: Batch, row: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return, for each micro-batch of a forward pass in order, whether it holds a row."""
    fsdp, order = engine._workers._rank._models["policy"].engine, list[bool]()
    original = fsdp.forward_step

    def recorded(micro_batch: Any, **options: Any) -> Any:
        order.append(bool((micro_batch["rollout_log_probs"] < -8).any()))
        return original(micro_batch, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fsdp, "forward_step", recorded)
        engine.phases(batch).logprobs_under("policy", wrong_at(batch, row))
    return order


def facts(engine: VerlOptimizer, directory: Path) -> dict[str, torch.Tensor]:
    """Every weight and every tensor of the state (moments, steps, the critic's), by name."""
    named: dict[str, torch.Tensor] = {name: torch.from_numpy(value.copy()) for name, value in engine.weights()}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}.{key}", inner)
        elif isinstance(value, torch.Tensor | int | float):
            named[prefix] = torch.as_tensor(value)

    save(engine, directory)
    collect("state", state_facts(directory))
    return named


def require_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def test_step_after_a_refusal_at_any_micro_batch_equals_the_step_alone(
    tiny_model: Path, good: Batch, other: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = VerlOptimizer(tiny_model, trainer_settings(**SETTINGS))
    expected = alone.step(good)
    stepped = facts(alone, tmp_path)
    held_at, count = set[int](), 0
    for row in range(ROWS):
        order = micro_batches(alone, other, row, monkeypatch)
        count, place = len(order), order.index(True)
        if place in held_at:
            continue
        held_at.add(place)
        engine = VerlOptimizer(tiny_model, trainer_settings(**SETTINGS))
        before = facts(engine, tmp_path)
        with pytest.raises(BadRowsError, match="so no step was taken"):
            engine.step(wrong_at(other, row))
        require_same(facts(engine, tmp_path), before)
        assert engine.step(good) == expected, f"row {row} left gradients behind"
        require_same(facts(engine, tmp_path), stepped)
    assert count >= 3, "one micro-batch shows nothing"
    assert held_at == set(range(count))


def test_refusal_of_rows_is_kept_where_stuck_ranks_were_ended(tiny_model: Path, other: Batch, monkeypatch: pytest.MonkeyPatch):
    engine = VerlOptimizer(tiny_model, trainer_settings(**SETTINGS))
    everywhere = engine._workers.everywhere

    def ended(method: str, *arguments: object) -> object:
        if method == "undo_step":
            raise TrainerError("the trainer's workers have ended")
        return everywhere(method, *arguments)

    monkeypatch.setattr(engine._workers, "everywhere", ended)
    with pytest.raises(BadRowsError, match="so no step was taken"):
        engine.step(wrong_at(other, 0))


def test_step_with_a_critic_after_a_refusal_equals_the_step_alone(tiny_model: Path, good: Batch, other: Batch, tmp_path: Path):
    rewards = np.resize([1.0, 0.0, 0.5], ROWS)
    good, bad = replace(good, call_rewards=rewards), replace(other, call_rewards=rewards)
    settings = trainer_settings(**SETTINGS, estimator="gae", critic_learning_rate=1e-2)
    alone, engine = VerlOptimizer(tiny_model, settings), VerlOptimizer(tiny_model, settings)
    expected = alone.step(good)
    for row in (0, ROWS // 2, ROWS - 1):
        with pytest.raises(BadRowsError, match="so no step was taken"):
            engine.step(wrong_at(bad, row))
    assert engine.step(good) == expected
    require_same(facts(engine, tmp_path), facts(alone, tmp_path))


def test_step_with_infinite_gradient_in_later_mini_batch_undoes_whole_batch(tiny_model: Path, good: Batch, other: Batch, tmp_path: Path):
    settings = trainer_settings(**SETTINGS, epochs=2, mini_batches=4)
    alone, engine = VerlOptimizer(tiny_model, settings), VerlOptimizer(tiny_model, settings)
    for either in (alone, engine):
        either.step(replace(other, staleness=np.full_like(other.staleness, -1)))
    before = facts(engine, tmp_path)
    advantages = good.advantages.copy()
    advantages[5] *= np.inf
    with pytest.raises(BadRowsError, match="gradient's norm is nan") as raised:
        engine.step(replace(good, staleness=np.full_like(good.staleness, -1), advantages=advantages))
    assert raised.value.rows == {5: "not_finite"}
    require_same(facts(engine, tmp_path), before)
    later = replace(good, staleness=np.full_like(good.staleness, -1))
    assert engine.step(later) == alone.step(later)
    require_same(facts(engine, tmp_path), facts(alone, tmp_path))


@pytest.mark.parametrize(
    ("changes", "updates"),
    [({}, True), ({"epochs": 2, "mini_batches": 2}, True), ({"estimator": "gae"}, True), ({"estimator": "gae"}, False)],
    ids=["one update", "several", "critic", "critic alone"],
)
def test_step_refused_by_its_caller_before_the_first_update_equals_the_step_alone(
    tiny_model: Path, good: Batch, other: Batch, tmp_path: Path, changes: dict[str, Any], updates: bool, monkeypatch: pytest.MonkeyPatch
):
    rewards = np.resize([1.0, 0.0, 0.5], ROWS) if "estimator" in changes else None
    good, other = replace(good, call_rewards=rewards), replace(other, call_rewards=rewards)
    settings = trainer_settings(**SETTINGS, **changes)
    alone, engine = VerlOptimizer(tiny_model, settings), VerlOptimizer(tiny_model, settings)
    before, calls = facts(engine, tmp_path), list[dict[str, torch.Tensor]]()
    if not updates:
        monkeypatch.setattr(StepPhases, "_trainable", lambda *_: False)

    def note() -> None:
        """Mini-batches are drawn by then."""
        calls.append({**facts(engine, tmp_path), "state.order": before["state.order"]})

    def refuse() -> None:
        note()
        raise LedgerError("another trainer was faster.")

    with pytest.raises(LedgerError, match="another trainer was faster"):
        engine.step(other, refuse)
    require_same(calls[0], before)
    require_same(facts(engine, tmp_path), before)
    assert engine.step(good, note) == alone.step(good)
    assert len(calls) == 2, "once a step, however many updates it makes"
    require_same(calls[1], before)
    require_same(facts(engine, tmp_path), facts(alone, tmp_path))


def test_step_without_update_calls_its_caller_once(tiny_model: Path, good: Batch):
    calls: list[int] = []
    engine = VerlOptimizer(tiny_model, trainer_settings(**SETTINGS))
    metrics = engine.step(replace(good, advantages=0 * good.advantages), lambda: calls.append(1))
    assert (metrics["updated"], calls) == (0, [1])
