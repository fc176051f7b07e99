"""What one attempt prints, apart from what its neighbours in the same process print.

In: writes to sys.stdout and sys.stderr from code that has an attempt's context (its threads and tasks have it), and the outputs of its
programs. Out: a file of the attempt's own, made when something is written. Invariant: no file grows beyond its bound; what no attempt has
printed, or cannot be written, goes where it would have gone without us.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

FILE = "output.log"
_CUT = "\n[more was printed than is kept: runner.attempt_log_bytes]\n"


class AttemptLog:
    """The log of one attempt."""

    def __init__(self, directory: str | None, limit_bytes: int) -> None:
        """`directory` is made with the first write. None: there is no log, and everything goes where it would have gone."""
        self._path = Path(directory) / FILE if directory and limit_bytes else None
        self._left = limit_bytes
        self._file: IO[bytes] | None = None

    def write(self, text: str) -> bool:
        """Add text that Python code has printed; False when it is to go elsewhere."""
        return self._add(text.encode(errors="replace"))

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def program(self) -> Generator[IO[bytes] | int]:
        """A program's standard error: a file that is looked at when it has ended. Without a log it is ours."""
        if self._path is None:
            yield 2
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = (self._path.parent / "program.err").open("w+b")
        except OSError:
            yield 2
            return
        with file:
            yield file

    def end_program(self, stderr: IO[bytes] | int, output: bytes) -> None:
        """Keep the end of what a program printed.

        Args:
            stderr: as `program` gave it.
            output: the end of its standard output.
        """
        if isinstance(stderr, int):
            os.write(stderr, output)
            return
        size = stderr.seek(0, os.SEEK_END)
        stderr.seek(max(0, size - max(self._left - len(output), 0)))
        self._add(stderr.read() + output)
        Path(stderr.name).unlink(missing_ok=True)

    def _add(self, text: bytes) -> bool:
        if self._path is None:
            return False
        if self._left <= 0:
            return True
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            self._file.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._file.write(_CUT.encode())
        except (OSError, ValueError):
            return False  # a full disk, or a thread that outlived its attempt
        return True


_NONE = AttemptLog(None, 0)
_current: ContextVar[AttemptLog] = ContextVar("spangrad-attempt-log", default=_NONE)


def attempt_log() -> AttemptLog:
    """The log of the attempt that this code runs in."""
    return _current.get()


def begin_log(log: AttemptLog) -> None:
    """From here on, this context prints to a log."""
    _current.set(log)


class _Outputs(io.TextIOBase):
    """A standard output that writes to the log of the attempt that prints."""

    def __init__(self, ours: Any) -> None:
        self._ours = ours

    def write(self, text: str, /) -> int:
        return len(text) if _current.get().write(text) else self._ours.write(text)

    def flush(self) -> None:
        self._ours.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    # TextIOBase answers these itself, and __getattr__ is not asked.
    def fileno(self) -> int:
        return self._ours.fileno()

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._ours.encoding

    @property
    def buffer(self) -> Any:
        return self._ours.buffer


def divide_outputs() -> None:
    """Give each attempt's prints to its log, from now on."""
    sys.stdout, sys.stderr = _Outputs(sys.stdout), _Outputs(sys.stderr)
