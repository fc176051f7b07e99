"""Builds by what was read of their rollouts: the store's newest revisions, with what a builder has examined since, and what they lack.

Invariant: a rollout of which rows were in flight when it was read counts as out of date until it is built again.
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

from transition_builder.frames import empty
from transition_builder.schemas import BUILT, MICROSECONDS, ROLLOUT
from transition_builder.source import late_spans
from transition_builder.source.discovery import OVERLAP, Discovery
from transition_builder.source.known_builds import KnownBuilds


class ExaminedBuilds:
    """Builds of rollouts as one builder knows them."""

    def __init__(self, known: KnownBuilds, discovery: Discovery) -> None:
        self._known, self._discovery = known, discovery
        self._examined = empty({**dict.fromkeys(ROLLOUT, pl.String()), "Until": MICROSECONDS, "Examined": pl.UInt64()})
        self._late_rows = empty(late_spans.COUNTED)

    @property
    def lacks_rows(self) -> bool:
        """Return whether a build is remembered that lacks rows."""
        return not self._late_rows.is_empty()

    def of(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return BUILT of rollouts of some names; rows that were examined and changed nothing count as read.

        Raises:
            StoreError: the store failed.
        """
        known = self._known.of(rollouts)
        if known.is_empty():
            return known
        built = known.join(self._examined, on=ROLLOUT, how="left").join(self._late_rows, on=ROLLOUT, how="left")
        read = pl.max_horizontal("RowsRead", "Examined")
        is_incomplete = (pl.col("Rows") > read).fill_null(False)
        long_ago = pl.lit(late_spans.LONG_AGO).cast(BUILT["Watermark"])
        until = pl.when(is_incomplete).then(long_ago).otherwise(pl.max_horizontal("Watermark", "Until"))
        return built.with_columns(Watermark=until, RowsRead=read).drop("Until", "Examined", "Rows")

    def with_late_rows(self, built: pl.DataFrame) -> pl.DataFrame:
        """Return those of BUILT that lack rows in flight when they were read, in the form of `outdated_rollouts`. Remembered until read.

        Raises:
            StoreError: the store failed.
        """
        candidates = late_spans.maybe_incomplete(built)
        incomplete = late_spans.with_new_rows(candidates, late_spans.count(self._discovery.tally(candidates["RolloutId"]), candidates))
        self._late_rows = pl.concat([self._late_rows.join(incomplete, on=ROLLOUT, how="anti"), incomplete])
        return candidates.join(incomplete, on=ROLLOUT, how="semi").select(*ROLLOUT, LastArrival="Watermark")

    def examined(self, rollouts: pl.DataFrame) -> None:
        """Record that all rows of ROLLOUTS were read, whether or not they made a new revision."""
        rows = rollouts.select(*ROLLOUT, Until="LastArrival", Examined="Rows")
        self._examined = pl.concat([self._examined.join(rows, on=ROLLOUT, how="anti"), rows])

    def up_to_date(self, rollouts: pl.DataFrame) -> None:
        """Forget which rows of rollouts were in flight."""
        if self._late_rows.height:
            self._late_rows = self._late_rows.join(rollouts, on=ROLLOUT, how="anti")

    def forget_before(self, now: datetime) -> None:
        """Forget what was examined so long before the store's time `now` that no row dated before it is still in flight."""
        if self._examined.height:
            self._examined = self._examined.filter(now - pl.col("Until") < 2 * OVERLAP)
