"""How the store's process keeps memory that it needs again and again; to be set before the engine is loaded.

In: nothing. Out: settings of the two allocators, the C library's (Python's objects) and the engine's own. Invariant: they change what
memory costs, and nothing that is stored or answered; what somebody has set in the environment stays.

Bodies, columns and answers are megabytes each, and made and forgotten many times a second. As they come, the allocators give such memory
back at once and ask for it anew, and each page is paid for again (docs/decisions/0014).
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt (malloc.h)."""
_KEPT = 128 * 2**20
"""Bytes at the end of a heap that are not given back."""
_LARGEST = 32 * 2**20
"""Bytes of an allocation that is still taken from a heap: the most that the C library allows."""
_HEAPS = 2
"""Of the C library's. Python's threads wait for each other anyway, and what lies in one heap is lost to the others."""
_ENGINE = "prof:false,percpu_arena:disabled,narenas:1,oversize_threshold:0,dirty_decay_ms:60000"
"""All threads and sizes share what was freed, which is given back after a minute, not 5 s; and nobody's allocations are sampled."""


def keep_memory() -> None:
    """Set both; idempotent."""
    # Not MALLOC_CONF: the engine's library has a name of its own for it.
    os.environ.setdefault("JE_MALLOC_CONF", _ENGINE)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # GNU's C library alone has it.
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_ARENA_MAX, _HEAPS)
