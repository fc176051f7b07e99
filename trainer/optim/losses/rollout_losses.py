"""Losses over whole responses, where a rollout's calls are in several rows.

Invariant: loss and gradient are those of a row a rollout, however rows are merged and however they fall into micro-batches, mini-batches'
parts or workers.

A response is all of the policy's output in a rollout: the trained tokens of its calls, without observations, as a row of verl's agent loop
is. Three things of a loss depend on it:

- `seq-mean-token-mean` (and `sapo`, which has no other): a row's mean is weighed by the row's share of its rollout's tokens;
- `gspo`: the ratio of a rollout, exp(mean over its tokens of log(pi / pi_old)), whose gradient verl stops, stands for each row's own;
- `geo_mean`: a row's geometric mean is multiplied so that value and gradient are the row's part of the rollout's.

Sums over sequences (`seq-mean-token-sum`, and Dr. GRPO's) do not depend on the division into rows; only their divisor counts rollouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.settings import TrainerSettings
from trainer.credit.learning import clip_range
from trainer.data.batch import Batch
from trainer.optim.losses.corrected import correct
from trainer.optim.losses.rollout_tokens import RolloutTokens

_MEAN = "seq-mean-token-mean"


def several_rows(batch: Batch) -> bool:
    """Return whether a rollout has more than one row."""
    rollouts = batch.rollout[: batch.real_rows]
    return len(np.unique(rollouts)) < len(rollouts)


def normalises_weights(settings: TrainerSettings) -> bool:
    """Return whether `bypass_mode` divides weights by their mean: verl takes that of a micro-batch, and here it is that of the step."""
    correction = settings.loss.correction
    return settings.loss.name == "bypass_mode" and correction.normalise and bool(correction.weights) and correction.objective == "reinforce"


def needs_logprobs(settings: TrainerSettings) -> bool:
    """Return whether the loss needs logprobs of all rows under the current weights: a forward pass before each step."""
    if settings.loss.name == "bypass_mode":
        correction = settings.loss.correction
        whole = correction.weights == "sequence" or any(name.startswith("seq") for name in correction.reject)
        return whole or settings.loss.aggregation == _MEAN or normalises_weights(settings)
    return settings.loss.name in {"gspo", "geo_mean"}


def by_rollout(batch: Batch, settings: TrainerSettings, logprobs: NDArray[np.float32] | None = None) -> tuple[Batch, dict[str, float]]:
    """Prepare a batch for an optimizer step, where a rollout has several rows or weights are normalised.

    Args:
        batch: the rows of the step.
        settings: loss, aggregation, clipping and correction.
        logprobs: of the sampled tokens under the weights that are stepped (nats), shaped as `batch.logprobs`. None: the loss needs none
            (`needs_logprobs`).

    Returns:
        The batch with weights, row_share and rollout_log_ratio as the loss needs them; metrics of a correction.
    """
    tokens = RolloutTokens.of(batch)
    shares = tokens.row_shares
    mean = settings.loss.aggregation == _MEAN
    changes: dict[str, Any] = {"row_share": shares} if mean else {}
    metrics: dict[str, float] = {}
    if settings.loss.name == "bypass_mode" and logprobs is not None:
        weights, metrics = _bypass_weights(replace(batch, old_logprobs=logprobs), settings, mean=mean)
        return replace(batch, weights=weights, **changes), metrics
    if settings.loss.name == "geo_mean":
        assert logprobs is not None
        return replace(batch, weights=_geo_mean_weights(batch, tokens, settings, logprobs), **changes), metrics
    if mean or settings.loss.name == "sapo":
        changes["weights"] = (_ones(batch) if batch.weights is None else batch.weights) * shares[:, None]
    if settings.loss.name == "gspo":
        assert logprobs is not None
        ratios = np.zeros(len(batch.rollout), np.float32)
        ratios[tokens.row] = tokens.means(logprobs - _old(batch))
        changes["rollout_log_ratio"] = ratios
    return replace(batch, **changes), metrics


def _old(batch: Batch) -> NDArray[np.float32]:
    return batch.logprobs if batch.old_logprobs is None else batch.old_logprobs


def _ones(batch: Batch) -> NDArray[np.float32]:
    return np.ones_like(batch.logprobs)


def _bypass_weights(batch: Batch, settings: TrainerSettings, *, mean: bool) -> tuple[NDArray[np.float32], dict[str, float]]:
    """Return each token's factor in verl's `bypass_mode`, corrected by rollouts: mask, weight with `reinforce`, and share of the row."""
    changes, metrics = correct(batch, settings)
    kept = changes["response_mask"].astype(np.float32)
    weights = kept * (changes.get("weights", 1.0) if settings.loss.correction.objective == "reinforce" else 1.0)
    if mean:  # verl divides by the row's tokens, rejected ones among them: make it the rollout's tokens that were kept
        tokens = RolloutTokens.of(replace(batch, response_mask=changes["response_mask"]))
        factors = np.zeros(len(kept), np.float32)
        rows = np.unique(tokens.row, return_index=True)
        factors[rows[0]] = 1 / tokens.lengths[tokens.rollout[rows[1]]]
        weights = weights * (batch.response_mask.sum(axis=1) * factors)[:, None]
    return weights.astype(np.float32), metrics


def _geo_mean_weights(batch: Batch, tokens: RolloutTokens, settings: TrainerSettings, logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the factor of each row in verl's `geo_mean`, on all of its tokens.

    A row's loss is -A exp(mean over the row of x), with x = log(pi / pi_old) clipped at the token. The rollout's is -A exp(mean over the
    rollout of x), and a row's part of its value, and of its gradient, is the row's share of the tokens.
    """
    low, high = clip_range(settings)
    ratio, sign = logprobs - _old(batch), np.sign(batch.advantages)
    clipped = sign * np.minimum(sign * ratio, sign * np.clip(ratio, -low, high))
    factors = np.exp(tokens.means(clipped) - tokens.row_means(clipped)) * tokens.row_shares[tokens.row]
    if batch.weights is not None:
        factors = factors * np.exp(tokens.means(np.log(batch.weights + 1e-10)))
    weights = _ones(batch)
    weights[tokens.row, tokens.column] = factors
    return weights
