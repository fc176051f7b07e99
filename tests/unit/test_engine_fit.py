"""Fit of the engine to its model and machine, and the root cause of an engine that did not start."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from gateway import engine_fit
from gateway.engine_failure import failure, root_cause
from gateway.engine_fit import fit_to_memory
from spangrad.errors import SettingsError
from spangrad.settings import EngineSettings
from spangrad.settings.sources import load_settings

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 256, "dtype": "bfloat16"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(engine_fit, "has_gpu", lambda: False)
    monkeypatch.setattr(engine_fit, "available_memory", lambda: 2**40)
    return tmp_path


def settings(**values: object) -> EngineSettings:
    return load_settings({f"engine.{key}": value for key, value in {"python": "/p", **values}.items()}, env={}).engine


def test_fitted_unset_settings_come_from_model_files(model: Path) -> None:
    fit = fit_to_memory(settings(), model)
    assert (fit.max_model_len, fit.kv_cache_bytes) == (256, 64 * 2**20)
    longer = fit_to_memory(settings(dtype="float32", max_model_len=200), model)
    assert (longer.max_model_len, longer.kv_cache_bytes) == (200, 64 * 2**20)


def test_fitted_max_model_len_beyond_model_is_lowered_and_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fit_to_memory(settings(max_model_len=4096, kv_cache_bytes=7), model).max_model_len == 256
    assert "engine.max_model_len = 4096 is lowered to 256" in caplog.text


def test_fitted_on_gpu_leaves_kv_cache_to_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_fit, "has_gpu", lambda: True)
    assert fit_to_memory(settings(), model).kv_cache_bytes is None


def test_fitted_python_is_searched_above_working_directory(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "mine")
    assert fit_to_memory(settings(python=None), model).python == python

    def nowhere(*starts: Path) -> None:
        assert starts

    monkeypatch.setattr(engine_fit, "find_vllm_python", nowhere)
    with pytest.raises(SettingsError, match=r"set engine.python to the Python of an environment that holds vLLM"):
        fit_to_memory(settings(python=None), model)


def test_engine_python_in_file_is_relative_to_file(tmp_path: Path) -> None:
    file = tmp_path / "spangrad.toml"
    file.write_text('[engine]\npython = "venv/bin/python"\n')
    assert load_settings(file=file, env={}).engine.python == tmp_path / "venv" / "bin" / "python"
    assert load_settings({"engine.python": "here/python"}, file=file, env={}).engine.python == Path("here/python")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            [
                "(EngineCore pid=1) ERROR ValueError: No available memory for the cache blocks.",
                "Traceback (most recent call last):",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "ValueError: No available memory for the cache blocks.\nRaise engine.kv_cache_bytes, or lower engine.max_model_len.",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 error",
                "ValueError: max_model_len (512) exceeds the derived max_model_len",
            ],
            "ValueError: max_model_len (512) exceeds the derived max_model_len\nLower engine.max_model_len to the model's own",
        ),
        (
            ["ValueError: Free memory on device (1/8 GiB) is too little"],
            "Set engine.kv_cache_bytes to what is free",
        ),
        (["OSError: [Errno 98] Address already in use"], "Set engine.port to a free port."),
        (["KeyError: 'x'", "RuntimeError: Engine core initialization failed. See root cause above."], "KeyError: 'x'"),
        (["first", "Segmentation fault"], "first\nSegmentation fault"),
    ],
)
def test_root_cause_of_failed_engine_names_setting_to_change(log: list[str], cause: str) -> None:
    assert cause in root_cause([f"{line}\n" for line in log])


def test_failure_of_engine_that_was_killed_names_memory() -> None:
    killed = failure(-9, ["INFO loading weights"])
    assert "exit code -9 (SIGKILL, as the kernel sends it where memory runs out. Set engine.kv_cache_bytes" in str(killed)
    assert str(killed).endswith(": INFO loading weights")
    assert killed.exit_code == 1


def test_failure_caused_by_settings_has_exit_code_2() -> None:
    assert failure(1, ["ValueError: No available memory for the cache blocks"]).exit_code == 2
    assert failure(1, ["KeyError: 'x'"]).exit_code == 1
