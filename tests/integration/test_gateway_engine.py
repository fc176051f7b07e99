"""The engine's supervisor: what it refuses before vLLM starts, how it starts vLLM, and that it outlives nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gateway.engine import command, environment, serve
from gateway.engine_arguments import require_orders_reach_all
from gateway.zero_adapter import write_zero_adapter
from spangrad.errors import CheckpointError, EngineError, SettingsError, SpangradError
from spangrad.processes import free_ports, wait_until
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings
from spangrad.weights.checksums import checksum_directory
from tests.support.worker_kills import runs

_SERVE = "from gateway.engine import serve; from spangrad.settings.sources import load_settings; serve(load_settings())"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    return directory


def settings(model: Path | None, cache: Path, **flags: object) -> Settings:
    values = {"engine.model": model and str(model), "engine.cache_dir": str(cache), "engine.python": sys.executable}
    return load_settings({**values, **{f"engine.{key}": value for key, value in flags.items()}}, env={})


def test_engine_command_has_arguments_of_training(model: Path, tmp_path: Path) -> None:
    chosen = settings(
        model, tmp_path, dtype="float32", max_model_len=128, kv_cache_bytes=1024, enforce_eager=True, extra_args=["--seed", "1"], port=9
    )
    assert command(chosen, model) == [
        *(sys.executable, "-m", "gateway.vllm_plugin.launch", "serve", str(model)),
        *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", "9", "--dtype", "float32"),
        *("--hf-overrides", '{"head_dtype": "float32"}', "--max-model-len", "128"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--middleware", "gateway.vllm_plugin.middleware.SpangradMiddleware"),
        *("--worker-extension-cls", "gateway.vllm_plugin.worker.SpangradWorker"),
        *("--kv-cache-memory-bytes", "1024", "--disable-uvicorn-access-log", "--enforce-eager", "--seed", "1"),
    ]


def test_engine_environment_has_plugin_and_no_misleading_variables(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    variables = environment(settings(model, tmp_path, version=7), model)
    assert "VLLM_CPU_KVCACHE_SPACE" not in variables
    packages = Path(variables["PYTHONPATH"])
    assert sorted(package.name for package in packages.iterdir()) == ["gateway", "spangrad"]
    assert (packages / "gateway" / "vllm_plugin" / "launch.py").exists()
    ours = {name: variables[name] for name in variables if name.startswith(("VLLM_", "SPANGRAD_", "HF_"))}
    assert ours == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CACHE_ROOT": str(tmp_path),
        "VLLM_CONFIG_ROOT": str(tmp_path / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "SPANGRAD_GATEWAY__POLICY": "policy",
        "SPANGRAD_ENGINE__VERSION": "7",
        "SPANGRAD_ENGINE__MODEL": str(model),
        "SPANGRAD_ENGINE__CHECKSUM": "full",
        "SPANGRAD_ENGINE_STATE": str(tmp_path / "engine-state-8000"),
    }


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["--distributed-executor-backend", "uni"], "0"),
        (["--distributed_executor_backend=uni"], "0"),
        (["--config", "vllm.yaml"], "0"),
        (["--config", "vllm.yaml", "--distributed-executor-backend", "mp"], None),
        (["--distributed-executor-backend", "uni", "--distributed-executor-backend", "mp"], None),
        (["--tool-call-parser", "uni"], None),
    ],
    ids=str,
)
def test_engine_environment_with_uni_executor_keeps_worker_in_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], value: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vllm.yaml").write_text("distributed-executor-backend: uni\n")
    assert environment(settings(model, tmp_path, extra_args=arguments), model).get("VLLM_ENABLE_V1_MULTIPROCESSING") == value


def test_engine_with_lora_rank_serves_zero_adapter(model: Path, tmp_path: Path) -> None:
    weights = {"model.layers.0.self_attn.q_proj.weight": np.ones((6, 4), np.float32), "model.norm.weight": np.ones(4, np.float32)}
    save_file(weights, model / "model.safetensors")
    chosen = settings(model, tmp_path, lora_rank=9, port=9)
    bare = tmp_path / "zero-adapter-9"
    words = command(chosen, model)
    options = {name: words[words.index(name) + 1] for name in ("--served-model-name", "--max-lora-rank", "--max-loras", "--lora-modules")}
    assert options == {
        "--served-model-name": "policy-base",
        "--max-lora-rank": "16",
        "--max-loras": "1",
        "--lora-modules": f"policy={bare}",
    }
    assert "--enable-lora" in words
    variables = environment(chosen, model)
    assert (variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], variables["SPANGRAD_ENGINE__LORA_RANK"]) == ("1", "9")
    assert variables["SPANGRAD_ZERO_ADAPTER"] == str(bare)
    write_zero_adapter(chosen.engine, model)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    zeros = load_file(bare / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in zeros.items()} == {f"{layer}.lora_A.weight": (1, 4), f"{layer}.lora_B.weight": (6, 1)}
    assert not any(tensor.any() for tensor in zeros.values())
    assert checksum_directory(bare) == checksum_directory(model), "it changes nothing"


def test_engine_transfer_setting_selects_weight_transfer_backend(model: Path, tmp_path: Path) -> None:
    for carrier, backend in (("http", "spangrad_http"), ("nccl", "nccl")):
        chosen = settings(model, tmp_path, transfer=carrier)
        words = command(chosen, model)
        assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": backend}
        assert environment(chosen, model)["SPANGRAD_ENGINE__TRANSFER"] == carrier


def test_engine_with_impossible_weight_sync_method_raises(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="takes adapters or whole weights"):
        serve(settings(model, tmp_path, lora_rank=8, transfer="http"))
    with pytest.raises(EngineError, match=r"has no layer \*_proj.weight .* Set engine.lora_rank = 0"):
        serve(settings(model, tmp_path, lora_rank=8))
    for header in (b"[]", b'{"q_proj.weight": {}}', b'{"q_proj.weight": {"shape": 1}}'):
        (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read .*Restore it from a copy"):
            serve(settings(model, tmp_path, lora_rank=8))
    (model / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read .*Restore it from a copy"):
        serve(settings(model, tmp_path, lora_rank=8))
    blind = tmp_path / "python"
    blind.write_text("#!/bin/sh\nexit 1\n")
    blind.chmod(0o755)
    with pytest.raises(SettingsError, match=r"sees no GPU. Set engine.transfer = http"):
        serve(settings(model, tmp_path, transfer="nccl", python=str(blind)))


def test_engine_with_invalid_settings_raises_with_remedy(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"Set engine.model .* to a model directory"):
        serve(settings(None, tmp_path))
    with pytest.raises(SettingsError, match=r"missing' is no directory. Set it to a Hugging Face model directory"):
        serve(settings(tmp_path / "missing", tmp_path))
    with pytest.raises(SettingsError, match=r"holds no config.json. Set it to a Hugging Face model directory"):
        serve(settings(tmp_path, tmp_path))
    with pytest.raises(SettingsError, match=r"is no interpreter. Make vLLM's environment"):
        serve(settings(model, tmp_path, python="/no/python"))
    with pytest.raises(SpangradError, match=r"would listen beyond this machine without a token. Set engine.token, or bind 127.0.0.1"):
        serve(settings(model, tmp_path, host="0.0.0.0"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SpangradError, match=r"set engine.port to another port"):
            serve(settings(model, tmp_path, port=taken.getsockname()[1]))
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer.json"):
        serve(settings(model, tmp_path))


def test_engine_whose_vllm_dies_raises_with_end_of_log(model: Path, tmp_path: Path) -> None:
    python = script(tmp_path, "echo first; echo the last words >&2; exit 3")
    with pytest.raises(EngineError, match=r"(?s)vLLM ended with exit code 3.*first\nthe last words"):
        serve(settings(model, tmp_path, python=str(python), port=free_ports(1)[0]))


def test_engine_whose_log_has_no_room_runs_on(model: Path, tmp_path: Path) -> None:
    """Its log is longer than a pipe holds, and goes to a full disk."""
    marker = tmp_path / "logged"
    python = script(tmp_path, f"yes 'a line of the log' | head -n 100000; touch {marker}; exec sleep 600")
    with Path("/dev/full").open("w") as full:
        engine = subprocess.Popen([sys.executable, "-c", _SERVE], env=served(model, python, tmp_path, free_ports(1)[0]), stdout=full)
    try:
        wait_until(marker.exists, 60, "the end of vLLM's log")
    finally:
        engine.terminate()
        engine.wait(60)


def test_engine_signal_ends_process_group_of_vllm(model: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    python = script(tmp_path, f"sleep 600 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; echo started; wait")
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], env=served(model, python, tmp_path, free_ports(1)[0]), stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout
        assert engine.stdout.readline() == "started\n"
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0
    both = [int(pid) for pid in pids.read_text().split()]
    assert len(both) == 2
    wait_until(lambda: not any(runs(pid) for pid in both), 60, "the end of vLLM's processes")


def test_engine_signal_ends_warm_up_whose_request_hangs(model: Path, tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(_HANGING)
    port = free_ports(1)[0]
    python = script(tmp_path, f"exec {sys.executable} {server} {port}")
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], env=served(model, python, tmp_path, port), stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout
        assert engine.stdout.readline() == "asked\n"
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(30) == 0


_HANGING = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        os.write(1, b"asked\\n")
        time.sleep(600)
    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A stand-in for vLLM that lives, and answers no call."""


