"""Logits of trained tokens alone beside verl's of all tokens: the same outputs and gradients, padded or packed, and no more of the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tests.support.policies import NO_ALARM, sampled_rows, trainer_settings
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import LOGITS_CHUNK
from trainer.optim.rows import tensordict

FLAGS = {"calculate_entropy": True, "calculate_sum_pi_squared": True, "measure_entropy": True}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Any:
    optimizer = VerlOptimizer(tiny_model, trainer_settings(alarms__logprob=NO_ALARM))
    return optimizer._workers._rank._models["policy"].engine


@pytest.fixture(scope="module")
def batch(tiny_model: Path) -> Batch:
    rows = sampled_rows(tiny_model, 5, temperature=1.0, seed=1) + sampled_rows(tiny_model, 3, temperature=0.7, seed=2)
    whole = layout(separate(pl.DataFrame(rows), pl.Series(np.linspace(-1, 1, 8))), lineage=[0])
    whole.response_mask[1, 1:3] = 0  # of an observation between two replies
    whole.response_mask[3] = 0
    return whole


def micro_batch(batch: Batch, *, packed: bool) -> Any:
    from verl.utils import tensordict_utils as tu

    rows = tensordict(batch, role="policy")
    tu.assign_non_tensor(rows, use_remove_padding=packed, **FLAGS)
    return rows


def by_verl(engine: Any, rows: Any) -> dict[str, torch.Tensor]:
    inputs, details = type(engine).prepare_model_inputs(engine, rows)
    return type(engine).prepare_model_outputs(engine, engine.module(**inputs, use_cache=False), details, rows, None)


def by_trained_logits(engine: Any, rows: Any) -> dict[str, torch.Tensor]:
    inputs, details = engine.prepare_model_inputs(rows)
    return engine.prepare_model_outputs(engine.module(**inputs, use_cache=False), details, rows, None)


def is_trained(batch: Batch) -> torch.Tensor:
    whole = np.concatenate([np.zeros_like(batch.prompts), batch.response_mask], axis=1)[batch.attention_mask.astype(bool)]
    return torch.from_numpy(np.roll(whole, -1)).bool()


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_are_verls_where_the_next_token_is_trained_and_zero_elsewhere(engine: Any, batch: Batch, packed: bool) -> None:
    rows, trained = micro_batch(batch, packed=packed), is_trained(batch)
    with torch.no_grad():
        expected, computed = by_verl(engine, rows), by_trained_logits(engine, rows)
    assert computed.keys() - expected.keys() == {"measured_entropy"}
    for name, values in computed.items():
        verls = expected[name.removeprefix("measured_")]
        torch.testing.assert_close(values.offsets(), verls.offsets())
        torch.testing.assert_close(values.values()[trained], verls.values()[trained], atol=1e-5, rtol=1e-5)
        assert not values.values()[~trained].any(), name
    assert 0 < int(trained.sum()) < len(trained) / 2


def test_gradients_of_logprobs_and_entropy_are_verls(engine: Any, batch: Batch) -> None:
    rows, trained = micro_batch(batch, packed=False), is_trained(batch)
    gradients: list[list[torch.Tensor]] = []
    for compute in (by_verl, by_trained_logits):
        outputs = compute(engine, rows)
        (outputs["log_probs"].values() - 0.1 * outputs["entropy"].values())[trained].square().sum().backward()
        gradients.append([parameter.grad.full_tensor().clone() for parameter in engine.module.parameters()])
        engine.module.zero_grad()
    for ours, verls in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, verls, atol=1e-5, rtol=1e-4)


def test_head_is_applied_to_trained_tokens_alone_or_to_one_where_none_is(engine: Any, batch: Batch) -> None:
    shapes: list[tuple[int, ...]] = []
    hook = engine.module.get_output_embeddings().register_forward_hook(lambda head, inputs, output: shapes.append(tuple(output.shape)))
    rows = micro_batch(batch, packed=False)
    by_trained_logits(engine, rows)
    rows["loss_mask"] = torch.zeros_like(rows["loss_mask"])
    by_trained_logits(engine, rows)["log_probs"].values().sum().backward()
    hook.remove()
    assert [shape[:2] for shape in shapes] == [(1, int(is_trained(batch).sum())), (1, 1)]
    assert all(parameter.grad is not None for parameter in engine.module.parameters())
    engine.module.zero_grad()


def test_logprobs_and_their_gradient_match_log_softmax_over_several_chunks() -> None:
    from trainer.optim.losses.trained_logits import token_logprobs

    random = torch.Generator().manual_seed(0)
    tokens = 2 * LOGITS_CHUNK + 3
    logits = torch.randn(tokens, 11, generator=random, dtype=torch.float64) * 5
    labels = torch.randint(11, (tokens,), generator=random)
    temperature = torch.rand(tokens, 1, generator=random, dtype=torch.float64) + 0.5
    weights = torch.randn(tokens, generator=random, dtype=torch.float64)
    plain, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected = (plain / temperature).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    computed = token_logprobs(ours * 1, labels, temperature)
    torch.testing.assert_close(computed, expected)
    for value in (expected, computed):
        (value * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)
