"""Files that a command writes at its end.

In: a path, and the option that names it. Out: a place that can be written. Invariant: a wrong path is refused before the work, not after.
"""

from __future__ import annotations

import os
from pathlib import Path

from spangrad.errors import SettingsError
from spangrad.processes import make_private


def make_directory_of(file: Path, option: str) -> None:
    """Make the directory of a file that will be written.

    Raises:
        SettingsError: the directory cannot be made, or nothing can be written there.
    """
    problem = ""
    try:
        make_private(file.parent)
    except OSError as error:
        problem = f"{file.parent} is no directory" if file.parent.exists() else error.strerror or str(error)
    if not problem and file.is_dir():
        problem = "it is a directory"
    if not problem and not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "not permitted"
    if problem:
        raise SettingsError(f"{option} {file} cannot be written ({problem}). Name another file.")
