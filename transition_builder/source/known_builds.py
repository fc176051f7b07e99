"""Newest revisions of rollouts, asked of the store once a pass.

Invariant: what this builder writes, or another one may have written since, is asked again.
"""

from __future__ import annotations

import polars as pl

from transition_builder.frames import empty
from transition_builder.schemas import BUILT
from transition_builder.source.queries import StoreReader


class KnownBuilds:
    """The revisions that the store had when it was asked last."""

    def __init__(self, reader: StoreReader) -> None:
        """Ask with `reader`; this does not query the store yet."""
        self._reader = reader
        self.forget()

    def of(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return BUILT of all rollouts of some names, in any run.

        Raises:
            StoreError: the store failed.
        """
        # Not as Python's texts: a store may hold names that are not UTF-8.
        names = rollouts.drop_nulls().unique()
        unknown = names.filter(~names.is_in(self._names.implode())) if len(self._names) else names
        if len(unknown):
            self._built = pl.concat([self._built, self._reader.built(unknown)])
            self._names = self._names.append(unknown)
        return self._built if len(names) == len(self._names) else self._built.filter(pl.col("RolloutId").is_in(names.implode()))

    def forget(self, rollouts: pl.Series | None = None) -> None:
        """Forget some rollouts, or all."""
        if rollouts is None:
            self._names, self._built = pl.Series(dtype=pl.String), empty(BUILT)
        else:
            self._names = self._names.filter(~self._names.is_in(rollouts.implode()))
            self._built = self._built.filter(~pl.col("RolloutId").is_in(rollouts.implode()))
