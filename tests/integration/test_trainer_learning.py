"""Steps of the optimizer: critics, epochs and mini-batches, references, entropy and adapters, and what a resumed one repeats."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from spangrad.errors import CheckpointError
from spangrad.processes import wait_until
from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_learning import Correction
from tests.support.policies import NO_ALARM, chained, distribution, logprobs_of, padded, perturbed, sampled_rows, trainer_settings
from tests.support.trainers import save, written
from trainer.credit import learning
from trainer.credit.estimators import over_tokens
from trainer.data.batch import layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import prepare_process

prepare_process()  # verl reads its platform when it is first imported

RATE = 1e-3


def gloo_threads() -> set[int]:
    """Return the ids of this process's threads that a gloo group started; one that has just begun still has its parent's name."""
    threads = set[int]()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            if "gloo" in (thread / "comm").read_text():
                threads.add(int(thread.name))
    return threads


def test_freed_optimizer_leaves_neither_models_nor_threads(tiny_model: Path):
    gc.collect()
    before = gloo_threads()
    optimizer = VerlOptimizer(tiny_model, TrainerSettings())
    rank = weakref.ref(optimizer._workers._rank)  # type: ignore[union-attr]
    assert rank() is not None
    wait_until(lambda: bool(gloo_threads() - before), 60, "the threads of the optimizer's group")
    del optimizer
    gc.collect()
    assert rank() is None
    wait_until(lambda: not gloo_threads() - before, 60, "the end of the threads of the optimizer's group")


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline_uses_forward_pass(name: Any, tiny_model: Path):
    batch = chained(tiny_model)
    engine = VerlOptimizer(tiny_model, trainer_settings(estimator=name, learning_rate=RATE))
    phases = engine.phases(batch)
    phases.compute_advantages()
    seen = phases.batch
    pairs = [(batch.prompts[i][batch.attention_mask[i, : batch.prompts.shape[1]] > 0], i) for i in range(batch.real_rows)]
    squared = np.zeros_like(batch.logprobs)
    for prompt, i in pairs:
        for at in range(int(batch.response_mask[i].sum())):
            squared[i, at] = float(
                distribution(tiny_model, [*prompt.tolist(), *batch.responses[i, :at].tolist()], 1.0).exp().square().sum()
            )
    expected, _ = over_tokens(engine.settings, batch, old_log_probs=batch.logprobs, sum_pi_squared=squared)
    assert seen.advantages == pytest.approx(expected, abs=1e-4)
    metrics = engine.step(batch)
    assert metrics["updated"] == 1
    assert metrics["logprob_gap_max"] < 1e-4
    assert np.array_equal(engine.token_values.advantages, seen.advantages), "what the loss used is kept"


def test_critic_learns_returns_and_resume_repeats_it(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(
        estimator="gae", learning_rate=1e-6, critic_learning_rate=3e-3, epochs=2, mini_batches=2, alarms__logprob=NO_ALARM
    )
    batch = chained(tiny_model)
    engine = VerlOptimizer(tiny_model, settings)
    losses = [engine.step(batch)["critic_loss"] for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]
    version = written(engine, tiny_model, tmp_path)
    expected = engine.step(batch)
    resumed = VerlOptimizer(version.path, settings)
    resumed.load_state(version.path)
    assert resumed.step(batch) == expected
    assert expected["critic_explained"] > 0
    assert expected["updated"] == 4


def test_critic_loss_follows_keys_of_verl_without_ray(tiny_model: Path):
    batch = chained(tiny_model)
    of_tokens, of_rows = (
        VerlOptimizer(tiny_model, trainer_settings(estimator="gae", verl={"critic": {"loss_agg_mode": mode}})).step(batch)["critic_loss"]
        for mode in ("token-mean", "seq-mean-token-sum")
    )
    assert of_rows > 1.5 * of_tokens


def test_step_of_batch_rejected_whole_leaves_critic(tiny_model: Path):
    settings = trainer_settings(estimator="gae", recompute_logprobs=True, correction=Correction(reject={"seq_max_k2": "1e-12"}))
    batch = chained(tiny_model)
    metrics = VerlOptimizer(tiny_model, settings).step(
        replace(batch, logprobs=batch.logprobs - batch.response_mask, staleness=0 * batch.staleness - 1)
    )
    assert (metrics["updated"], metrics["loss"], "critic_loss" in metrics) == (0, 0, False)


def test_load_state_without_critic_begins_one_silently(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    save(VerlOptimizer(tiny_model, TrainerSettings()), tmp_path)
    batch = chained(tiny_model)
    capfd.readouterr()
    engine = VerlOptimizer(tiny_model, trainer_settings(estimator="gae"))
    engine.load_state(tmp_path)
    assert engine.step(batch)["updated"] == 1
    assert capfd.readouterr() == ("", "")


def fresh(tiny_model: Path) -> Any:
    """24 true samples, a batch of the current weights."""
    rows = pl.DataFrame(sampled_rows(tiny_model, 24, temperature=1.0, seed=1))
    return layout(separate(rows, pl.Series(np.linspace(-1, 1, 24))), lineage=[0])


@pytest.mark.parametrize("name", list(learning.LOSSES))
def test_step_with_each_loss_raises_better_over_worse(name: Any, tiny_model: Path):
    batch = layout(separate(pl.DataFrame(sampled_rows(tiny_model, 8, temperature=1.0, seed=1)), pl.Series([1.0, -1.0] * 4)), lineage=[0])
    engine = VerlOptimizer(
        tiny_model, trainer_settings(loss__name=name, loss__options={"dro_beta": 0.1} if name == "dro" else {}, learning_rate=RATE)
    )
    engine.step(batch)
    moved = engine.phases(batch).logprobs_under("policy", batch) - batch.logprobs
    assert (moved * batch.advantages).sum() > 0.1


def test_epochs_and_mini_batches_use_logprobs_of_batch_start(tiny_model: Path):
    batch = fresh(tiny_model)
    once = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE)).step(batch)
    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, epochs=3, mini_batches=4))
    repeated = engine.step(batch)
    assert (once["updated"], repeated["updated"]) == (1, 12)
    assert once["clip_fraction"] == 0, "one step is on policy"
    assert repeated["clip_fraction"] > 0, "the ratios moved away from the batch's start"
    assert abs(repeated["ppo_kl"]) > 100 * abs(once["ppo_kl"])
    assert repeated["logprob_gap_max"] == pytest.approx(once["logprob_gap_max"], abs=1e-6), "the gap is that before any update"


def test_step_of_2_epochs_equals_two_steps(tiny_model: Path):
    """Old logprobs stay those of the start: the second epoch equals a second step on the same rows, which are then stale."""
    batch = fresh(tiny_model)
    two_epochs, one_epoch = (
        VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, epochs=2)),
        VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE)),
    )
    two_epochs.step(batch)
    one_epoch.step(batch)
    one_epoch.step(replace(batch, staleness=np.full_like(batch.staleness, -1)))
    for (name, trained), (_, expected) in zip(two_epochs.weights(), one_epoch.weights(), strict=True):
        assert np.array_equal(trained, expected), name


def test_mini_batches_repeat_after_a_resume(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(learning_rate=RATE, mini_batches=3)
    batch = fresh(tiny_model)
    engine = VerlOptimizer(tiny_model, settings)
    engine._order.manual_seed(7)
    save(engine, tmp_path)
    expected = engine.step(batch)
    assert VerlOptimizer(tiny_model, settings).step(batch) != expected, "other mini-batches"
    resumed = VerlOptimizer(tiny_model, settings)
    resumed.load_state(tmp_path)
    assert resumed.step(batch) == expected


def test_load_state_keeps_moments_and_uses_own_learning_rate(tiny_model: Path, tmp_path: Path):
    """A learning rate that is lowered after a gradient was not finite takes effect; warm-up counts the steps that were made."""
    batch = fresh(tiny_model)
    stale = replace(batch, staleness=np.full_like(batch.staleness, -1))

    def furthest(engine: VerlOptimizer) -> float:
        before = {name: value.copy() for name, value in engine.weights()}
        assert engine.step(stale)["updated"] == 1
        return max(float(np.abs(value - before[name]).max()) for name, value in engine.weights())

    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE))
    engine.step(batch)
    version = written(engine, tiny_model, tmp_path)
    moved = furthest(engine)

    def resumed(**changes: Any) -> float:
        other = VerlOptimizer(version.path, trainer_settings(**{"learning_rate": RATE, **changes}))
        other.load_state(version.path)
        return furthest(other)

    assert resumed() == moved
    assert resumed(learning_rate=RATE / 1000) == pytest.approx(moved / 1000, rel=0.1)
    assert resumed(warmup_steps=4) == pytest.approx(moved / 4, rel=0.1)
    assert resumed(betas=(0.0, 0.999)) != pytest.approx(moved, rel=0.01)


def test_kl_reference_keeps_policy_near_it(tiny_model: Path, tmp_path: Path):
    """The KL term is verl's estimate from the weights of trainer.loss.reference, and a large weight keeps the policy near them."""
    from verl.trainer.ppo.core_algos import kl_penalty

    reference = perturbed(tiny_model, tmp_path / "reference")
    rows = pl.DataFrame(sampled_rows(tiny_model, 24, temperature=1.0, seed=1))
    pairs = list(zip(rows["PromptIds"].to_list(), rows["ResponseIds"].to_list(), strict=True))
    policy, held = (padded([logprobs_of(model, prompt, response) for prompt, response in pairs]) for model in (tiny_model, reference))
    mask = padded([[1.0] * len(response) for _, response in pairs])
    losses: dict[str, float] = {}
    for how in ("low_var_kl", "abs", "k3+"):
        settings = trainer_settings(kl_coef=0.5, kl_type=how, reference=reference)
        metrics = VerlOptimizer(tiny_model, settings).step(fresh(tiny_model))
        expected = float((kl_penalty(policy, held, how) * mask).sum() / mask.sum())
        assert metrics["reference_kl"] == pytest.approx(expected, rel=1e-4)
        losses[how] = metrics["loss"] - 0.5 * expected
    plain = VerlOptimizer(tiny_model, TrainerSettings()).step(fresh(tiny_model))["loss"]
    assert list(losses.values()) == pytest.approx([plain] * 3, abs=1e-5)


