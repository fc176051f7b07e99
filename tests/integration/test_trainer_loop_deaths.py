"""Deaths at every boundary of the training loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trainers import write_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.mark.parametrize("kind", ["rollouts", "rollouts of the newest version"])
def test_training_loop_killed_at_any_boundary_recovers(tmp_path: Path, base: Path, kind: str):
    """Law 4 over ledger, checkpoint and gateway together; in a process of its own, where forking is safe.

    With older rollouts, versions are written beside the next step.
    """
    command = [sys.executable, "-m", "tests.support.trainers", kind, base, tmp_path]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 100, "the boundaries were not found"
