"""`spangrad plan` as a user meets it: tables, JSON, a settings file, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands.training.plan import plan
from spangrad.errors import SettingsError, TrainerError
from spangrad.probing.parallel import ParallelSizes, parallel_sizes
from spangrad.settings.sources import load_settings

MODELS = Path(__file__).parents[1] / "fixtures/models"
SMALL, LARGE = MODELS / "qwen2.5-7b-instruct", MODELS / "qwen2.5-32b-instruct/config.json"


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_plan_of_7b_on_one_node_prints_items_stages_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    plan(model=SMALL, gpus="8x80")
    text = capsys.readouterr().out
    assert text.startswith("qwen2: 7,615,616,512 parameters, on 1 node(s) of 8 x A100-80\nFits: all weights; ")
    for part in ("weights, float32", "KV cache", "version that is written", "checkpoint", "publication by disk", "MFU 0.35"):
        assert part in text
    assert "trainer.workers.per_node" in text
    assert "GPU of an engine's worker, each" in text
    assert "--tensor-parallel-size" in text


def test_plan_of_32b_on_two_nodes_writes_settings_that_commands_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new/plan.toml"
    plan(model=LARGE, gpus="8x80", nodes=2, write=file)
    assert "plan.toml is written" in capsys.readouterr().out
    settings = load_settings(file=file, env={})
    assert settings.trainer.workers.nodes == 2
    assert settings.trainer.model == LARGE.parent.absolute()
    engine_gpus = (1 + len(settings.gateway.backends)) * parallel_sizes(settings.engine.extra_args).workers
    assert engine_gpus > 1, "its weights leave one GPU too little room for contexts"
    assert engine_gpus + settings.trainer.workers.per_node <= 8
    with pytest.raises(SettingsError, match=r"plan.toml exists already"):
        plan(model=LARGE, gpus="8x80", nodes=2, write=file)


def test_plan_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    plan(model=LARGE, gpus="8xH200", json=True, set_=["engine.max_model_len=2048"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"]
    assert facts["settings"]["engine.max_model_len"] == 2048
    assert parallel_sizes(facts["settings"]["engine.extra_args"]) == ParallelSizes(**facts["engine_workers"])


def test_plan_where_nothing_fits_prints_nearest_miss_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        TrainerError, match=r"nothing fits 1 node\(s\) of 2 x 24 GB.* a trainer's GPU needs [\d.]+ GiB of 22\.4 GiB"
    ) as raised:
        plan(model=LARGE, gpus="2x24", write=tmp_path / "plan.toml")
    assert raised.value.exit_code == 1
    assert "Nearest miss" in capsys.readouterr().out
    assert not (tmp_path / "plan.toml").exists()


def test_plan_imports_no_pytorch() -> None:
    code = "import sys\nfrom pathlib import Path\nfrom commands.training.plan import plan\nplan(model=Path(sys.argv[1]), gpus='8x80')\n"
    code += "print('LOADED', [name for name in ('torch', 'transformers', 'verl', 'ray') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code, str(SMALL)], capture_output=True, text=True, check=True)
    assert answer.stdout.rstrip().endswith("LOADED []")
