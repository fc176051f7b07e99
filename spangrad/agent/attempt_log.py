"""Logs of attempts: the output of each, separate from that of its neighbours in the same process.

In: writes to sys.stdout and sys.stderr from code that has an attempt's context (its threads and tasks have it), and the outputs of its
programs. Out: a file of the attempt's own, created by the first write. Invariant: no file exceeds its size limit; output of no attempt, and
output that cannot be written, goes to the process's own outputs; what these cannot take either, such as on a full disk, is lost, and no
attempt fails of it.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

FILE = "output.log"
"""Name of the file of a log."""
_LIMIT_BYTES = 2**20
"""Largest size of a log, in bytes."""
_KEPT_BYTES = 2**23
"""End of an output that keeps its disk space while its process runs, in bytes: more than is read of it."""
_PUNCH_HOLE = 0b11
"""Flags of fallocate: free a part of a file, and keep its size."""
_CUT = f"\n[more was printed than the {_LIMIT_BYTES} bytes that are kept]\n"


class AttemptLog:
    """The log of one attempt."""

    def __init__(self, directory: str | None) -> None:
        """`directory` is created by the first write. None: there is no log, and all output goes to the process's own outputs."""
        self._path = Path(directory) / FILE if directory else None
        self._remaining_bytes = _LIMIT_BYTES
        self._file: IO[bytes] | None = None

    def write(self, text: str) -> bool:
        """Add text that Python code has printed; False when the caller must write it elsewhere."""
        return self._add(text.encode(errors="replace"))

    def close(self) -> None:
        """Close the file; later output is not kept, but goes to the process's own outputs."""
        self._path = None
        if self._file is not None:
            self._file.close()

    @contextmanager
    def program(self) -> Generator[IO[bytes] | int]:
        """Yield a file for a program's standard error, read when the program has ended. Without a log, our own standard error."""
        if self._path is None:
            yield 2
            return
        with tempfile.TemporaryFile() as file:
            yield file

    def end_program(self, stderr: IO[bytes] | int, output: bytes) -> None:
        """Keep the end of what a program printed: to `stderr`, which `program` yielded, and `output`, the end of its standard output."""
        with suppress(OSError):
            if isinstance(stderr, int):
                os.write(stderr, output)
                return
            size = stderr.seek(0, os.SEEK_END)
            stderr.seek(max(0, size - max(self._remaining_bytes - len(output), 0)))
            self._add(stderr.read() + output)

    def _add(self, text: bytes) -> bool:
        if (path := self._path) is None:
            return False
        if not text or self._remaining_bytes <= 0:
            return True
        try:
            if self._file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("ab", buffering=0)
            self._file.write(text[: self._remaining_bytes])
            self._remaining_bytes -= len(text)
            if self._remaining_bytes <= 0:
                self._file.write(_CUT.encode())
        except (OSError, ValueError):
            return False  # a full disk, or a thread that outlived its attempt
        return True


_NONE = AttemptLog(None)
_current: ContextVar[AttemptLog] = ContextVar("spangrad-attempt-log", default=_NONE)


def attempt_log() -> AttemptLog:
    """Return the log of the attempt that this code runs in."""
    return _current.get()


def begin_log(log: AttemptLog) -> None:
    """Direct what this context prints to a log, from here on."""
    _current.set(log)


class _Outputs(io.TextIOBase):
    """Standard output that writes to the log of the attempt that prints."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def write(self, text: str, /) -> int:
        if not _current.get().write(text):
            with suppress(OSError):
                self._own.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._own.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    # TextIOBase defines these itself, so that __getattr__ is not called.
    def fileno(self) -> int:
        return self._own.fileno()

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._own.encoding

    @property
    def buffer(self) -> Any:
        return self._own.buffer


def divide_outputs() -> None:
    """Direct each attempt's prints to its log, from now on."""
    sys.stdout, sys.stderr = _Outputs(sys.stdout), _Outputs(sys.stderr)


def free_beginning(file: int) -> None:
    """Free the disk space of what a process has written to a file, but for the end; where the file system cannot, nothing happens."""
    state = os.fstat(file)
    length = state.st_size - _KEPT_BYTES
    if length > 0 and state.st_blocks * 512 > 2 * _KEPT_BYTES and sys.platform == "linux":
        ctypes.CDLL(None).fallocate(file, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))


def private_pipes() -> tuple[int, int]:
    """Return this process's input and output, moved away from users' code: its input is empty, and its output is the standard error."""
    source, target = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return source, target
