"""Rows that were dated before a rollout was built, and seen after.

Invariant: a rollout's rows are defined once, for the builder that reads them and for the one that counts them later; a row counts once,
however often it was delivered.

A row is dated when its insert begins, and seen when that ends. One that began before the newest row that a build read, and ended after
it, is no later than the build's watermark: only the number of rows shows it.
"""

from __future__ import annotations

from datetime import UTC, datetime

import polars as pl

from transition_builder.completeness.resolve import NAMED
from transition_builder.frames import conform
from transition_builder.schemas import ROLLOUT, TALLY
from transition_builder.source.discovery import OVERLAP

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_GROUP = [name for name in TALLY if name != "Rows"]
COUNTED = {"RunId": pl.String(), "RolloutId": pl.String(), "Rows": pl.UInt64()}
"""Numbers of rows by rollout."""


def tally(rows: pl.DataFrame) -> pl.DataFrame:
    """Return TALLY of rows of spangrad_internal.rollout_spans, each of which is there once."""
    return conform(rows.group_by(_GROUP).agg(Rows=pl.len()), TALLY)


def count(tallied: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Count the rows of each rollout: RunId, RolloutId and Rows, for rollouts with any.

    Counted are the rows that name it (and its run, or none), and those of the same traces that name none; where none names it as a rollout,
    the rows that have its name for their session, conversation or trace, and again those of the same traces that name none.

    Args:
        tallied: TALLY, of at least all rows of the rollouts.
        rollouts: RunId and RolloutId.
    """
    by_name = rollouts.select(run="RunId", RolloutId="RolloutId").join(
        tallied.with_columns(RolloutId="RolloutKey"), on="RolloutId", maintain_order="left"
    )
    of_run = (pl.col("RunId") == "") | (pl.col("RunId") == pl.col("run"))
    own_rows = by_name.filter(of_run & (NAMED | ~(of_run & NAMED).any().over("run", "RolloutId")))
    unnamed = tallied.filter(~NAMED & (pl.col("TraceId") != ""))
    if unnamed.height:
        inherited = own_rows[["run", "RolloutId", "TraceId"]].unique().join(unnamed, on="TraceId")
        own_rows = pl.concat([own_rows, inherited.select(own_rows.columns)]).unique(["run", "RolloutId", *_GROUP])
    return conform(own_rows.group_by("RolloutId", RunId="run").agg(pl.col("Rows").sum()), COUNTED)


def maybe_incomplete(built: pl.DataFrame) -> pl.DataFrame:
    """Return those of BUILT that may have missed a row in flight when they were read, and were not checked since then.

    A builder checks what arrived lately, so that at its start only the last ones of its predecessor are left.
    """
    read_early = pl.col("IngestedAt") - pl.col("Watermark") < 2 * OVERLAP
    last = pl.col("IngestedAt") >= pl.col("IngestedAt").max() - 2 * OVERLAP
    return built.filter(read_early & last)


def with_new_rows(built: pl.DataFrame, counted: pl.DataFrame) -> pl.DataFrame:
    """Return RunId, RolloutId and Rows of those of BUILT of which more rows have arrived than were read.

    Args:
        built: BUILT.
        counted: of `count`, for the same rollouts.
    """
    return built.join(counted, on=ROLLOUT).filter(pl.col("Rows") > pl.col("RowsRead"))[[*ROLLOUT, "Rows"]]
