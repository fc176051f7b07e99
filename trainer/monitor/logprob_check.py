"""Comparison of the logprobs that responses were sampled with and those that the trainer computes for the same tokens.

Invariant: pure functions of arrays; the largest difference of a batch is a metric and never an alarm, for it grows with the batch.

Statistics of tokens, with d = trainer's logprob - recorded logprob: mean, 99th percentile and maximum of |d|; Pearson's correlation of the
two probabilities (https://arxiv.org/abs/2506.13585, as verl's `rollout_actor_probs_pearson_corr`); the k3 estimate exp(d) - 1 - d of
KL(rollout || trainer), whose mean is unbiased and whose terms are never negative (http://joschu.net/blog/kl-approx.html); the share of
tokens whose ratio exp(d) is outside the clip range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spangrad.settings.trainer_service import LogprobAlarm

Dtype = Literal["fp32", "bf16"]
Floats = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogprobLimits:
    """Largest tolerated statistics of a batch's tokens; `pearson` is the smallest."""

    mean: float
    p99: float
    pearson: float
    k3: float

    def after(self, drift: float) -> LogprobLimits:
        """Return the limits for tokens of a policy that has since moved by a KL divergence of `drift` nats.

        Small divergences are half the mean square of d, so that |d| has a mean of at most sqrt(2 drift).
        """
        if not drift:
            return self
        moved = float(np.sqrt(2 * drift))
        return LogprobLimits(self.mean + moved, self.p99 + _TAIL * moved, -1.0, self.k3 + drift)

    def of_row(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the largest tolerated mean |d| of rows with so many tokens: few tokens may all come from the tail."""
        return self.mean + _TAIL * self.p99 / np.sqrt(np.maximum(tokens, 1))


DEFAULTS: Mapping[tuple[Dtype, Dtype], LogprobLimits] = {
    ("fp32", "fp32"): LogprobLimits(mean=2e-3, p99=2e-2, pearson=0.999, k3=2e-5),
    ("fp32", "bf16"): LogprobLimits(mean=5e-2, p99=0.5, pearson=0.98, k3=5e-3),
    ("bf16", "fp32"): LogprobLimits(mean=5e-2, p99=0.5, pearson=0.98, k3=5e-3),
    ("bf16", "bf16"): LogprobLimits(mean=5e-2, p99=0.5, pearson=0.98, k3=5e-3),
}
"""Limits by the dtypes of engine and trainer: several times what `python -m benchmarks.logprob_gap` measures (docs/guides/learning.md)."""
_TAIL = 4.0
"""Multiple of a typical difference that the tail of healthy tokens may reach."""
_SPREAD = 0.1
"""Smallest standard deviation of probabilities at which a correlation has a meaning: below, all are near 1, and the rest is rounding."""
_FEW = 50
"""Smallest number of tokens at which a correlation has a meaning."""
_LARGEST_K3 = 10.0
"""Cap of a token's k3, as verl's `low_var_kl`: exp(d) of one token would outweigh all others."""


def limits_of(alarm: LogprobAlarm, engine: Dtype, trainer: Dtype) -> LogprobLimits:
    """Return the limits that the settings name, and the dtypes' defaults for the others."""
    named = {name: getattr(alarm, name) for name in ("mean", "p99", "pearson", "k3")}
    return replace(DEFAULTS[engine, trainer], **{name: value for name, value in named.items() if value is not None})


def engine_dtype(name: str) -> Dtype:
    """Return the dtype of `engine.dtype`: all but float32 round as bfloat16 or less, also what vLLM makes of `auto`."""
    return "fp32" if name in {"float32", "float"} else "bf16"


def statistics(recorded: Floats, computed: Floats, clip: tuple[float, float]) -> dict[str, float]:
    """Return the statistics of tokens by metric name.

    Args:
        recorded: logprobs that tokens were sampled with (nats), shape (tokens,), at least one.
        computed: the trainer's.
        clip: how far a ratio may lie below and above 1.
    """
    gap = np.asarray(computed, np.float64) - np.asarray(recorded, np.float64)
    size = np.abs(gap)
    ratio = np.exp(gap.clip(-20, 20))
    return {
        "logprob_gap_mean": float(size.mean()),
        "logprob_gap_p99": float(np.quantile(size, 0.99)),
        "logprob_gap_max": float(size.max()),
        "probs_pearson": _pearson(recorded, computed),
        "rollout_kl_k3": float(np.minimum(ratio - 1 - gap, _LARGEST_K3).mean()),
        "outside_clip": float(((ratio < 1 - clip[0]) | (ratio > 1 + clip[1])).mean()),
    }


def metrics(recorded: Floats, computed: Floats, staleness: NDArray[np.int16], clip: tuple[float, float]) -> dict[str, float]:
    """Return the `statistics` of all tokens, and of those of the trained version, of the one before it, and of older ones.

    The staleness of a token is the number of versions between its own and the trained one; -1: unknown.
    """
    classes = {
        "": np.ones(len(staleness), bool),
        "_staleness_0": staleness == 0,
        "_staleness_1": staleness == 1,
        "_staleness_2plus": staleness > 1,
    }
    return {
        f"{name}{suffix}": value
        for suffix, chosen in classes.items()
        if chosen.any()
        for name, value in statistics(recorded[chosen], computed[chosen], clip).items()
    }


def bad_rows(recorded: Floats, computed: Floats, mask: NDArray[np.bool_], limits: LogprobLimits) -> NDArray[np.int64]:
    """Return the rows that cause differences beyond the limits, in order.

    A row whose own mean is out of all proportion is named regardless of the others. Where all tokens together are beyond a limit, the rows
    above the mean's limit are named; where the others are still beyond, or most rows are named, the fault is of no single row (a stale
    cache, a wrong temperature), and every row is named.

    Args:
        recorded: logprobs that tokens were sampled with, shape (rows, tokens), finite where `mask` is.
        computed: the trainer's, of the same shape.
        mask: tokens that are compared.
        limits: of the dtypes.
    """
    tokens = mask.sum(axis=1)
    compared = tokens > 0
    if not compared.any():
        return np.zeros(0, np.int64)
    gap = np.where(mask, np.abs(np.asarray(computed, np.float64) - recorded), 0.0)
    means = gap.sum(axis=1) / np.maximum(tokens, 1)
    named = means > limits.of_row(tokens)
    if beyond(recorded, computed, mask & ~named[:, None], limits):
        named |= means > limits.mean
        if beyond(recorded, computed, mask & ~named[:, None], limits):
            named = compared
    if named.sum() > compared.sum() / 2:
        named = compared
    return np.flatnonzero(named)


def beyond(recorded: Floats, computed: Floats, mask: NDArray[np.bool_], limits: LogprobLimits) -> list[str]:
    """Return a text for each statistic of the chosen tokens that is beyond its limit; none where no token is chosen."""
    if not mask.any():
        return []
    recorded, computed = recorded[mask], computed[mask]
    statistic = statistics(recorded, computed, (0.0, 0.0))
    texts = [
        f"{label} {statistic[name]:.3g} > {limit:.3g}"
        for name, label, limit in (
            ("logprob_gap_mean", "mean |difference|", limits.mean),
            ("logprob_gap_p99", "99th percentile", limits.p99),
            ("rollout_kl_k3", "KL (k3)", limits.k3),
        )
        if not statistic[name] <= limit
    ]
    spread = len(recorded) >= _FEW and np.exp(recorded).std() >= _SPREAD and np.exp(computed).std() >= _SPREAD
    if spread and not statistic["probs_pearson"] >= limits.pearson:
        texts.append(f"correlation of probabilities {statistic['probs_pearson']:.4g} < {limits.pearson:.4g}")
    return texts


def _pearson(recorded: Floats, computed: Floats) -> float:
    """Return Pearson's correlation of two lists of probabilities; 1 where they are constant or single."""
    first, second = (np.exp(np.asarray(values, np.float64)) for values in (recorded, computed))
    first, second = first - first.mean(), second - second.mean()
    scale = np.sqrt((first @ first) * (second @ second))
    return float(first @ second / scale) if scale > 1e-12 else 1.0
