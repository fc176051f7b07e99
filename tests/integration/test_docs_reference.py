"""docs/reference is what the code gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_reference_and_pictures_match_their_scripts() -> None:
    done = subprocess.run([sys.executable, "packaging/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
