"""Combinations of the settings of learning: unsupported ones are refused before anything heavy starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spangrad.errors import SettingsError
from spangrad.settings.trainer_learning import Correction
from tests.support.policies import trainer_settings
from trainer.credit import learning
from trainer.data.batch import Batch, split, take

RECOMPUTED: dict[str, Any] = {"recompute_logprobs": True}


@pytest.mark.parametrize(
    ("facts", "merged"),
    [
        ({}, True),
        ({"loss__name": "gspo", "loss__aggregation": "seq-mean-token-mean"}, True),
        ({"correction": Correction(weights="sequence"), **RECOMPUTED}, True),
        ({"estimator": "gae"}, False),
        ({"estimator": "optimal_token_baseline"}, False),
        ({"loss__name": "clip_cov"}, False),
        ({"loss__name": "kl_cov"}, False),
        ({"correction": Correction(weights="token", normalise=True), **RECOMPUTED}, True),
        ({"merge": False}, False),
        ({"loss__name": "clip_cov", "merge": True}, True),
    ],
    ids=str,
)
def test_merges_by_default_unless_micro_batches_change_gradient(facts: dict[str, Any], merged: bool) -> None:
    assert learning.merges(trainer_settings(**facts)) is merged


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            {"estimator": "remax", "credit__scheme": "own", "baseline": "turn"},
            "compares returns with that of a whole greedy rollout.*'identical'",
        ),
        ({"estimator": "gae", "credit__scheme": "own", "baseline": "turn"}, "gives credit to each token by itself.*Leave both out"),
        ({"estimator": "gae", "merge": True}, r"trainer\.credit\.estimator = 'gae' takes a row for one call"),
        (
            {"loss__name": "geo_mean", "credit__scheme": "own", "baseline": "turn"},
            "'geo_mean' takes one advantage a rollout.*Set trainer.credit.scheme = 'identical'",
        ),
        *(
            (
                {"estimator": estimator, "skip_equal_groups": True},
                rf"skip_equal_groups = true skips .* trainer\.credit\.estimator = '{estimator}' compares .* whole batch.*= false",
            )
            for estimator in ("gae", "reinforce_plus_plus")
        ),
        ({"loss__name": "geo_mean", "estimator": "gae"}, "'geo_mean' takes one advantage a rollout"),
        ({"estimator": "gdpo", "credit__scheme": "own", "baseline": "turn"}, "Set trainer.credit.scheme = 'identical'"),
        (
            {"loss__aggregation": "seq-mean-token-sum-norm"},
            r"would depend on the longest one beside it\. Set trainer\.loss\.options\.loss_scale",
        ),
        ({"loss__name": "dro"}, r"Set trainer\.loss\.options\.dro_beta"),
        ({"loss__options": {"clip_ratio_c": 1.0}}, r"clip_ratio_c = 1 has no meaning. Give a number above 1\."),
        ({"loss__name": "kl_cov", "loss__options": {"kl_cov_ratio": 2}}, "above 0 and at most 1"),
        ({"loss__name": "kl_cov", "loss__options": {"ppo_kl_coef": float("nan")}}, "ppo_kl_coef = nan has no meaning"),
        ({"loss__name": "gspo", "loss__options": {"tau_pos": 1.0}}, r"loss\.options\.tau_pos: trainer\.loss\.name = 'gspo'.*takes none"),
        ({"loss__options": {"tau_pos": 1.0}}, r"takes clip_ratio_c\. Take it out"),
        ({"loss__options": {"loss_scale_factor": 9}}, "takes clip_ratio_c"),
        ({"weight_sync__method": "adapter"}, r"trainer\.lora\.rank = 0 trains no adapters\. Set the rank"),
        ({"optim__schedule": "cosine"}, r"trainer\.max_steps = 0 has no end\. Set the number of steps"),
        ({"kl_coef": 0.1}, r"Set trainer\.loss\.reference"),
        ({"kl_coef": 0.1, "reference": Path("/nowhere")}, "is no directory"),
        ({"correction": Correction(weights="token")}, "Set trainer.loss.recompute_logprobs = true"),
        ({"correction": Correction(weights="token", threshold="two"), **RECOMPUTED}, r"correction\.threshold = 'two' is neither"),
        ({"correction": Correction(weights="token", threshold="2_1"), **RECOMPUTED}, "is neither"),
        ({"correction": Correction(reject={"k9": "1"}), **RECOMPUTED}, r"reject\.k9 is not known"),
        ({"correction": Correction(reject={"token_k1": "2"}), **RECOMPUTED}, "needs both bounds"),
        ({"correction": Correction(reject={"token_k3": "1_2"}), **RECOMPUTED}, "has no lower bound"),
        ({"correction": Correction(objective="reinforce")}, "is for trainer.loss.name = 'bypass_mode'"),
        ({"loss__name": "bypass_mode", **RECOMPUTED}, "Set trainer.loss.recompute_logprobs = false"),
    ],
)
def test_learning_check_of_unsupported_settings_raises(facts: dict[str, Any], says: str):
    with pytest.raises(SettingsError, match=says):
        learning.check(trainer_settings(**facts))


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"estimator": "gdpo", "credit__scheme": "final_only"},
        {"estimator": "gae", "gamma": 0.99, "gae_lambda": 0.95},
        {"estimator": "optimal_token_baseline", "skip_equal_groups": True},
        {"loss__name": "dro", "loss__options": {"dro_beta": 0.1}},
        {"loss__aggregation": "seq-mean-token-sum-norm", "loss__options": {"loss_scale_factor": 9, "clip_ratio_c": 2}},
        {"kl_coef": 0.1, "model": Path("/begins/here")},
        {"optim__schedule": "cosine", "max_steps": 9},
        {"merge": True, "correction": Correction(weights="token", threshold="0.5_5", reject={"token_k1": "0.5_2"}), **RECOMPUTED},
        {"loss__name": "bypass_mode", "correction": Correction(weights="sequence", objective="reinforce")},
        {"merge": True, "loss__name": "gspo", "loss__aggregation": "seq-mean-token-mean"},
        {"merge": True, "correction": Correction(weights="sequence", reject={"seq_sum_k2": "1"}), **RECOMPUTED},
        {"loss__name": "geo_mean", "baseline": "transition"},
    ],
)
def test_learning_check_of_supported_settings_passes(facts: dict[str, Any]):
    learning.check(trainer_settings(**facts))


@pytest.mark.parametrize("mode", ["validate", "probe", "greedy", "trial"])
def test_trainer_modes_held_out_mode_is_refused(mode: str):
    with pytest.raises(ValidationError, match=f"rollouts of mode {mode} .* are never trained. Take {mode} out of trainer.modes"):
        trainer_settings(modes=("train", mode))
    assert trainer_settings(modes=("train", "production", "my-own")).modes == ("train", "production", "my-own")


def numbered(real: int, padding: int) -> Batch:
    """Rows whose every array tells the row's number."""
    count = real + padding
    numbers = np.arange(1, count + 1)
    wide = np.broadcast_to(numbers[:, None], (count, 2))
    return Batch(
        prompts=wide.copy(),
        responses=wide.copy(),
        attention_mask=np.ones((count, 4), np.int64),
        response_mask=np.ones((count, 2), np.int64),
        logprobs=wide.astype(np.float32),
        advantages=wide.astype(np.float32),
        temperature=numbers.astype(np.float32),
        versions=wide.astype(np.int64),
        staleness=wide.astype(np.int16),
        reshaped=numbers % 2 == 0,
        rollout=numbers,
        group=numbers,
        real_rows=real,
        old_logprobs=wide.astype(np.float32),
        weights=wide.astype(np.float32),
    )