def test_kl_reference_without_advantages_pulls_policy_back(tiny_model: Path, tmp_path: Path):
    reference = perturbed(tiny_model, tmp_path / "reference")
    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, kl_coef=1.0, reference=reference))
    batch = fresh(tiny_model)
    still = replace(batch, advantages=np.zeros_like(batch.advantages), staleness=np.full_like(batch.staleness, -1))
    steps = [engine.step(still) for _ in range(6)]
    assert steps[0]["updated"] == 1
    assert steps[-1]["reference_kl"] < 0.9 * steps[0]["reference_kl"]


def test_entropies_of_tokens_are_those_at_the_steps_start(tiny_model: Path):
    batch, entropies_of_steps = fresh(tiny_model), []
    changes: list[dict[str, Any]] = [{}, {"epochs": 2, "mini_batches": 2}, {"recompute_logprobs": True}, {"entropy_coef": 0.1}]
    for change in changes:
        engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, **change))
        engine.step(batch)
        entropies_of_steps.append(engine.token_values.entropies)
    for entropies in entropies_of_steps:
        np.testing.assert_allclose(entropies, entropies_of_steps[0], rtol=1e-4, atol=1e-6)
    assert np.max(entropies_of_steps[0]) > 0.1


def test_entropy_coef_raises_entropy(tiny_model: Path):
    batch = fresh(tiny_model)
    stale = replace(batch, advantages=np.zeros_like(batch.advantages), staleness=np.full_like(batch.staleness, -1))
    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, entropy_coef=1.0))
    steps = [engine.step(stale) for _ in range(8)]
    assert steps[0]["loss"] == pytest.approx(-steps[0]["entropy"], abs=1e-6)
    assert steps[-1]["entropy"] > steps[0]["entropy"] + 0.1
    measured = VerlOptimizer(tiny_model, TrainerSettings()).step(batch)["entropy"]
    assert measured == pytest.approx(steps[0]["entropy"], rel=1e-5), "it is measured where nothing rewards it, too"


