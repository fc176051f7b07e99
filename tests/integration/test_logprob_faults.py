"""Faults of sampling that the logprob check must see, at staleness 0 and 1, and sound rows that must pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spangrad.errors import BadRowsError
from tests.support.policies import CITIES, CITY, FIRST_CITY, ROWS, LaggingPolicy, task_prompts
from tests.support.sections import trainer_settings
from tests.support.trainers import save
from trainer.optim.optimizer import VerlOptimizer

LEARNING_RATE = 1e-3
"""The demo's, at which one step moves logprobs by more than a wrong temperature does."""
EARLY, STEPS = 12, 36


def of_a_stale_cache(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    return policy.sample(policy.versions[-1 - behind], cached_by=policy.versions[0])


def at_another_temperature(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    return policy.sample(policy.versions[-1 - behind], temperature=0.5)


def of_a_retokenised_prompt(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    prompts = task_prompts()
    prompts[:, CITY] = FIRST_CITY + (prompts[:, CITY] - FIRST_CITY + 1) % CITIES
    return policy.sample(policy.versions[-1 - behind], prompts=prompts)


def of_other_weights(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    return policy.sample(policy.versions[0])


FAULTS: tuple[Callable[[LaggingPolicy, int], list[dict[str, Any]]], ...] = (
    of_a_stale_cache,
    at_another_temperature,
    of_a_retokenised_prompt,
    of_other_weights,
)


@pytest.mark.parametrize(("trainer", "engine"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.bfloat16)])
def test_logprob_check_passes_lagging_rollouts_and_refuses_faulty_rollouts(tiny_model: Path, trainer: Any, engine: torch.dtype):
    settings = trainer_settings(learning_rate=LEARNING_RATE, max_staleness=1, dtype=trainer)
    policy = LaggingPolicy(tiny_model, settings, engine)
    moved = [policy.step(behind=1) for _ in range(EARLY)]
    assert max(metrics["logprob_gap_mean_staleness_1"] for metrics in moved[1:]) > 0.1, "the policy hardly moves: passing shows nothing"
    for fault in FAULTS:
        for behind in (0, 1):
            with pytest.raises(BadRowsError) as raised:
                policy.engine.step(policy.batch(fault(policy, behind), behind))
            assert raised.value.rows == dict.fromkeys(range(ROWS), "logprob_gap"), (fault.__name__, behind)
    late = [policy.step(behind=1) for _ in range(STEPS - EARLY)]
    assert all(metrics["updated"] == 1 for metrics in moved)
    held = [metrics["held_gap_mean_behind_1"] for metrics in [*moved, *late] if "held_gap_mean_behind_1" in metrics]
    assert len(held) > EARLY / 2
    assert max(held) < (1e-4 if (trainer, engine) == ("fp32", torch.float32) else 0.05)


def test_logprob_check_after_restart_holds_weights_of_earlier_checkpoints(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(learning_rate=LEARNING_RATE, max_staleness=2)
    policy = LaggingPolicy(tiny_model, settings, torch.float32)
    checkpoints = [tiny_model]
    for number in range(1, EARLY):
        policy.step(behind=1)
        checkpoints.append(tmp_path / f"v{number}")
        shutil.copytree(tiny_model, checkpoints[-1], ignore=shutil.ignore_patterns("*.safetensors"))
        save(policy.engine, checkpoints[-1])
    policy.engine.close()
    policy.engine = again = VerlOptimizer(checkpoints[-1], settings, engine_dtype="float32")
    before = {name: value.copy() for name, value in again.weights()}
    again.hold(checkpoints[-3:-1])
    assert all(np.array_equal(value, before[name]) for name, value in again.weights()), "its own weights stay"
    for behind in (1, 2):
        with pytest.raises(BadRowsError):
            again.step(policy.batch(at_another_temperature(policy, behind), behind))
    metrics = again.step(policy.batch(policy.sample(policy.versions[-3]), behind=2))
    assert metrics["held_gap_mean_behind_2"] < 1e-4, "sound calls pass, though the policy has moved"


def test_logprob_check_after_restart_refuses_fault_beyond_drift(tiny_model: Path):
    """No earlier weights are held yet: a row of the version before may differ by the drift of one version, and no more."""
    policy = LaggingPolicy(tiny_model, trainer_settings(learning_rate=LEARNING_RATE, max_staleness=1), torch.float32)
    policy.versions.append(policy.versions[0])
    sound = policy.batch(policy.sample(policy.versions[0]), behind=1)
    assert "held_gap_mean_behind_1" not in policy.engine.step(sound)

    policy = LaggingPolicy(tiny_model, trainer_settings(learning_rate=LEARNING_RATE, max_staleness=1), torch.float32)
    policy.versions.append(policy.versions[0])
    wrong = [{**row, "Logprobs": [value - 1 for value in row["Logprobs"]]} for row in policy.sample(policy.versions[0])]
    with pytest.raises(BadRowsError):
        policy.engine.step(policy.batch(wrong, behind=1))
