"""The planner's memory model beside the measured peak of real steps on a CPU: FSDP2, AdamW, copies, activations, logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sections import trainer_settings
from tests.support.step_memory import ENVIRONMENT
from trainer.capacity import memory
from trainer.capacity.architecture import architecture_of

TOLERANCE = 0.15
COPIES = ("copies at the step's start", "earlier versions' weights")
"""Items of a host that a CPU's rank holds beside those of its device."""


def config(kind: str, vocabulary: int, hidden: int, width: int, layers: int, heads: int, **more: object) -> dict[str, Any]:
    shapes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    return {"model_type": kind, **shapes, "num_attention_heads": heads, "tie_word_embeddings": False, **more}


MODELS = {
    "5M": config("qwen2", 4096, 256, 768, 4, 4, num_key_value_heads=2),
    "16M": config("llama", 8192, 512, 1536, 4, 8, num_key_value_heads=2, tie_word_embeddings=True),
    "61M": config("qwen3", 8192, 768, 2304, 7, 12, num_key_value_heads=4, head_dim=64),
}


def job(model: str, tokens: int = 1024, **settings: object) -> dict[str, Any]:
    """Two micro-batches of `tokens` tokens, in rows of 512."""
    return {"config": MODELS[model], "rows": tokens // 256, "tokens": 512, "settings": {"max_tokens_per_device": tokens, **settings}}


def measured_and_planned(jobs: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The peak of a step of each job as measured, and as planned, in bytes."""
    command = [sys.executable, "-m", "tests.support.step_memory", *map(json.dumps, jobs)]
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, cwd=root, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(jobs)
    return [(line["peak"], planned_bytes(each, line["parameters"])) for each, line in zip(jobs, lines, strict=True)]


def planned_bytes(planned: dict[str, Any], parameters: int) -> int:
    model, settings = architecture_of(planned["config"], Path("config.json")), trainer_settings(**planned["settings"])
    assert model.parameters == parameters
    host = memory.trainer_host(model, settings, 1, 1, 0, first=True)
    copies = sum(item.bytes for item in host if item.name in COPIES)
    return memory.peak_bytes(memory.trainer_gpu(model, settings, 1, "cpu")) + copies


def assert_within_tolerance(jobs: list[dict[str, Any]]) -> None:
    ratios = [planned / measured for measured, planned in measured_and_planned(jobs)]
    assert [abs(ratio - 1) < TOLERANCE for ratio in ratios] == [True] * len(jobs), ratios


def test_planned_memory_of_small_model_is_within_15_percent_of_measured_peak() -> None:
    assert_within_tolerance([job("5M", gradient_checkpointing=True), job("5M", 2048)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_planned_memory_of_sizes_and_settings_is_within_15_percent_of_measured_peak() -> None:
    sizes = [job(model, tokens) for model in MODELS for tokens in (1024, 2048)]
    settings = [
        job("16M", gradient_checkpointing=True),
        job("16M", dtype="bf16"),
        job("61M", mini_batches=2),
        job("16M", lora__rank=8),
        job("16M", kl_coef=0.1),
        job("16M", entropy_coef=0.1),
        job("16M", estimator="gae"),
    ]
    assert_within_tolerance(sizes + settings)
