"""Crashes a child process at a chosen boundary, as a power cut would: no handler, no rollback code runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

CRASHED = 42


def crashes(action: Callable[[int], object], file: Path, functions: set[str]) -> Iterator[int]:
    """Run `action` in a forked child that dies at its first boundary, then at its second, until a child lives; yield after each death.

    A boundary is a line, or the return, of one of the `functions` of the source `file`. `action` is given its number, and opens its own
    files and connections.
    """
    boundary = 0
    while _run(action, boundary, str(file), functions) == CRASHED:
        yield boundary
        boundary += 1


def survives(action: Callable[[int], object], boundary: int) -> None:
    """Run `action` in a forked child that nothing kills, and fail when it fails."""
    assert _run(action, boundary, "", set()) == 0


def _run(action: Callable[[int], object], boundary: int, file: str, functions: set[str]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            _trace(file, functions, boundary)
            action(boundary)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.settrace(None)
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, CRASHED}, f"the child failed by itself at boundary {boundary}"
    return code


def _trace(file: str, functions: set[str], boundary: int) -> None:
    left = boundary

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event in {"line", "return"}:
            if left == 0:
                os._exit(CRASHED)
            left -= 1
        return local

    def watched(frame: FrameType, *_: Any) -> Any:
        return local if frame.f_code.co_filename == file and frame.f_code.co_name in functions else None

    sys.settrace(watched)