def script(directory: Path, text: str) -> Path:
    """A stand-in for vLLM's interpreter."""
    path = directory / "python.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def served(model: Path, python: Path, cache: Path, port: int) -> dict[str, str]:
    """Return the environment of a process that serves the model on a port, with a stand-in for vLLM's interpreter."""
    values = {"MODEL": model, "PYTHON": python, "PORT": port, "CACHE_DIR": cache}
    return {**os.environ, **{f"SPANGRAD_ENGINE__{name}": str(value) for name, value in values.items()}}


REFUSED = [
    (["--data-parallel-rank", "0"], "--data-parallel-rank 0", "would know some of the data-parallel ranks only"),
    (["-dpn", "0"], "--data-parallel-rank 0", "would know some of the data-parallel ranks only"),
    (["--data-parallel-hybrid-lb", "--seed", "3"], "--data-parallel-hybrid-lb", "would know some of the data-parallel ranks only"),
    (["--data_parallel_ext"], "--data-parallel-external-lb", "would know some of the data-parallel ranks only"),
    (["--headless"], "--headless", "an engine without an API server takes no orders"),
    (["--api-server-c=0"], "--api-server-count 0", "an engine without an API server takes no orders"),
]


@pytest.mark.parametrize(("arguments", "shown", "reason"), REFUSED, ids=[" ".join(arguments) for arguments, _, _ in REFUSED])
def test_require_orders_reach_all_partial_engine_refuses(
    model: Path, tmp_path: Path, arguments: list[str], shown: str, reason: str
) -> None:
    with pytest.raises(SettingsError, match=f"engine.extra_args has {re.escape(shown)}: .*{reason}"):
        serve(settings(model, tmp_path, extra_args=arguments))


