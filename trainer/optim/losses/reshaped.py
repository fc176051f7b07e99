"""Responses sampled from a reshaped distribution: top-p, top-k, min-p, penalties, masked tokens (`builder.reshaped = "keep"`).

Invariant: rows that were sampled with a temperature alone stay as they are.

The engine's logprobs of such a row are log mu, of the processed distribution that was sampled from; the trainer's are log pi, of the whole
softmax at the row's temperature. The two agree on no token, so no alarm compares them, and a PPO ratio against mu would be clipped for
what top-p did and not for what training did. The ratio is therefore taken against pi at the step's start, and each token's loss is
multiplied by min(pi / mu, threshold): truncated importance sampling (Ionides 2008, https://doi.org/10.1198/106186008X320456; of rollouts
https://fengyao.notion.site/off-policy-rl). Where mu covers what pi covers, that makes the expectation over a token's choices the one under
pi, but for the truncation. What mu never samples cannot be weighed: docs/guides/learning.md names the bias.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import BadRowsError
from trainer.credit.learning import bounds
from trainer.data.batch import Batch

_LARGEST = 20.0
"""Largest absolute log-ratio, in nats: ratios beyond e^20 are truncated alike."""


def corrected(batch: Batch, logprobs: NDArray[np.float32], threshold: str) -> tuple[Batch, dict[str, float]]:
    """Correct a batch's reshaped rows.

    Args:
        batch: with reshaped rows.
        logprobs: nats, of the batch's shape [rows, response]: of the sampled tokens under the weights at the step's start. Other rows'
            values are not looked at.
        threshold: of `trainer.loss.correction.threshold`: `UPPER` cuts weights there, `LOWER_UPPER` makes those outside 0.

    Returns:
        The batch with old_logprobs and weights (reshaped rows' values replaced), and metrics: reshaped_share (of sampled tokens),
        reshaped_weight_mean (before the threshold) and reshaped_truncated (share of the reshaped tokens beyond it).

    Raises:
        BadRowsError: a logprob of a reshaped row is not finite.
    """
    sampled = batch.response_mask.astype(bool)
    tokens = sampled & batch.reshaped[:, None]
    bad = np.flatnonzero((tokens & ~np.isfinite(batch.logprobs + logprobs)).any(axis=1))
    if len(bad):
        raise BadRowsError(
            f"{len(bad)} rows sampled with top-p, penalties or masked tokens have logprobs that are no finite numbers. Look at the engine "
            "that sampled them, or drop such calls (builder.reshaped = 'drop').",
            dict.fromkeys(bad.tolist(), "not_finite"),
        )
    ratios = np.exp(np.clip(logprobs - batch.logprobs, -_LARGEST, _LARGEST))
    weights = truncated(ratios, threshold)
    whole = np.ones_like(batch.logprobs) if batch.weights is None else batch.weights
    behaviour_logprobs = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
    count = max(int(tokens.sum()), 1)
    metrics = {
        "reshaped_share": float(tokens.sum() / max(sampled.sum(), 1)),
        "reshaped_weight_mean": float(ratios[tokens].sum() / count),
        "reshaped_truncated": float((weights != ratios)[tokens].sum() / count),
    }
    old = np.where(tokens, logprobs, behaviour_logprobs).astype(np.float32)
    return replace(batch, old_logprobs=old, weights=np.where(tokens, weights, whole).astype(np.float32)), metrics


def truncated(ratios: NDArray[np.float32], threshold: str) -> NDArray[np.float32]:
    """Return importance weights of ratios pi / mu: at most `UPPER`, or of `LOWER_UPPER` 0 outside of both.

    Raises:
        SettingsError: the threshold is neither.
    """
    lower, upper = bounds(threshold, "trainer.loss.correction.threshold")
    if lower is None:
        return np.minimum(ratios, np.float32(upper))
    return np.where((ratios >= lower) & (ratios <= upper), ratios, np.float32(0))