def test_lora_adapters_are_trained_merged_and_resumed(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(learning_rate=1e-2, lora__rank=4, lora__alpha=8)
    batch = fresh(tiny_model)
    engine = VerlOptimizer(tiny_model, settings)
    before = {name: value.copy() for name, value in engine.weights()}
    assert all(np.array_equal(before[name], value) for name, value in VerlOptimizer(tiny_model, TrainerSettings()).weights()), (
        "B begins as 0"
    )
    first = engine.step(batch)
    assert (first["updated"], first["logprob_gap_max"] < 1e-4) == (1, True)
    version = written(engine, tiny_model, tmp_path)
    changed = {name for name, value in engine.weights() if not np.array_equal(before[name], value)}
    assert changed == {name for name in before if "proj" in name}, "every linear layer but the head"
    sampled = pl.DataFrame(sampled_rows(version.path, 24, temperature=1.0, seed=2))
    from_merged = layout(separate(sampled, pl.Series(np.linspace(-1, 1, 24))), lineage=[0])
    assert engine.step(replace(from_merged, advantages=0 * from_merged.advantages))["logprob_gap_max"] < 1e-4, (
        "what is served is what is trained"
    )
    expected = engine.step(from_merged)
    resumed = VerlOptimizer(version.path, settings)
    resumed.load_state(version.path)
    assert resumed.step(from_merged) == expected
    for (name, trained), (_, restored) in zip(engine.weights(), resumed.weights(), strict=True):
        assert np.array_equal(trained, restored), name


def test_load_state_with_other_adapters_raises(tiny_model: Path, tmp_path: Path):
    plain, adapted = VerlOptimizer(tiny_model, TrainerSettings()), VerlOptimizer(tiny_model, trainer_settings(lora__rank=4))
    (tmp_path / "plain").mkdir()
    (tmp_path / "adapted").mkdir()
    save(plain, tmp_path / "plain")
    save(adapted, tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"without adapters, and trainer\.lora\.rank = 4.*begin a branch"):
        adapted.load_state(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"with adapters, and trainer\.lora\.rank = 0"):
        plain.load_state(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"another shape than trainer\.lora\.rank = 2"):
        VerlOptimizer(tiny_model, trainer_settings(lora__rank=2)).load_state(tmp_path / "adapted")
    only = VerlOptimizer(tiny_model, trainer_settings(lora__rank=2, lora__modules=("q_proj",), learning_rate=1e-2))
    before = {name: value.copy() for name, value in only.weights()}
    only.step(fresh(tiny_model))
    assert {name.split(".")[-2] for name, value in only.weights() if not np.array_equal(before[name], value)} == {"q_proj"}
