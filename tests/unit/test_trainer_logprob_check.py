"""Statistics of logprobs, their limits, and the rows that are named."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.settings.trainer_service import LogprobAlarm
from trainer.monitor.logprob_check import DEFAULTS, LogprobLimits, bad_rows, beyond, engine_dtype, limits_of, metrics, statistics

LIMITS = LogprobLimits(mean=0.05, p99=0.5, pearson=0.98, k3=0.005)


def noisy(rows: int, tokens: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Recorded logprobs, the trainer's with a little rounding, and a mask that is true everywhere."""
    generator = np.random.default_rng(seed)
    recorded = np.log(generator.uniform(0.05, 0.95, (rows, tokens)))
    return recorded, recorded + generator.normal(0, 0.01, recorded.shape), np.ones((rows, tokens), bool)


def test_statistics_of_two_tokens_are_the_formulas():
    computed = statistics(np.log([0.5, 0.25]), np.log([0.5, 0.5]), (0.2, 0.2))
    gap = math.log(2)
    assert computed["logprob_gap_mean"] == pytest.approx(gap / 2)
    assert computed["logprob_gap_max"] == pytest.approx(gap)
    assert computed["logprob_gap_p99"] == pytest.approx(0.99 * gap)
    assert computed["rollout_kl_k3"] == pytest.approx((2 - 1 - gap) / 2)
    assert computed["outside_clip"] == 0.5
    assert computed["probs_pearson"] == 1, "constant probabilities have no correlation to lose"


def test_statistics_pearson_matches_verl():
    from trainer.optim.process import choose_platform

    choose_platform()  # verl reads it when it is first imported
    import torch
    from verl.utils.debug.metrics import pearson_correlation_coefficient

    recorded, computed, mask = noisy(4, 50)
    of_verl = pearson_correlation_coefficient(torch.tensor(np.exp(recorded)), torch.tensor(np.exp(computed)), torch.tensor(mask))
    assert statistics(recorded.ravel(), computed.ravel(), (0.2, 0.2))["probs_pearson"] == pytest.approx(of_verl, abs=1e-9)


def test_statistics_k3_is_capped_and_finite():
    assert statistics(np.array([-800.0]), np.array([-0.1]), (0.2, 0.2))["rollout_kl_k3"] == 10


def test_logprob_metrics_by_staleness_omit_empty_classes():
    recorded, staleness = np.zeros(4), np.array([0, 0, 1, 3], np.int16)
    computed = metrics(recorded, np.array([0.1, 0.3, 1.0, 2.0]), staleness, (0.2, 0.2))
    means = {name.removeprefix("logprob_gap_mean"): value for name, value in computed.items() if name.startswith("logprob_gap_mean")}
    assert means == pytest.approx({"": 0.85, "_staleness_0": 0.2, "_staleness_1": 1.0, "_staleness_2plus": 2.0})
    assert "logprob_gap_mean_staleness_1" not in metrics(recorded[:2], recorded[:2], staleness[:2], (0.2, 0.2))


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 1000))
def test_bad_rows_of_rounding_differences_are_none(rows: int, tokens: int, seed: int):
    assert len(bad_rows(*noisy(rows, tokens, seed), LIMITS)) == 0


@given(st.integers(3, 40), st.integers(1, 60), st.integers(0, 1000))
def test_bad_rows_of_one_row_far_off_are_that_row(rows: int, tokens: int, seed: int):
    recorded, computed, mask = noisy(rows, tokens, seed)
    row = seed % rows
    computed[row] -= 3
    assert bad_rows(recorded, computed, mask, LIMITS).tolist() == [row]


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 1000))
def test_bad_rows_of_difference_in_all_rows_are_all_with_tokens(rows: int, tokens: int, seed: int):
    recorded, computed, mask = noisy(rows, tokens, seed)
    mask[0] = rows == 1
    assert bad_rows(recorded, computed - 0.2, mask, LIMITS).tolist() == list(range(0 if rows == 1 else 1, rows))


def test_bad_rows_of_few_rows_that_shift_mean_are_those():
    recorded, computed, mask = noisy(20, 50)
    computed[3:6] -= 0.33
    assert not beyond(recorded, computed, np.arange(20)[:, None] * np.ones(50) > 5, LIMITS)
    assert bad_rows(recorded, computed, mask, LIMITS).tolist() == [3, 4, 5]


def test_bad_rows_ignore_masked_tokens():
    recorded, computed, mask = noisy(4, 4)
    assert len(bad_rows(recorded, computed - 5, mask & False, LIMITS)) == 0


def test_bad_rows_of_certain_policy_are_none():
    recorded = np.full((10, 50), np.log(0.999))
    computed = recorded + np.random.default_rng(0).normal(0, 1e-4, recorded.shape)
    assert len(bad_rows(recorded, computed, np.ones((10, 50), bool), LIMITS)) == 0


def test_limits_of_settings_or_dtype_defaults():
    dtypes: list[tuple[Literal["fp32", "bf16"], Literal["fp32", "bf16"]]] = [
        ("fp32", "fp32"),
        ("fp32", "bf16"),
        ("bf16", "fp32"),
        ("bf16", "bf16"),
    ]
    assert [limits_of(LogprobAlarm(), *pair) for pair in dtypes] == [DEFAULTS[pair] for pair in dtypes]
    assert limits_of(LogprobAlarm(mean=7, pearson=-1), "fp32", "fp32") == LogprobLimits(
        7, DEFAULTS["fp32", "fp32"].p99, -1, DEFAULTS["fp32", "fp32"].k3
    )
    assert [engine_dtype(name) for name in ("float32", "float", "auto", "bfloat16", "half")] == ["fp32", "fp32", "bf16", "bf16", "bf16"]


def test_limits_after_a_drift_let_its_gaussian_pass():
    drift = 0.05
    gap = np.random.default_rng(0).normal(-drift, math.sqrt(2 * drift), (100, 50))
    recorded = np.full_like(gap, -2.0)
    mask = np.ones(gap.shape, bool)
    assert len(bad_rows(recorded, recorded + gap, mask, DEFAULTS["fp32", "fp32"])) == 100
    assert len(bad_rows(recorded, recorded + gap, mask, DEFAULTS["fp32", "fp32"].after(1.2 * drift))) == 0
    assert DEFAULTS["fp32", "fp32"].after(0) == DEFAULTS["fp32", "fp32"]
