"""Policy losses of verl, and the rollout correction before them.

In: the trainer's settings; batches with logprobs. Out: verl's losses and metrics. Invariant: a loss is the same however verl cuts its rows
into micro-batches, but for those that look at all tokens of one (`clip_cov`, `kl_cov`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from spangrad.settings import TrainerSettings
from trainer.credit.learning import SCALE, clip_range
from trainer.data.batch import Batch
from trainer.optim.losses.policy_loss import policy_loss
from trainer.optim.losses.rollout_tokens import RolloutTokens

_WRAPPED = "spangrad_"
"""Prefix of the names under which wrapped losses are registered with verl."""
_CORRECTION = {
    "rollout_is_mean": "correction_weight_mean",
    "rollout_is_min": "correction_weight_min",
    "rollout_is_max": "correction_weight_max",
    "rollout_is_eff_sample_size": "correction_effective_share",
    "rollout_is_ratio_fraction_high": "correction_above",
    "rollout_is_ratio_fraction_low": "correction_below",
    "rollout_rs_masked_fraction": "correction_rejected",
    "kl": "correction_kl",
}
"""Names of verl's metrics of a correction that are kept, with their names here."""


def actor_config(settings: TrainerSettings, optimizer: Any) -> Any:
    """Return verl's configuration of a policy's loss."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    _wrap_losses()
    options: dict[str, Any] = dict(settings.loss.options)
    scale = options.pop(SCALE, None)
    of_actor = {name: options.pop(name) for name in ("clip_ratio_c", "tau_pos", "tau_neg") if name in options}
    correction = RolloutCorrectionConfig(**correction_of(settings), bypass_mode=True, loss_type=settings.loss.correction.objective)
    low, high = clip_range(settings)
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=1,  # batches are cut by trainer.data.batch; verl asks for a number
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio=settings.loss.clip_ratio,
        clip_ratio_low=low,  # verl's own defaults would win over clip_ratio
        clip_ratio_high=high,
        loss_agg_mode=settings.loss.aggregation,
        loss_scale_factor=scale,
        policy_loss=PolicyLossConfig(
            loss_mode=_WRAPPED + settings.loss.name if settings.loss.name in _WRAPS else settings.loss.name,
            rollout_correction=correction,
            **options,
        ),
        entropy_coeff=0.0,  # entropy and KL are added by trainer.optim.losses.policy_loss, over rollouts
        use_kl_loss=False,
        optim=optimizer,
        **of_actor,
    )


def policy_loss_of(settings: TrainerSettings, optimizer: Any) -> Any:
    """Return the policy's loss, by verl, with entropy and KL terms."""
    return functools.partial(policy_loss, actor_config(settings, optimizer), settings)


def correct(batch: Batch, settings: TrainerSettings) -> tuple[dict[str, Any], dict[str, float]]:
    """Weigh and reject tokens by the distance of the batch's old_logprobs from the sampled ones, by verl; a sequence is a rollout.

    Returns:
        The changed fields of the batch (weights, response_mask, and advantages, which are 0 where a token was rejected); metrics.
    """
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    assert batch.old_logprobs is not None
    tokens = RolloutTokens.of(batch)  # without no-op rows, which would count in the means of the metrics
    old, sampled, trained = (torch.from_numpy(tokens.scatter(of)) for of in (batch.old_logprobs, batch.logprobs, batch.response_mask))
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(old, sampled, trained, **correction_of(settings))
    mask = tokens.gather(kept.numpy()).astype(np.int64)
    changes: dict[str, Any] = {"response_mask": mask, "advantages": batch.advantages * mask.astype(np.float32)}
    if weights is not None:
        changes["weights"] = tokens.gather(weights.batch["rollout_is_weights"].numpy())
    return changes, correction_metrics(metrics)


def correction_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return verl's metrics of a correction, under the names of this project."""
    return {name: metrics[f"rollout_corr/{verl}"] for verl, name in _CORRECTION.items() if f"rollout_corr/{verl}" in metrics}


def correction_of(settings: TrainerSettings) -> dict[str, Any]:
    """Return verl's parameters of trainer.loss.correction."""
    correction = settings.loss.correction
    return {
        "rollout_is": correction.weights,
        "rollout_is_threshold": correction.threshold,
        "rollout_is_batch_normalize": correction.normalise,
        "rollout_rs": ",".join(correction.reject) or None,
        "rollout_rs_threshold": ",".join(correction.reject.values()) or None,
    }


def _geo_mean(verl: Any, **facts: Any) -> tuple[Any, dict[str, Any]]:
    """Divide the sum over the batch's rows by their number; verl takes the mean over a micro-batch's rows, no-op rows included."""
    loss, metrics = verl(**facts)
    info = facts["config"].global_batch_info
    return loss * len(facts["log_prob"]) / info["global_batch_size"] * info["dp_size"], metrics


def _bypass_mode(verl: Any, **facts: Any) -> tuple[Any, dict[str, Any]]:
    """Unmask the tokens of a micro-batch of no-op rows, which verl refuses; their advantages are 0.

    Weights that are given are those of a correction by rollouts (`rollout_losses`), in place of the one by rows within verl's.
    """
    from verl.trainer.ppo import core_algos

    losses: Any = core_algos
    if facts["rollout_is_weights"] is not None:
        if facts["config"].policy_loss.rollout_correction.loss_type == "ppo_clip":
            return losses.compute_policy_loss_vanilla(**facts)
        return losses.compute_policy_loss_reinforce(rollout_log_prob=facts.pop("old_log_prob"), **facts)
    mask = facts["response_mask"]
    return verl(**{**facts, "response_mask": mask if mask.any() else ~mask})


_WRAPS: dict[str, Any] = {"geo_mean": _geo_mean, "bypass_mode": _bypass_mode}


@functools.cache
def _wrap_losses() -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

    for name, wrap in _WRAPS.items():
        register_policy_loss(_WRAPPED + name)(functools.partial(wrap, get_policy_loss_fn(name)))
