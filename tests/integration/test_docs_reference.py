"""docs/reference and the pictures are those that the code gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["packaging/reference.py", "packaging/pictures.py"])
def test_committed_pages_are_what_the_script_writes(script: str) -> None:
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
