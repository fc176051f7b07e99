"""verl's losses as the settings name them, with corrections and rejections: a step's loss, against verl's own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
import torch

from spangrad.errors import TrainerError
from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_learning import Aggregation, Correction, Estimator, KlEstimate, Loss
from tests.support.policies import NO_ALARM, logprobs_of, padded, sampled_by, sampled_rows, trainer_settings
from tests.support.trainers import loss_settings, mostly_slow
from trainer.credit import learning
from trainer.data.batch import layout
from trainer.data.merge import separate
from trainer.optim.losses.corrected import actor_config
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import prepare_process

prepare_process()  # verl reads its platform when it is first imported


def sampled(model: Path) -> tuple[pl.DataFrame, pl.Series]:
    """The fixed batch of the losses: 12 responses whose logprobs are those of other weights, so that some ratios are clipped."""
    off = np.random.default_rng(5)
    rows = pl.DataFrame(sampled_rows(model, 12, temperature=1.0, seed=1, Version=-1))
    moved = [[float(np.float32(min(logprob + off.normal(0, 0.4), -1e-3))) for logprob in row] for row in rows["Logprobs"].to_list()]
    return rows.with_columns(pl.Series("Logprobs", moved)), pl.Series(np.linspace(-1.5, 1, 12))


def loss_here(model: Path, settings: TrainerSettings) -> float:
    """The loss of an optimizer step on the fixed batch."""
    rows, worth = sampled(model)
    engine = VerlOptimizer(model, settings)
    torch.manual_seed(0)
    return engine.step(layout(separate(rows, worth), lineage=[0]))["loss"]


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


def test_estimators_losses_and_rejections_match_verl_registries():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    assert set(get_args(Estimator)) == set(learning.ESTIMATORS) == {getattr(name, "value", name) for name in ADV_ESTIMATOR_REGISTRY}
    assert set(get_args(Loss)) == set(learning.LOSSES) == {name for name in POLICY_LOSS_REGISTRY if not name.startswith("spangrad_")}
    assert learning.REJECTIONS == SUPPORTED_ROLLOUT_RS_OPTIONS


def test_aggregations_and_kl_estimates_are_known_to_verl():
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    losses, mask = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    aggregated = {how: float(agg_loss(losses, mask, how)) for how in get_args(Aggregation)}
    assert aggregated == pytest.approx(
        {"token-mean": 1, "token-sum": 3, "seq-mean-token-sum": 1.5, "seq-mean-token-mean": 1, "seq-mean-token-sum-norm": 0.5}
    )
    for how in get_args(KlEstimate):
        assert kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), how).isfinite().all()


@pytest.mark.parametrize("name", mostly_slow(learning.LOSSES, {"vanilla", "gspo", "cispo", "bypass_mode"}))
def test_step_loss_matches_verl(name: Any, tiny_model: Path):
    settings = loss_settings(name, clip_ratio=0.02)
    assert loss_here(tiny_model, settings) == pytest.approx(loss_by_verl(tiny_model, settings), abs=2e-6)
    if name not in {"clip_cov", "kl_cov"}:  # these look at the tokens of one micro-batch
        split = loss_settings(name, clip_ratio=0.02, max_tokens_per_device=30)
        assert loss_here(tiny_model, split) == pytest.approx(loss_by_verl(tiny_model, settings), abs=2e-6)


@pytest.mark.parametrize("how", mostly_slow(get_args(Aggregation), {"token-mean", "seq-mean-token-sum-norm"}))
def test_step_aggregation_matches_verl_for_any_micro_batches(how: Any, tiny_model: Path):
    options = {"loss__options": {"loss_scale_factor": 3}} if how.endswith("norm") else {}
    whole = trainer_settings(loss__aggregation=how, **options)
    split = trainer_settings(loss__aggregation=how, max_tokens_per_device=30, **options)
    expected = pytest.approx(loss_by_verl(tiny_model, whole), rel=1e-6, abs=2e-6)  # float32, of sums of many tokens
    assert loss_here(tiny_model, whole) == expected
    assert loss_here(tiny_model, split) == expected


def test_clip_ratio_settings_reach_verl(tiny_model: Path):
    """DAPO's clip-higher: verl's defaults of the two bounds must not win over what is set."""
    base = loss_here(tiny_model, trainer_settings(clip_ratio=0.2))
    losses = {
        "narrow": loss_here(tiny_model, trainer_settings(clip_ratio=0.05)),
        "higher": loss_here(tiny_model, trainer_settings(clip_ratio=0.2, clip_ratio_high=0.4)),
        "lower": loss_here(tiny_model, trainer_settings(clip_ratio=0.2, clip_ratio_low=0.05)),
    }
    assert len({round(value, 6) for value in [base, *losses.values()]}) == 4
    assert losses["higher"] < base, "good responses may pull further"


def test_step_recomputed_logprobs_and_corrections_match_verl(tiny_model: Path):
    """TIS, IcePop and rejection of responses that other weights sampled; ratios are against the trainer's logprobs at the start."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    rows, worth = sampled(tiny_model)
    old = rows["Logprobs"].to_list()
    pairs = zip(rows["PromptIds"].to_list(), rows["ResponseIds"].to_list(), strict=True)
    trainers = padded([logprobs_of(tiny_model, prompt, response) for prompt, response in pairs])
    mask = padded([[1.0] * len(row) for row in old])
    advantages = padded([[value] * len(row) for value, row in zip(worth, old, strict=True)])
    cases: list[tuple[Correction, dict[str, Any]]] = [
        (Correction(), {}),
        (Correction(weights="token", threshold="1.2"), {"rollout_is": "token", "rollout_is_threshold": 1.2}),
        (Correction(weights="sequence", threshold="1.2"), {"rollout_is": "sequence", "rollout_is_threshold": 1.2}),
        (Correction(weights="token", threshold="0.8_1.2"), {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2"}),
        (Correction(weights="token", normalise=True), {"rollout_is": "token", "rollout_is_batch_normalize": True}),
        (
            Correction(reject={"token_k1": "0.8_1.2", "seq_mean_k3": "0.2"}),
            {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.8_1.2,0.2"},
        ),
    ]
    for correction, facts in cases:
        settings = trainer_settings(recompute_logprobs=True, correction=correction)
        metrics = VerlOptimizer(tiny_model, settings).step(layout(separate(rows, worth), lineage=[0], divisor=8))
        weights, kept, reported = compute_rollout_correction_and_rejection_mask(trainers, padded(old), mask, **facts)
        config = actor_config(settings, None)
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=trainers,
            log_prob=trainers,
            advantages=advantages,
            response_mask=kept.bool(),
            config=config,
            rollout_is_weights=weights.batch["rollout_is_weights"] if weights else None,
        )
        assert metrics["loss"] == pytest.approx(float(loss), abs=2e-6)
        assert metrics["clip_fraction"] == 0, "at the start every ratio is 1"
        if correction.weights:
            assert metrics["correction_weight_mean"] == pytest.approx(reported["rollout_corr/rollout_is_mean"], rel=1e-5)
        if correction.reject:
            assert metrics["correction_rejected"] == pytest.approx(reported["rollout_corr/rollout_rs_masked_fraction"])
            assert 0 < metrics["correction_rejected"] < 1
        assert ("correction_kl" in metrics) == bool(facts)


def test_step_of_batch_rejected_whole_is_skipped(tiny_model: Path):
    rows, worth = sampled(tiny_model)
    settings = trainer_settings(recompute_logprobs=True, correction=Correction(reject={"seq_max_k2": "1e-12"}))
    metrics = VerlOptimizer(tiny_model, settings).step(layout(separate(rows, worth), lineage=[0]))
    assert (metrics["updated"], metrics["grad_norm"], metrics["correction_rejected"]) == (0, 0, 1)


def test_bypass_mode_loss_applies_correction(tiny_model: Path):
    settings = trainer_settings(loss__name="bypass_mode", correction=Correction(weights="token", threshold="1.1", objective="reinforce"))
    other = trainer_settings(loss__name="bypass_mode", correction=Correction(objective="reinforce"))
    loss = loss_here(tiny_model, settings)
    assert loss == pytest.approx(loss_by_verl(tiny_model, settings), abs=2e-6)
    assert loss != pytest.approx(loss_here(tiny_model, other), abs=1e-3)
    rows, worth = sampled(tiny_model)
    tight = trainer_settings(**{**dict(settings), "max_tokens_per_device": 10})
    alone, among = (
        VerlOptimizer(tiny_model, tight).step(layout(separate(rows[:1], worth[:1]), lineage=[0], divisor=divisor)) for divisor in (1, 32)
    )
    assert among["loss"] == pytest.approx(alone["loss"], abs=1e-6), "micro-batches of no-op rows add nothing"


def test_bypass_mode_normalised_weights_do_not_depend_on_micro_batches(tiny_model: Path):
    correction = Correction(weights="token", normalise=True, objective="reinforce")
    whole = trainer_settings(loss__name="bypass_mode", correction=correction)
    split = trainer_settings(loss__name="bypass_mode", correction=correction, max_tokens_per_device=30)
    assert loss_here(tiny_model, whole) == pytest.approx(loss_by_verl(tiny_model, whole), abs=2e-6)
    assert loss_here(tiny_model, split) == pytest.approx(loss_by_verl(tiny_model, whole), abs=2e-6)


def test_logprob_alarm_precedes_correction(tiny_model: Path):
    rows, worth = sampled(tiny_model)
    current = layout(separate(sampled_by(rows, 0), worth), lineage=[0])
    correction = Correction(weights="token")
    with pytest.raises(TrainerError, match="so no step was taken"):
        VerlOptimizer(tiny_model, trainer_settings(recompute_logprobs=True, correction=correction)).step(current)
    tolerant = trainer_settings(recompute_logprobs=True, correction=correction, alarms__logprob=NO_ALARM)
    metrics = VerlOptimizer(tiny_model, tolerant).step(current)
    assert 0.1 < metrics["logprob_gap_mean"] < metrics["logprob_gap_max"] < 5
