"""GPU-only checks of an engine: bfloat16 logprobs against the trainer's, publications, sleep and wake-up."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file, save_file

from spangrad.settings import Settings, StoreSettings
from spangrad.types import PolicyVersion
from spangrad.weights.checksums import checksum_directory
from tests.gpu.models import SMALL, make_model
from tests.support.policies import trainer_settings, transition_row
from tests.support.processes import engine_settings, fetch, gateway_settings, running_engine, running_gateway
from trainer.data.batch import layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish.publisher import Publisher

ReportedFigures = dict[str, float]
REQUESTS = 32


@dataclass(frozen=True)
class RunningEngine:
    """An engine in bfloat16 behind a gateway."""

    settings: Settings
    model: Path

    def complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """A completion of a prompt's ids, with its ids and logprobs."""
        asked = {"model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
        (choice,) = fetch(f"{self.settings.gateway.url}/v1/completions", {**asked, "ignore_eos": True})["choices"]
        return choice

    def backends(self) -> list[str]:
        """Names of the gateway's engines."""
        return [backend["name"] for backend in fetch(f"{self.settings.gateway.url}/admin/policies/policy")["backends"]]

    def order(self, path: str) -> dict[str, Any]:
        """Have an operator's order carried out."""
        return fetch(f"{self.settings.gateway.url}/admin/{path}", {})


@pytest.fixture(scope="module")
def engine(device: str, engine_python: Path, store: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    directory = tmp_path_factory.mktemp("engine")
    model = make_model(directory / "model", SMALL)
    sleeping = ("--enable-sleep-mode",) if device == "cuda" else ()
    settings = engine_settings(
        model, directory / "cache", python=str(engine_python), dtype="bfloat16", max_model_len=512, extra_args=sleeping
    )
    behind = gateway_settings(settings, store)
    with running_engine(settings, directory / "engine.log"), running_gateway(behind, directory / "gateway.log"):
        yield RunningEngine(behind, model)


def test_engine_logprobs_in_bfloat16_agree_with_trainers(engine: RunningEngine, figures: ReportedFigures) -> None:
    """A step's own check, with its default limits for two sides in bfloat16, judges the engine's tokens."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, SMALL["vocab_size"], 32 + 7 * at).tolist() for at in range(REQUESTS)]
    choices = [engine.complete(prompt, 48) for prompt in prompts]
    rows = [
        transition_row(f"r{at}", PromptIds=prompt, ResponseIds=choice["token_ids"], Logprobs=choice["logprobs"]["token_logprobs"])
        for at, (prompt, choice) in enumerate(zip(prompts, choices, strict=True))
    ]
    optimizer = VerlOptimizer(engine.model, trainer_settings(model=engine.model, dtype="bf16"), engine_dtype="bfloat16")
    metrics = optimizer.step(layout(separate(pl.DataFrame(rows), pl.zeros(REQUESTS, eager=True)), lineage=[0]))
    figures |= {name: metrics[name] for name in ("logprob_gap_mean", "logprob_gap_p99", "logprob_gap_max", "probs_pearson")}
    assert metrics["updated"] == 0


def test_publication_into_engine_is_served(engine: RunningEngine, tmp_path: Path, figures: ReportedFigures) -> None:
    version = tmp_path / "v1"
    shutil.copytree(engine.model, version)
    weights = load_file(engine.model / "model.safetensors")
    save_file({name: value * np.float32(1.05) for name, value in weights.items()}, version / "model.safetensors", {"format": "pt"})
    publisher = Publisher(engine.settings.gateway)
    figures["seconds"] = publisher.publish(PolicyVersion("policy", 1, 0, "batch", checksum_directory(version), str(version)))
    figures |= {f"seconds_{name}": seconds for name, seconds in publisher.stages.items()}
    assert fetch(f"{engine.settings.gateway.url}/admin/policies/policy")["version"] == 1


def test_engine_asleep_frees_its_memory_and_wakes_with_its_weights(engine: RunningEngine, device: str, figures: ReportedFigures) -> None:
    if device == "cpu":
        pytest.skip("an engine on a CPU frees nothing when it sleeps")
    import torch

    greedy = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0}
    completions = f"{engine.settings.gateway.url}/v1/completions"
    before, (name,) = fetch(completions, greedy)["choices"][0]["text"], engine.backends()
    free = torch.cuda.mem_get_info()[0]
    engine.order(f"backends/{name}/sleep")
    figures["freed_gb"] = (torch.cuda.mem_get_info()[0] - free) / 1e9
    began = time.monotonic()
    engine.order(f"backends/{name}/wake_up")
    figures["seconds_wake_up"] = time.monotonic() - began
    assert (figures["freed_gb"] > 0.2, fetch(completions, greedy)["choices"][0]["text"]) == (True, before)
