"""Each recipe's command, end to end: store, queue, gateway, vLLM, builder and trainer, to a version that is trained and served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.recipe import METHODS, Method
from spangrad.settings.sources import load_settings
from spangrad.store.clickhouse import connect
from spangrad.weights import adapters
from tests.support.servers import running_store
from trainer.publish import checkpoint
from trainer.publish.checkpoint import version_directory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["math", "spider", "musique", "swe"])
def test_recipe_tiny_serves_trained_version(name: str, method: Method, vllm_cache: Path, tmp_path: Path) -> None:
    (tmp_path / ".vllm-cache").symlink_to(vllm_cache)
    command = [sys.executable, "-m", f"recipes.{name}", "--tiny", "--method", method, "--directory", str(tmp_path / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["version"] >= 1
    settings = load_settings(file=tmp_path / name / "spangrad.toml", env={})
    version = version_directory(settings.trainer, 1)
    assert (version / (adapters.WEIGHTS if method == "lora" else checkpoint.WEIGHTS)).exists()
    with running_store(settings.store, tmp_path / "store.log"):
        client = connect(settings.store)
        trained = client.query("SELECT RolloutId FROM spangrad.batches").result_rows
        drops = client.query("SELECT DISTINCT Reason, Detail FROM spangrad.drops").result_rows
        client.close()
    assert len(trained) >= 8, "a batch of two groups of four"
    checker = ("not_selected", "agent checker_agent")
    assert (checker in drops) == (name == "spider"), "the checker's calls alone are left out"