@given(st.integers(1, 20), st.integers(0, 3), st.integers(1, 6), st.integers(1, 4), st.randoms())
def test_split_and_take_share_rows_among_mini_batches(real: int, padding: int, count: int, divisor: int, chance: Any):
    order = list(range(real))
    chance.shuffle(order)
    batch = numbered(real, padding)
    parts = [take(batch, rows, divisor=divisor) for rows in split(batch, order, count)]
    assert len(parts) == min(count, real)
    assert max(part.real_rows for part in parts) - min(part.real_rows for part in parts) <= 1
    seen: list[int] = []
    for part in parts:
        rows, kept = len(part.prompts), part.real_rows
        assert rows % divisor == 0
        assert rows - kept < divisor
        numbers = part.prompts[:kept, 0].tolist()
        for array in (part.responses, part.logprobs, part.advantages, part.temperature[:, None], part.old_logprobs, part.weights):
            assert array is not None
            assert array[:kept, 0].tolist() == numbers
        for array in (part.versions, part.staleness):
            assert (array[:kept, 0].tolist(), array[kept:].tolist()) == (numbers, [[-1, -1]] * (rows - kept))
        for row_numbers in (part.rollout, part.group):
            assert row_numbers.tolist() == numbers + [-1] * (rows - kept)
        assert part.reference_logprobs is None
        assert not part.response_mask[kept:].any(), "no-op rows"
        assert part.attention_mask[kept:].sum(axis=1).tolist() == [1] * (rows - kept)
        assert part.temperature[kept:].tolist() == [1] * (rows - kept)
        seen += numbers
    assert seen == [row + 1 for row in order]
