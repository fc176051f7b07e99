"""`make gpu-check` on a machine without a GPU: it says what the machine lacks, and its checks work where a CPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT


def gpu_check(directory: Path, *options: str) -> dict[str, Any]:
    """The report of the checks."""
    report = directory / "report/gpu-check.json"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "--gpu-report", str(report), *options]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    return json.loads(report.read_text())


def test_gpu_check_without_gpu_skips_each_check_with_sentence(tmp_path: Path) -> None:
    report = gpu_check(tmp_path)
    names = [check["check"] for check in report["checks"]]
    assert (len(names), report["passed"], report["failed"], report["machine"]["gpus"]) == (len(set(names)), 0, 0, [])
    assert report["skipped"] == len(names) > 8
    assert {check["reason"] for check in report["checks"]} == {"this machine has no GPU that PyTorch sees"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gpu_checks_that_cpu_can_run_pass_there(tmp_path: Path) -> None:
    report = gpu_check(tmp_path, "--gpu-checks-on-cpu")
    skipped = {check["check"]: check["reason"] for check in report["checks"] if check["outcome"] == "skipped"}
    assert skipped == {
        "test_packed_step_agrees_with_padded_step": "packed rows need a GPU",
        "test_step_of_half_a_billion_parameters_reaches_share_of_peak": "a CPU has no peak to compare with",
        "test_engine_asleep_frees_its_memory_and_wakes_with_its_weights": "an engine on a CPU frees nothing when it sleeps",
    }
    assert all(check["figures"] for check in report["checks"] if "agree" in check["check"] and check["outcome"] == "passed")
