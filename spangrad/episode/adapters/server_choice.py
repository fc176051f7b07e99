"""Servers of environments as their clients see them, and the choice among several that have the same environment.

In: URLs. Out: the least loaded, and the service that it is to its clients. Invariant: a server that reports its load is judged by it,
another by what this process has open there; one that does not answer is chosen only if none does.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping

from spangrad.errors import EnvironmentsError
from spangrad.http.service import RemoteService

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


def environment_service(url: str, token: str | None, retry_seconds: float, headers: Mapping[str, str] | None = None) -> RemoteService:
    """Return a server of an environment as a service; a request is tried again for `retry_seconds`."""
    return RemoteService("the environment", url, token, EnvironmentsError, "Start it, or fix the URL.", retry_seconds, headers or {})
