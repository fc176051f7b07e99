"""State that all API servers of one vLLM share: the version that is served, and whether calls may begin.

In: orders, which reach one of the servers. Out: the same state in each of them. Invariant: what one server has written, every other reads
with its next request: the state is a file that all map into memory, and a field is one word, which is written and read whole.

`spangrad engine` makes the file anew for each vLLM. A vLLM that was started without it has a state for each of its servers.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path

STATE_VARIABLE = "SPANGRAD_ENGINE_STATE"
"""Environment variable with the path of the file."""
_WORD = struct.Struct("<q")
_VERSION, _GATE, _REPLACED, _WARM = range(4)
_BYTES = 4 * _WORD.size


class Gate(IntEnum):
    """Treatment of calls that arrive."""

    OPEN = 0
    WAIT = 1
    """They wait: weights are being replaced."""
    REFUSE = 2
    """They are refused: the weights are not known, and all calls were aborted."""
    ASLEEP = 3
    """They wait: the engine has given its memory away. After its wake-up they wait on, until its weights are compared or replaced."""


class EngineState:
    """The state, in a file's memory or in this process's own."""

    def __init__(self, version: int, path: Path | None = None) -> None:
        """Map the file at `path`; without one, begin with `version` in this process's memory."""
        self.shared = path is not None
        """True if every API server of this vLLM has the same state."""
        if path is None:
            self._memory = mmap.mmap(-1, _BYTES)
            self.version = version
        else:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _BYTES)

    @property
    def version(self) -> int:
        """Policy version that is served now."""
        return self._read(_VERSION)

    @version.setter
    def version(self, version: int) -> None:
        self._write(_VERSION, version)

    @property
    def gate(self) -> Gate:
        """Treatment of calls that arrive."""
        return Gate(self._read(_GATE))

    @gate.setter
    def gate(self, gate: Gate) -> None:
        self._write(_GATE, gate)

    @property
    def replaced(self) -> bool:
        """True once it serves other weights than those it was started with."""
        return bool(self._read(_REPLACED))

    @replaced.setter
    def replaced(self, replaced: bool) -> None:
        self._write(_REPLACED, replaced)

    @property
    def warm(self) -> bool:
        """True once the first requests were answered."""
        return bool(self._read(_WARM))

    @warm.setter
    def warm(self, warm: bool) -> None:
        self._write(_WARM, warm)

    def _read(self, field: int) -> int:
        return _WORD.unpack_from(self._memory, field * _WORD.size)[0]

    def _write(self, field: int, value: int) -> None:
        _WORD.pack_into(self._memory, field * _WORD.size, value)


def write_state(path: Path, version: int) -> None:
    """Write the file of a vLLM that is about to start, which serves `version` and is not warm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In place of the old file, which a vLLM that still ends may have mapped.
    path.unlink(missing_ok=True)
    path.write_bytes(_WORD.pack(version).ljust(_BYTES, b"\0"))
