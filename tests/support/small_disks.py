"""A file system in memory that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(mount: Path, mebibytes: int) -> Generator[Path]:
    """Mount one at a path; the test is skipped where that is not allowed."""
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here ({done.stderr.strip()}): run as root")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
