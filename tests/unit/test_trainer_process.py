"""Device of the trainer's process: what it decides where a setting does not, and the line that says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.policies import trainer_settings
from trainer.optim.process import describe_choices

ON_CPU = "device cpu, dtype fp32, packing off, gradient_checkpointing off"
ON_GPUS = "device cuda x 4, dtype bf16, packing on, gradient_checkpointing on"
GRPO = "max_tokens_per_device 16384, estimator grpo, loss vanilla (token-mean)"


@pytest.mark.parametrize(
    ("facts", "device", "line"),
    [
        ({}, "cpu", f"{ON_CPU}, merge on, {GRPO}, lora.rank none, weight_sync disk"),
        ({"merge": False, "publish": False}, "cpu", f"{ON_CPU}, merge off, {GRPO}, lora.rank none, weight_sync none"),
        ({"estimator": "gae"}, "cpu", f"{ON_CPU}, merge off, {GRPO}, lora.rank none, weight_sync disk".replace("grpo", "gae")),
        (
            {"lora__rank": 8, "weight_sync__method": "adapter", "per_node": 2, "nodes": 2, "packing": True},
            "cuda",
            f"{ON_GPUS}, merge on, {GRPO}, lora.rank 8, weight_sync adapter",
        ),
    ],
    ids=str,
)
def test_describe_choices_names_defaults_of_device_and_estimator(facts: dict[str, Any], device: str, line: str) -> None:
    assert describe_choices(trainer_settings(**facts), device) == line
