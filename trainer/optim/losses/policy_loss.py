"""Policy loss of a micro-batch: verl's loss, entropy and KL terms, and metrics of its tokens.

Invariant: each term is a sum of rows' parts of the whole batch's, so that it does not depend on micro-batches; a sequence is a rollout
(`trainer.optim.losses.rollout_losses`).
"""

from __future__ import annotations

import math
from typing import Any

from spangrad.settings import TrainerSettings

_CLIPPED = {"vanilla", "gspo", "cispo", "clip_cov", "geo_mean", "bypass_mode"}
"""Losses that clip ratios; the others have no `clip_low` and `clip_high`."""
_OF_TOKENS = (
    *("actor/pg_clipfrac", "actor/ppo_kl"),
    *("rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction", "rollout_corr/kl"),
)
"""verl's metrics that are means over the tokens of a micro-batch."""


def policy_loss(config: Any, settings: TrainerSettings, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
    """Compute the loss of a micro-batch; the sum over all micro-batches is the batch's.

    Args:
        config: of `losses.actor_config`; verl's ppo_loss writes the batch's sizes into it.
        settings: loss, clipping, entropy and KL.
        model_output: log_probs, and entropy or measured_entropy (`trainer.optim.losses.trained_logits`); jagged. Of the two the second is
            left, without a gradient.
        data: the rows, with the batch's sizes (batch_num_tokens, global_batch_size, dp_size).
        dp_group: of the workers.
    """
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import AggregationType, Metric
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    tu.assign_non_tensor(data, batch_num_tokens=max(data["batch_num_tokens"], 1))  # the mean over no token is 0, and no NaN
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    if "rollout_log_ratio" in data:  # verl's gspo takes a row's mean for the ratio and stops its gradient: make it the rollout's
        data["old_log_probs"] = logprobs.detach().float() - data["rollout_log_ratio"][:, None]
    entropy = model_output.pop("entropy", None)
    measured = model_output.pop("measured_entropy", entropy)
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    mask, share = data["response_mask"].bool(), data["row_share"][:, None] if "row_share" in data else 1.0

    def aggregated(values: Any) -> Any:
        return agg_loss(loss_mat=values * share, loss_mask=mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info)

    def part_of_mean(total: Any) -> Any:
        """Return the micro-batch's part of a mean over the batch's tokens; verl averages over ranks, and sums over micro-batches."""
        return Metric(AggregationType.SUM, total * data["dp_size"] / data["batch_num_tokens"])

    def mean(values: Any) -> Any:
        return part_of_mean((values.detach().float() * mask).sum())

    metrics |= {name: part_of_mean(mask.sum() * float(metrics[name].aggregate())) for name in _OF_TOKENS if name in metrics}
    if settings.loss.entropy_coef:
        loss = loss - settings.loss.entropy_coef * aggregated(no_padding_2_padding(entropy, data))
    if settings.loss.kl_coef:
        logprob: Any = logprobs
        divergence = aggregated(kl_penalty(logprob=logprob, ref_logprob=data["ref_log_prob"], kl_penalty=settings.loss.kl_type))
        loss = loss + settings.loss.kl_coef * divergence
        metrics["kl_loss"] = Metric(AggregationType.SUM, divergence.detach())
    if measured is not None:
        metrics["entropy"] = mean(no_padding_2_padding(measured, data))
        model_output["measured_entropy"] = measured.detach()
    if settings.loss.name in _CLIPPED and settings.loss.correction.objective != "reinforce":
        low, high = _clipped(config, settings, logprobs.detach().float() - data["old_log_probs"], data["advantages"], mask)
        metrics |= {"clip_low": mean(low), "clip_high": mean(high)}
    return loss, metrics


def _clipped(config: Any, settings: TrainerSettings, log_ratio: Any, advantages: Any, mask: Any) -> tuple[Any, Any]:
    """Return masks of the tokens whose ratios are below the lower bound, and above the upper one, where the loss clips them.

    It clips ratios below where the advantage is negative and above where it is positive; `cispo` on both sides for any advantage.
    `gspo` compares the ratio of the whole response; `geo_mean` bounds the logarithm.
    """
    if settings.loss.name == "gspo":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None].expand_as(log_ratio)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    below, above = (-low, high) if settings.loss.name == "geo_mean" else (math.log(1 - low) if low < 1 else -math.inf, math.log1p(high))
    either = settings.loss.name == "cispo"
    return (log_ratio < below) & (either | (advantages < 0)), (log_ratio > above) & (either | (advantages > 0))
