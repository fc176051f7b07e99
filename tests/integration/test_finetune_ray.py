"""Training on files with two workers under Ray, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.trainers import EXAMPLES, PAIRS, save
from tests.support.trainers import finetune_settings as settings
from trainer.sft.optimizer import FileOptimizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_finetune_with_two_ray_workers_matches_one_process(method: Any, tiny_model: Path, tmp_path: Path):
    """Three examples: the second worker has a no-op row, or pair, and pairs stay whole."""
    examples = EXAMPLES if method == "sft" else PAIRS
    metrics: dict[int, list[dict[str, float]]] = {}
    weights: dict[int, dict[str, np.ndarray]] = {}
    for workers in (0, 2):
        chosen = settings(
            tiny_model, tmp_path, learning_rate=1e-3, warmup=0.2, trainer={"workers__per_node": workers, "max_tokens_per_device": 40}
        )
        optimizer = FileOptimizer(tiny_model, chosen, method, 10)
        optimizer.reference = optimizer.logprobs(examples)
        metrics[workers] = [optimizer.step(examples, optimizer.reference), optimizer.step(examples, optimizer.reference)]
        place = tmp_path / str(workers)
        save(optimizer, place)
        weights[workers] = load_file(place / "model.safetensors")
        metrics[workers].append(optimizer.measure(examples, optimizer.reference))
        optimizer.close()
    for of_workers in metrics.values():
        # The policy is still the reference before the first step, and after it, as its learning rate is 0: margins are rounding errors.
        for step in of_workers[:2]:
            assert step.get("preference_margin", 0.0) == pytest.approx(0.0, abs=1e-5)
            step.pop("preference_accuracy", None)
    for local, distributed in zip(metrics[0], metrics[2], strict=True):
        assert distributed == pytest.approx(local, rel=1e-4, abs=1e-5)
    # AdamW's first steps are the gradient's sign: a last bit may turn where the gradient is all but 0.
    assert max(float(np.abs(weights[0][name] - weights[2][name]).max()) for name in weights[0]) < 1e-4
    chosen = settings(tiny_model, tmp_path, learning_rate=1e-3, warmup=0.2)
    alone = FileOptimizer(tiny_model, chosen, method, 10)
    alone.load_state(tmp_path / "2")
    assert alone.reference is not None
    assert alone.reference.tolist() == pytest.approx(alone.logprobs(examples).tolist(), abs=1e-4)
