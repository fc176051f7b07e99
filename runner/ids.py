"""Ids of rollouts and groups, ordered by time so that rollouts that ran together lie together in the store.

In: the clock. Out: 32 hexadecimal digits. Invariant: the ids of one series are in order; no two series share an id, in any process.

The store's tables are ordered by rollout, and a training step reads the rollouts of a short time. Random ids would each lie in a granule of
their own; of these ids, dozens share one granule.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from spangrad.http.queue_messages import ID_CHARACTERS

_FILE_NAME_MOST = 200
"""Longest name of a file, in characters: file systems allow 255, and suffixes follow."""


def ordered_ids() -> Iterator[str]:
    """Return an endless series of ids: milliseconds of its beginning, random digits of its own, a counter."""
    head = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"
    return (f"{head}{number:08x}" for number in itertools.count())


def file_name(name: str) -> str:
    """Return a file's name for an id of any characters and length, which no other id has."""
    encoded = quote(name, safe="").replace(".", "%2E")
    if len(encoded) <= _FILE_NAME_MOST:
        return encoded
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{encoded[: _FILE_NAME_MOST - 1 - len(digest)]}.{digest}"


def require_short(ids: Iterable[str]) -> None:
    """Refuse ids that no worker could report with.

    Raises:
        ValueError: one is longer than requests may hold.
    """
    for name in ids:
        if len(name) > ID_CHARACTERS:
            raise ValueError(f"id {name[:80]}... has {len(name)} characters, and {ID_CHARACTERS} are allowed. Shorten the names in it.")
