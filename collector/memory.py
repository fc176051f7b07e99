"""Memory settings of the store's process: freed memory is kept for reuse; to be set before the database is loaded.

Invariant: they change the cost of memory, nothing that is stored or answered; a setting in the user's environment takes precedence.

Bodies, columns and answers are megabytes each, and are made and freed many times a second. By default, the allocators return such memory
to the kernel at once and request it again, and each page is paid for again (docs/decisions/0014).
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt (malloc.h)."""
_KEPT = 128 * 2**20
"""Bytes at the end of a heap that are not returned to the kernel."""
_LARGEST = 32 * 2**20
"""Bytes of the largest allocation that is taken from a heap: the most that the C library allows."""
_HEAPS = 2
"""Number of the C library's heaps. Python's threads wait for each other anyway, and the free memory of one heap is lost to the others."""
_DATABASE = "prof:false,percpu_arena:disabled,narenas:1,oversize_threshold:0,dirty_decay_ms:60000"
"""Options of the database's allocator: all threads share freed memory, it is returned after a minute, not 5 s, and none is sampled."""


def keep_memory() -> None:
    """Set both allocators; idempotent."""
    # Not MALLOC_CONF: the database's library has a name of its own for it.
    os.environ.setdefault("JE_MALLOC_CONF", _DATABASE)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Only GNU's C library has it.
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_ARENA_MAX, _HEAPS)
