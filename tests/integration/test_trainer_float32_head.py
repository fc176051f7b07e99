"""Logits of a bfloat16 trainer in float32: with a head of its own or a tied one, with adapters, and gradients through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
import torch

from tests.support.policies import NO_ALARM, sampled_rows, trainer_settings
from trainer.data.batch import Batch, layout, take
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer

RATE = 1e-3


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.two_tools.model import WORDS, random_llama, word_tokenizer

    directory, tokenizer = tmp_path_factory.mktemp("tied"), word_tokenizer(WORDS)
    torch.manual_seed(0)
    random_llama(tokenizer, hidden=64, spread=0.15, tied=True).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def batch(model: Path) -> Batch:
    rows = pl.DataFrame(sampled_rows(model, 8, temperature=0.7, seed=1))
    return layout(separate(rows, pl.Series(np.linspace(-1, 1, 8))), lineage=[0])


@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
@pytest.mark.parametrize("changes", [{}, {"lora__rank": 4}])
def test_float32_head_logprobs_of_bf16_trainer_match_float32_logits(model: str, changes: dict[str, Any], request: pytest.FixtureRequest):
    path: Path = request.getfixturevalue(model)
    engine = VerlOptimizer(path, trainer_settings(dtype="bf16", learning_rate=RATE, alarms__logprob=NO_ALARM, **changes))
    head = engine._workers._rank._models["policy"].engine.module.get_output_embeddings()
    seen: dict[str, torch.Tensor] = {}
    head.register_forward_pre_hook(lambda module, inputs: seen.update(hidden=inputs[0].detach().clone()))
    rows = batch(path)
    weights = dict(engine.weights())
    rounded = torch.from_numpy(weights.get("lm_head.weight", weights["model.embed_tokens.weight"])).bfloat16().float()
    for row in range(rows.real_rows):
        alone = take(rows, np.array([row]))
        computed, tokens = engine.phases(alone).logprobs_under("policy", alone)[0], int(alone.response_mask.sum())
        assert seen["hidden"].dtype == torch.bfloat16
        states = seen["hidden"].float().reshape(tokens, rounded.shape[1])  # those of the trained tokens alone
        expected = (states @ rounded.T / float(alone.temperature[0])).log_softmax(-1)
        picked = expected.gather(1, torch.from_numpy(alone.responses[0, :tokens])[:, None])[:, 0]
        assert computed[:tokens] == pytest.approx(picked.numpy(), abs=1e-5)
    assert engine.step(rows)["grad_norm"] > 0


def test_float32_head_reduces_logprob_gap(tiny_model: Path):
    rows = batch(tiny_model)
    with patch("trainer.optim.verl_worker.compute_head_in_float32"):
        rounded = VerlOptimizer(tiny_model, trainer_settings(dtype="bf16", alarms__logprob=NO_ALARM))
    whole = VerlOptimizer(tiny_model, trainer_settings(dtype="bf16", alarms__logprob=NO_ALARM))
    assert whole.step(rows)["logprob_gap_mean"] < rounded.step(rows)["logprob_gap_mean"]


def test_float32_head_leaves_float32_trainer_unchanged(tiny_model: Path):
    rows = batch(tiny_model)
    with patch("trainer.optim.verl_worker.compute_head_in_float32"):
        without = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE))
    assert VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE)).step(rows) == without.step(rows)
