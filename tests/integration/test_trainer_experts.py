"""Mixtures of experts: a step, and versions whose files name experts as the model's own do, read by transformers and by the trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file

from spangrad.settings import StoreSettings
from spangrad.types import PolicyVersion
from spangrad.weights.checksums import checksum_directory
from tests.support.gateways import held_checksum
from tests.support.policies import logprobs_of, sampled_rows, trainer_settings
from tests.support.processes import engine_settings, fetch, gateway_settings, running_engine, running_gateway
from tests.support.trainers import written
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish.publisher import Publisher

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32},
    "mixtral": {"num_local_experts": 4, "head_dim": 32},
}


def experts_model(kind: str, tiny_model: Path, directory: Path) -> Path:
    """Write a model of experts with random weights and the tiny model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = directory / kind
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    dense = json.loads((tiny_model / "config.json").read_text())
    tokens = {name: dense.get(name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, **tokens, **KINDS[kind], num_experts_per_tok=2, tie_word_embeddings=False)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    return model


def rows(model: Path) -> Batch:
    frame = pl.DataFrame(sampled_rows(model, 6, temperature=1.0, seed=5, Version=0))
    return layout(separate(frame, pl.Series(np.linspace(-1, 1, 6))), lineage=[0])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_version_of_experts_has_names_of_its_model_and_is_read_back(kind: str, rank: int, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = experts_model(kind, tiny_model, tmp_path)
    optimizer = VerlOptimizer(model, trainer_settings(learning_rate=1e-2, lora__rank=rank))
    try:
        metrics = optimizer.step(rows(model))
        assert metrics["logprob_gap_max"] < 1e-4
        checkpoint = written(optimizer, model, tmp_path / "versions")
        first, version = load_file(model / "model.safetensors"), load_file(checkpoint.path / "model.safetensors")
        assert {name: value.shape for name, value in version.items()} == {name: value.shape for name, value in first.items()}
        trained = {name for name, value in version.items() if not np.array_equal(value, first[name])}
        assert any("expert" in name for name in trained) == (not rank), "adapters are those of attention"
        assert any("q_proj" in name for name in trained)
        assert checkpoint.checksum == checksum_directory(checkpoint.path)
        _, info = AutoModelForCausalLM.from_pretrained(checkpoint.path, output_loading_info=True)
        assert not any(info.values()), info
        if not rank:
            optimizer.load_weights(model)
            again = dict(optimizer.weights())
            assert all(np.array_equal(again[name], value) for name, value in first.items())
    finally:
        optimizer.close()


CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "say rome"}],
    "max_tokens": 8,
    "ignore_eos": True,
    "logprobs": True,
    "return_token_ids": True,
}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_version_of_experts_in_vllm_has_its_checksum_and_logprobs(
    kind: str, workers: int, tiny_model: Path, store: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = experts_model(kind, tiny_model, tmp_path)
    optimizer = VerlOptimizer(model, trainer_settings(learning_rate=1e-2))
    try:
        optimizer.step(rows(model))
        checkpoint = written(optimizer, model, tmp_path / "versions")
    finally:
        optimizer.close()
    arguments = ["--tensor-parallel-size", "2", "--enable-expert-parallel"] if workers > 1 else []
    engine = engine_settings(model, tmp_path / "cache", extra_args=arguments)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if workers > 1 else "0-1")
    with running_engine(engine, tmp_path / "engine.log"):
        settings = gateway_settings(engine, store)
        with running_gateway(settings, tmp_path / "gateway.log"):
            Publisher(settings.gateway).publish(PolicyVersion("policy", 1, 0, "b", checkpoint.checksum, str(checkpoint.path)))
            (backend,) = fetch(f"{settings.gateway.url}/admin/backends")["backends"]
            assert (backend["version"], backend["uncompared"]) == (1, "")
            assert held_checksum(settings.gateway.engine_url) == checkpoint.checksum
            answer = fetch(f"{settings.gateway.url}/v1/chat/completions", CHAT)
    (choice,) = answer["choices"]
    ours = [token["logprob"] for token in choice["logprobs"]["content"]]
    exact = logprobs_of(checkpoint.path, answer["prompt_token_ids"], choice["token_ids"])
    np.testing.assert_allclose(ours, exact, atol=1e-4)
