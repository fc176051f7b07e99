"""Choice of a server among several that have the same environment.

In: URLs. Out: the least loaded. Invariant: a server that reports its load is judged by it, another by what this process has open there; one
that does not answer is chosen only if none does.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping

_lock = threading.Lock()
_open: Counter[str] = Counter()
"""Sessions that this process has open, by URL."""


def choose(loads: Mapping[str, float | None]) -> str:
    """Return the URL of the least loaded server.

    Args:
        loads: candidates, with the share of the capacity that is in use; infinite: it does not answer; None: it does not report it.
    """
    with _lock:
        counts = dict(_open)
    return min(loads, key=lambda url: (loads[url] or 0.0, counts.get(url, 0), random.random()))


def note_open(url: str, change: int) -> None:
    """Count a session that was opened (1) or closed (-1)."""
    with _lock:
        _open[url] += change
