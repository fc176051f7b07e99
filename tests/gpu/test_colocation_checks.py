"""Turns of trainer and engine on one GPU, which a CPU cannot show: the engine gives its memory away, and gets it back with new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spangrad.settings import StoreSettings
from spangrad.types import PolicyVersion
from tests.gpu.models import SMALL, make_model, optimizer_of, random_batch
from tests.support.processes import engine_settings, fetch, gateway_settings, running_engine, running_gateway
from tests.support.trainers import written
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish.publisher import Publisher

ReportedFigures = dict[str, float]
TURNS = 2
LENGTHS = [(20, 30)] * 8
"""Prompt and response tokens of a batch's rows."""


def free_bytes(device: str) -> int:
    """Free memory of the device, as all processes see it; 0 on a CPU."""
    import torch

    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def test_trainer_and_engine_take_turns_on_one_device(
    device: str, engine_python: Path, store: StoreSettings, tmp_path: Path, figures: ReportedFigures
) -> None:
    model = make_model(tmp_path / "model", SMALL)
    sleeping = ("--enable-sleep-mode",) if device == "cuda" else ()
    settings = engine_settings(
        model, tmp_path / "cache", python=str(engine_python), dtype="bfloat16", max_model_len=512, extra_args=sleeping
    )
    behind = gateway_settings(settings, store)
    batch, greedy = random_batch(SMALL["vocab_size"], LENGTHS), {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    optimizer: VerlOptimizer | None = None
    with running_engine(settings, tmp_path / "engine.log"), running_gateway(behind, tmp_path / "gateway.log"):
        publisher, free = Publisher(behind.gateway), [free_bytes(device)]
        for turn in range(1, TURNS + 1):
            publisher.sleep("policy", 2, 120)
            free.append(free_bytes(device))
            if optimizer is None:
                optimizer = optimizer_of(model, learning_rate=1e-2)
            else:
                sums = optimizer.weight_sums()
                optimizer.load_back()
                assert optimizer.weight_sums() == sums
            assert optimizer.step(batch)["updated"] == 1
            held = free_bytes(device)
            optimizer.offload()
            figures[f"offloaded_mb_{turn}"] = (free_bytes(device) - held) / 1e6
            version = written(optimizer, model, tmp_path / f"turn-{turn}")
            figures[f"seconds_publish_{turn}"] = publisher.publish(
                PolicyVersion("policy", turn, turn - 1, "batch", version.checksum, str(version.path))
            )
            state: dict[str, Any] = fetch(f"{behind.gateway.url}/admin/policies/policy")
            assert (state["status"], state["version"]) == ("serving", turn)
            assert fetch(f"{behind.gateway.url}/v1/completions", greedy)["usage"]["completion_tokens"] > 0
        figures["slept_mb"] = (free[1] - free[0]) / 1e6
        if device == "cuda":
            assert figures["slept_mb"] > 0
            assert all(figures[f"offloaded_mb_{turn}"] > 0 for turn in range(1, TURNS + 1)), figures
