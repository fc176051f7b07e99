"""Parts of the tests, for jobs that share them: the files are dealt out in turn."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest


def files_of_part(files: Iterable[Path], part: str) -> set[Path]:
    """Return the files of a part, such as `2/4`.

    Raises:
        UsageError: the part is not K/N with K of 1 to N.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not match or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--part {part} is not K/N with K of 1 to N, such as 2/4")
    return {*sorted(files)[int(match[1]) - 1 :: int(match[2])]}