@pytest.mark.parametrize("line", ["data_parallel_rank: 2", "'headless' : 'true'  # two", "data-parallel-hybrid-lb: true"])
def test_require_orders_reach_all_option_in_configuration_file_refuses(model: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(f"seed: 3\n{line}\n")
    for arguments in (["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(SettingsError, match=f"{file}, which engine.extra_args names, has --"):
            serve(settings(model, tmp_path, extra_args=arguments))


def test_require_orders_reach_all_adapters_beside_several_api_servers_refuses(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"has --api-server-count 2: engine.lora_rank = 8, and vLLM loads adapters at run time with one"
    ):
        serve(settings(model, tmp_path, lora_rank=8, extra_args=["-asc", "2"]))
    words = command(settings(model, tmp_path, lora_rank=8, extra_args=["--data-parallel-size", "2"]), model)
    assert words[words.index("--api-server-count") + 1] == "1", "vLLM would start one for each rank"
    assert words.count("--api-server-count") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-server-count", "2", "-dp", "2", "--data-parallel-size-local=1"],
        ["--data-parallel-address", "10.0.0.1", "--data-parallel-backend", "ray"],
        ["--api-key", "2"],
        ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--dtype", "half"],
        ["--config", "nowhere.yaml"],
    ],
    ids=str,
)
def test_require_orders_reach_all_whole_engine_passes(model: Path, tmp_path: Path, arguments: list[str]) -> None:
    require_orders_reach_all(settings(model, tmp_path, extra_args=arguments).engine)
