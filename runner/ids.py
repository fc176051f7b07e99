"""Ids of rollouts and groups, ordered by time so that rollouts that ran together lie together in the store.

In: the clock. Out: 32 hexadecimal digits. Invariant: the ids of one series are in order; no two series share an id, in any process.

The store's tables are ordered by rollout, and a training step reads the rollouts of a short time. Random ids would each lie in a granule of
their own; of these ids, dozens share one granule.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator


def ordered_ids() -> Iterator[str]:
    """Return an endless series of ids: milliseconds of its beginning, random digits of its own, a counter."""
    head = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"
    return (f"{head}{number:08x}" for number in itertools.count())
