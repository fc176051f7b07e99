"""Rule for the repetition of HTTP requests, shared by every client: which responses a later try may improve, and when.

In: a response's status and headers. Out: whether to try again, and after how long. Only the standard library, since agents import it.
"""

from __future__ import annotations

import math

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})
"""Statuses of a server, or of a proxy before it, that is busy or away: OTLP's own list, with 408. Every other one is
final for a request; spans are retried on each 5xx, since they are made once."""
RETRY_AFTER_MOST = 30.0
"""Longest pause that a server's Retry-After is granted, in seconds."""


def retry_after(header: str | None) -> float | None:
    """Return the pause that a Retry-After header asks for, in seconds. None: no header, or a date, and the client's own pauses apply."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), RETRY_AFTER_MOST)
