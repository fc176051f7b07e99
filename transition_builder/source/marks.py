"""Marks: where a builder that is started goes on reading, so that a start costs what is new and not all that the store has.

In: times up to which a builder has left nothing to build. Out: the newest of those of its specification. Invariant: what a builder
has still to build has arrived after its mark, late rows included; so any builder of the specification may begin there.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from transition_builder.schemas import MICROSECONDS
from transition_builder.source.queries import StoreReader

BETWEEN_MARKS = timedelta(minutes=10)
"""Time that a mark moves on at least, since each is an insert."""
_NEWEST = """
SELECT toUnixTimestamp64Micro(max(Since)) AS Since FROM spangrad_internal.builder_marks WHERE BuildSpec = %(spec)s HAVING count() > 0
"""


class Marks:
    """Marks of a build specification, written in a builder's name."""

    def __init__(self, reader: StoreReader, builder: str) -> None:
        """Mark in a builder's name; this does not query the store yet."""
        self._reader = reader
        self._builder = builder
        self._newest: datetime | None = None

    def read(self) -> datetime | None:
        """Return the newest mark. None: there is none, and all of history is to be read.

        Raises:
            StoreError: the store failed.
        """
        rows = self._reader.frame(_NEWEST, {"spec": self._reader.spec})
        self._newest = rows.select(pl.col("Since").cast(MICROSECONDS)).item() if rows.height else None
        return self._newest

    def move(self, since: datetime) -> None:
        """Write a mark, if it is the first, or has moved on by `BETWEEN_MARKS`.

        Raises:
            StoreError: the store failed.
        """
        if self._newest and since - self._newest < BETWEEN_MARKS:
            return
        row = {"BuildSpec": self._reader.spec, "Since": since, "Builder": self._builder}
        self._reader.insert("builder_marks", pl.DataFrame([row], {"BuildSpec": pl.String, "Since": MICROSECONDS, "Builder": pl.String}))
        self._newest = since
