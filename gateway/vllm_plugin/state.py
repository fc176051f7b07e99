"""State that all API servers of one vLLM share: the version that is served, and whether calls may begin.

In: orders, which reach one of the servers. Out: the same state in each of them. Invariant: what one server has written, every other reads
with its next request: the state is a file that all map into memory, and a field is one word, which is written and read whole.

`spangrad engine` makes the file anew for each vLLM. A vLLM that was started without it has a state for each of its servers.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from enum import IntEnum
from pathlib import Path

STATE_VARIABLE = "SPANGRAD_ENGINE_STATE"
"""Environment variable with the path of the file."""


class Gate(IntEnum):
    """Treatment of calls that arrive."""

    OPEN = 0
    WAIT = 1
    """They wait: weights are being replaced."""
    REFUSE = 2
    """They are refused: the weights are not known, and all calls were aborted."""
    ASLEEP = 3
    """They wait: the engine has given its memory away. After its wake-up they wait on, until its weights are compared or replaced."""


class EngineState(ctypes.Structure):
    """The state, in this process's own memory or in a file's (`of_file`)."""

    version: int
    """Policy version that is served now."""
    gate: int
    """Treatment of calls that arrive, a `Gate`."""
    started: int
    """Start of this vLLM, in nanoseconds since 1970: another one has another. 0: not known."""
    replaced: bool
    """True once it serves other weights than those it was started with."""
    warm: bool
    """True once the first requests were answered."""
    _fields_ = (
        ("version", ctypes.c_int64),
        ("gate", ctypes.c_int64),
        ("started", ctypes.c_int64),
        ("replaced", ctypes.c_bool),
        ("warm", ctypes.c_bool),
    )

    shared = False
    """True if every API server of this vLLM has the same state."""

    @classmethod
    def of_file(cls, path: Path) -> EngineState:
        """Map a file of `write_state`."""
        with path.open("r+b") as file:
            state = cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))
        state.shared = True
        return state


def write_state(path: Path, version: int) -> None:
    """Write the file of a vLLM that is about to start, which serves `version` and is not warm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In place of the old file, which a vLLM that still ends may have mapped.
    path.unlink(missing_ok=True)
    path.write_bytes(bytes(EngineState(version=version, started=time.time_ns())))
