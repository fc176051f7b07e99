"""Programs that tests need and the checkout has not: the real Collector, clickhouse-go.

In: the variable that names one, and its name. Out: its path. Invariant: a test that needs one skips with a sentence where nobody
named it and PATH has none, and fails where what was named can't be run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def binary(variable: str, name: str) -> str:
    """Where a program is: as the environment says, or in PATH."""
    named = os.environ.get(variable)
    if not named:
        found = shutil.which(name)
        if not found:
            pytest.skip(f"{name} is not here: set {variable} to its path, or put it into PATH")
        return found
    if not (Path(named).is_file() and os.access(named, os.X_OK)):
        pytest.fail(f"{variable} = {named!r} is no program that can be run: set it right, or unset it")
    return named
