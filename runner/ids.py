"""Ids of rollouts and groups that lie side by side in the store when they ran side by side.

In: the clock. Out: 32 hexadecimal digits. Invariant: ids of one series are in order; no two series share one, whichever process made them.

The store's tables are ordered by rollout, and a training step reads the rollouts of a short time: of random ids each lies in a
granule of its own, of these some dozens share one.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator


def ordered_ids() -> Iterator[str]:
    """A series without end: the milliseconds of its beginning, random digits of its own, a counter."""
    head = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"
    return (f"{head}{number:08x}" for number in itertools.count())
