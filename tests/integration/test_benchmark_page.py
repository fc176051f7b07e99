"""The page benchmark at a small size: a real store, a real page, a real browser, and everything that must be 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_benchmark_page_finds_all_rollouts_and_rows_of_the_public_table() -> None:
    command = [sys.executable, "-m", "benchmarks.page", "--rollouts", "1024", "--requests", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["checked"].values()) == {0}
    assert (result["rollouts"], result["spans"]) == (1024, 512 * 20 + 600 + 4 * 6)
