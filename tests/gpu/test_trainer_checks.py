"""Checks of the trainer that need a GPU: bfloat16, packed rows, copies beside the next step, memory, speed, ranks over NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from spangrad.errors import BadRowsError
from tests.gpu.models import HALF_BILLION, SMALL, make_model, optimizer_of, random_batch, stepped
from tests.support.policies import trainer_settings
from trainer.capacity import memory
from trainer.capacity.architecture import architecture_of

ReportedFigures = dict[str, float]
LENGTHS = [(16 + 5 * row, 24 + 7 * row) for row in range(16)]
"""Prompt and response tokens of 16 rows of different lengths."""
STEPS = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("small"), SMALL)


def differences(metrics: dict[str, float], other: dict[str, float]) -> ReportedFigures:
    """Relative differences of two steps' loss and gradient norm."""
    return {name: abs(metrics[name] - other[name]) / max(abs(other[name]), 1e-6) for name in ("loss", "grad_norm")}


def test_step_in_bfloat16_agrees_with_float32(device: str, small: Path, figures: ReportedFigures) -> None:
    figures |= differences(stepped(small, LENGTHS, SMALL, dtype="bf16"), stepped(small, LENGTHS, SMALL, dtype="fp32"))
    assert (figures["grad_norm"] < 0.05, figures["loss"] < 0.1) == (True, True), figures


def test_packed_step_agrees_with_padded_step(flash_attention: str, small: Path, figures: ReportedFigures) -> None:
    packed, padded = (stepped(small, LENGTHS, SMALL, dtype="bf16", packing=packing) for packing in (True, False))
    figures |= differences(packed, padded)
    assert (figures["grad_norm"] < 0.02, figures["loss"] < 0.05) == (True, True), figures


def test_refused_step_leaves_weights_and_moments(device: str, small: Path) -> None:
    optimizer = optimizer_of(small, mini_batches=2)
    batch = random_batch(SMALL["vocab_size"], LENGTHS)
    optimizer.step(batch)
    before = weights(optimizer)
    with pytest.raises(BadRowsError):
        optimizer.step(replace(batch, advantages=np.where(batch.response_mask == 1, np.float32("nan"), 0).astype(np.float32)))
    assert changed(before, weights(optimizer)) == []
    metrics, again = optimizer.step(batch), optimizer_of(small, mini_batches=2)
    again.step(batch)
    assert metrics["grad_norm"] == pytest.approx(again.step(batch)["grad_norm"], rel=1e-3), "its moments are those of one step"


def test_version_written_beside_next_step_is_its_own(device: str, small: Path, tmp_path: Path) -> None:
    optimizer = optimizer_of(small, learning_rate=1e-2)
    batch = random_batch(SMALL["vocab_size"], LENGTHS)
    optimizer.step(batch)
    own = weights(optimizer)
    optimizer.collect()
    optimizer.step(batch, lambda: optimizer.write(tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    assert (changed(own, written), len(changed(own, weights(optimizer))) > 0) == ([], True)


def test_step_of_half_a_billion_parameters_reaches_share_of_peak(device: str, tmp_path: Path, figures: ReportedFigures) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no peak to compare with")
    import torch

    make_model(tmp_path, HALF_BILLION)
    tokens = 8192
    settings = {"max_tokens_per_device": tokens, "gradient_checkpointing": True, "dtype": "bf16"}
    optimizer = optimizer_of(tmp_path, **settings)
    batch = random_batch(HALF_BILLION["vocab_size"], [(512, 512)] * 32)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        metrics = optimizer.step(batch)
    seconds = sum(optimizer.pass_seconds.values())
    figures |= {"mfu": metrics.get("mfu", 0.0), "tokens_per_second": 32 * 1024 / seconds, "peak_gb": torch.cuda.max_memory_reserved() / 1e9}
    model = architecture_of(HALF_BILLION, tmp_path / "config.json")
    planned = memory.peak_bytes(memory.trainer_gpu(model, trainer_settings(**settings), 1))
    figures["planned_over_measured"] = planned / torch.cuda.max_memory_reserved()
    assert figures["mfu"] > 0.1, "far below what the planner counts on"
    assert 0.85 < figures["planned_over_measured"] < 1.5, "the planner's memory"


def test_two_ranks_step_as_one_does(several_devices: str, small: Path, figures: ReportedFigures) -> None:
    figures |= differences(stepped(small, LENGTHS, SMALL, dtype="fp32", workers__per_node=2), stepped(small, LENGTHS, SMALL, dtype="fp32"))
    assert (figures["grad_norm"] < 1e-3, figures["loss"] < 1e-3) == (True, True), figures


def weights(optimizer: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in optimizer.weights()}


def changed(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not np.array_equal(left[name], right[name])]
