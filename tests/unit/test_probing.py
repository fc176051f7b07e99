"""Facts of models and machines, and the settings that are proposed for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commands.services.init import init
from spangrad.errors import SettingsError
from spangrad.probing import machine
from spangrad.probing.machine import Gpu, MachineFacts
from spangrad.probing.model import ModelFacts, facts_of, read_model, vocabulary_size
from spangrad.probing.proposals import Ports, cache_bytes, context_of, propose, settings_text
from spangrad.settings.sources import load_settings

MACHINE = MachineFacts(cores=2, memory_bytes=8 * 2**30, gpus=(), vllm_python=Path("/venv/bin/python"))
GPU = Gpu("H100", 80 * 2**30)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
MODEL = facts_of(Path("/m"), CONFIG, 2**20, has_chat_template=True)


def proposed(model: ModelFacts = MODEL, machine: MachineFacts = MACHINE) -> dict[str, object]:
    return {proposal.key: proposal.value for proposal in propose(model, machine, Ports())}


def test_facts_of_model_files() -> None:
    assert (MODEL.architecture, MODEL.context_tokens, MODEL.dtype, MODEL.kv_values_a_token) == ("LlamaForCausalLM", 256, "float32", 128)
    text = {**CONFIG, "torch_dtype": "bfloat16", "dtype": None}
    nested = facts_of(Path("/m"), {"model_type": "x", "text_config": text}, 1, has_chat_template=True)
    assert (nested.context_tokens, nested.dtype) == (256, "bfloat16")
    unknown = facts_of(Path("/m"), {}, 1, has_chat_template=False)
    assert (unknown.architecture, unknown.context_tokens, unknown.kv_values_a_token) == ("unknown", None, None)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 50}', 50),
        ('{"vocab_size": 50, "text_config": {"vocab_size": 60}}', 60),
        ('{"vocab_size": 50, "text_config": null}', 50),
        ('{"vocab_size": null}', None),
        (None, None),
    ],
)
def test_vocabulary_size_is_that_of_the_language_model(config: str | None, size: int | None, tmp_path: Path) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    assert vocabulary_size(tmp_path) == size


@pytest.mark.parametrize(
    ("model", "chosen", "context"), [(256, None, 256), (256, 4096, 256), (32768, None, 4096), (32768, 8192, 8192), (None, 99, 99)]
)
def test_context_of_is_bounded_by_model(model: int | None, chosen: int | None, context: int) -> None:
    assert context_of(model, chosen) == context


def test_cache_bytes_fit_memory_and_hold_one_context() -> None:
    assert cache_bytes(1024, 4096, 2**40) == 64 * 4096 * 1024
    assert cache_bytes(2**20, 4096, 2**30) == 4096 * 2**20
    assert cache_bytes(2**16, 4096, 4 * 2**30) == 2**30


def test_propose_without_gpu_bounds_kv_cache() -> None:
    values = proposed()
    assert (values["engine.max_model_len"], values["engine.dtype"], values["engine.kv_cache_bytes"]) == (256, "float32", 64 * 2**20)
    assert "engine.extra_args" not in values
    assert values["engine.model"] == values["trainer.model"] == "/m"


def test_propose_on_one_gpu_leaves_memory_to_trainer() -> None:
    values = proposed(machine=replace(MACHINE, gpus=(GPU,)))
    assert values["engine.extra_args"] == ["--gpu-memory-utilization", "0.4"]
    assert "engine.dtype" not in values
    assert proposed(machine=replace(MACHINE, gpus=(GPU, GPU)))["engine.extra_args"] == ["--gpu-memory-utilization", "0.85"]


@pytest.mark.parametrize(
    ("model", "machine", "sentence"),
    [
        (MODEL, replace(MACHINE, vllm_python=None), "Run `make setup`"),
        (replace(MODEL, has_chat_template=False), MACHINE, "no chat template"),
        (replace(MODEL, weight_bytes=14 * 2**30, dtype="bfloat16"), MACHINE, "Take a smaller model or a larger machine"),
    ],
)
def test_propose_impossible_combination_raises_with_remedy(model: ModelFacts, machine: MachineFacts, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        propose(model, machine, Ports())


def test_init_chooses_another_port_for_each_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / "model.safetensors").write_bytes(b"12345678")

    def python(project: Path) -> Path:
        return project / "python"

    def is_free(host: str, port: int) -> bool:
        return False

    monkeypatch.setattr(machine, "find_vllm_python", python)
    monkeypatch.setattr(machine, "is_free", is_free)
    file = tmp_path / "my settings.toml"
    init(model=tmp_path, config=file)
    assert capsys.readouterr().out == f"{file} is written. Start everything with `spangrad up --config '{file}'`.\n"
    chosen, default = load_settings(file=file, env={}), load_settings({}, env={})
    for section, name in (
        *(("store", name) for name in ("otlp_grpc_port", "otlp_http_port", "clickhouse_port")),
        *((section, "port") for section in ("gateway", "engine", "queue", "page")),
    ):
        assert getattr(getattr(chosen, section), name) != getattr(getattr(default, section), name)


@pytest.mark.parametrize("directory", ["/m", "/modèles/my 🦙"])
def test_settings_text_holds_proposals_and_reasons(tmp_path: Path, directory: str) -> None:
    proposals = propose(replace(MODEL, directory=Path(directory)), MACHINE, Ports(gateway=9000))
    file = tmp_path / "spangrad.toml"
    file.write_text(settings_text(proposals, "For a test."), "utf-8")
    assert load_settings(file=file, env={}) == load_settings({each.key: each.value for each in proposals}, env={})
    assert 'url = "http://127.0.0.1:9000"' in file.read_text()
    assert "max_model_len = 256  # tokens of prompt and answer; the model takes 256 tokens" in file.read_text()


def test_read_model_invalid_directory_raises(tmp_path: Path) -> None:
    def lacks(sentence: str) -> None:
        with pytest.raises(SettingsError, match=sentence):
            read_model(tmp_path / "model")

    lacks("is no directory")
    (tmp_path / "model").mkdir()
    lacks("holds no config.json")
    (tmp_path / "model" / "config.json").write_text("{")
    lacks("cannot be read as JSON")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    lacks("holds no weights")
    (tmp_path / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8\n")
    lacks("model.safetensors is a pointer of Git LFS")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"12345678")
    lacks("holds no tokenizer.json")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    facts = read_model(tmp_path / "model")
    assert (facts.weight_bytes, facts.has_chat_template) == (8, False)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert read_model(tmp_path / "model").has_chat_template


def test_available_memory_of_a_control_group_counts_its_cached_files_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path)
    host = machine.available_memory()
    assert host > 2**24, "without a control group it is the kernel's estimate"
    (tmp_path / "memory.max").write_text(f"{2**24}\n")
    (tmp_path / "memory.current").write_text(f"{2**24 - 2**20}\n")
    assert machine.available_memory() == 2**20
    # A container that has just downloaded a model.
    (tmp_path / "memory.stat").write_text(f"anon {2**20}\ninactive_file {2**23}\n")
    assert machine.available_memory() == 2**20 + 2**23
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() > 2**24
