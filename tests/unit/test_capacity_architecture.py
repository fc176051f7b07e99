"""Numbers of parameters that are counted from a config.json, beside the models that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import SettingsError
from trainer.capacity.architecture import Architecture, architecture_of, read_architecture

MODELS = Path(__file__).parents[1] / "fixtures/models"
"""config.json files, typed from the values that Qwen publishes with Qwen2.5-7B-Instruct and Qwen2.5-32B-Instruct on Hugging Face's hub."""
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-grouped-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 96},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"num_key_value_heads": 4},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 8},
    "qwen3-biased": {"attention_bias": True},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "mixtral": {},
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {},
    "qwen3_moe-half": {"decoder_sparse_step": 2},
}


def counted(config: dict[str, Any]) -> Architecture:
    return architecture_of(config, Path("config.json"))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_those_of_model_that_transformers_makes(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name.partition("-")[0], num_hidden_layers=4, **CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    written = [json.loads(config.to_json_string(use_diff=diff)) for diff in (True, False)]
    assert [counted(content).parameters for content in written] == [expected, expected]


@pytest.mark.parametrize(("name", "millions"), [("qwen2.5-7b-instruct", 7615.6), ("qwen2.5-32b-instruct", 32763.9)])
def test_parameters_of_published_models_are_those_published(name: str, millions: float) -> None:
    """7.61B and 32.5B (rounded so by Qwen, with 6.53B and 31.0B outside the embedding)."""
    model = read_architecture(MODELS / name)
    assert round(model.parameters / 1e6, 1) == millions
    assert model == read_architecture(MODELS / name / "config.json")


def test_active_parameters_of_experts_are_those_of_dense_model_of_their_number() -> None:
    base = {
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "num_experts_per_tok": 2,
    }  # fmt: skip
    model, smaller = counted({**base, "num_experts": 8}), counted({**base, "num_experts": 2})
    routers = 4 * 64 * (8 - 2)
    assert model.active_parameters == smaller.parameters + routers
    assert model.parameters - model.active_parameters == 4 * (8 - 2) * 3 * 64 * 32


def test_adapter_parameters_equal_those_of_peft() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50
    )
    content = json.loads(config.to_json_string())
    for modules in ("all-linear", ["q_proj", "down_proj"]):
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=8, target_modules=modules, task_type="CAUSAL_LM"))
        expected = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert counted(content).adapter_parameters(8, () if modules == "all-linear" else tuple(modules)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not known to the planner, which counts gemma, "),
        ('{"model_type": "qwen2", "hidden_size": 8}', "num_attention_heads = None is no size"),
        ("[]", "is not a JSON object"),
        ("{", "cannot be read as JSON"),
        (None, "config.json does not exist"),
    ],
)
def test_read_architecture_of_other_file_names_value_and_remedy(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SettingsError, match=message) as raised:
        read_architecture(tmp_path)
    assert str(tmp_path) in str(raised.value)
