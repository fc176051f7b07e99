"""Scratch directories of benchmarks: logs and data of the processes that a benchmark starts.

In: a name. Out: an empty directory. Invariant: an exception leaves everything where its message says that the logs are, and a count that
must be 0 and is not leaves the logs; both are named at the end. A sound run leaves nothing.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

_KEPT: list[Path] = []
"""Directories that are not removed yet."""


@contextmanager
def scratch(name: str) -> Generator[Path]:
    """Create a directory for as long as the block; its logs stay until `exit_code`."""
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    _KEPT.append(directory)
    yield directory
    _remove_all_but_logs(directory)


def exit_code(checked: Mapping[str, float]) -> int:
    """Return the exit code of a benchmark with these counts, which must be 0; remove what a sound one has left."""
    if any(checked.values()):
        return 1
    while _KEPT:
        shutil.rmtree(_KEPT.pop(), ignore_errors=True)
    return 0


def _remove_all_but_logs(directory: Path) -> None:
    for root, directories, files in os.walk(directory, topdown=False):
        for file in (Path(root, name) for name in files if not name.endswith(".log")):
            file.unlink(missing_ok=True)
        for path in (Path(root, name) for name in directories):
            if path.is_symlink():
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()


@atexit.register
def _print_kept() -> None:
    """Name the directories that are left."""
    for directory in _KEPT:
        if any(directory.rglob("*")):
            print(f"this benchmark is not sound; logs of its processes: {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
