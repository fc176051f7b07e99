"""Traces without a final root: the rollouts that they belong to, and the end of waiting for them.

In: spans of unconcluded calls, and facts of their traces and rollouts. Out: rollouts to build in
spite of the missing root. Invariant: every call that arrives is concluded in the end, and no rollout is concluded
while anything of it still arrives.

Two kinds. A rollout that a runner announced (its spans name run and mode) and that stays silent for
`incomplete_after_seconds` is incomplete: the runner was killed, or its root was lost. Traces that no runner announced are
production's: complete when silent for `quiet_seconds`. Their rollout is the one that a span of the trace names, else its session, its
conversation, or the trace itself. A trace that still lacks a parent of some span has an open span, so that it must be silent
for the longer time.
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

from spangrad.settings import BuilderSettings
from spangrad.types import Mode
from transition_builder.completeness.resolve import claim
from transition_builder.frames import Verdict, conform
from transition_builder.schemas import ROLLOUT, ROLLOUTS, ROOTLESS

_GROUP = ["GroupId", "GroupSize", "TaskId"]
_NAMING = [name for name in ROOTLESS if name != "IngestedAt"]
NO_ROOT = "no final root arrived"


def merge(known: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """Merge known ROOTLESS rows, with DueAt, and new ones: one row for each rollout name and trace, dated by the newest."""
    rows = pl.concat([known, new.with_columns(DueAt=pl.col("IngestedAt"))])
    # The silence of a continued trace is counted anew.
    newest = rows.group_by(_NAMING, maintain_order=True).agg(pl.col("IngestedAt", "DueAt").max())
    return newest.select(known.columns)


def without(known: pl.DataFrame, due: pl.DataFrame, rollouts: pl.DataFrame, concluded: pl.DataFrame) -> pl.DataFrame:
    """Return known ROOTLESS rows without those that are due and belong to concluded ROLLOUT; `rollouts` are `rollouts_of` those due."""
    rows = rollouts.with_row_index("row").join(concluded, on=ROLLOUT, how="semi")["row"]
    return known.join(due[rows], on=_NAMING, how="anti")


def rollouts_of(rootless: pl.DataFrame, owners: pl.DataFrame, activity: pl.DataFrame) -> pl.DataFrame:
    """Return ROOTLESS with the rollouts that they belong to; Ours: a span names it as a rollout; Announced: a runner announced it.

    `owners` are OWNERS of their traces, `activity` ACTIVITY of the rollouts that those name; a run that a row does not name is the
    rollout's only one.
    """
    only = (
        activity.filter(pl.col("RunId") != "")
        .group_by("RolloutId")
        .agg(pl.col("RunId").first().alias("run"), pl.col("Mode").max().alias("mode"), pl.len().alias("runs"))
        .filter(pl.col("runs") == 1)
        .drop("runs")
    )
    return (
        claim(rootless, owners)
        .rename({"RolloutKey": "RolloutId"})
        .join(only, on="RolloutId", how="left", maintain_order="left")
        .with_columns(lone=(pl.col("RunId") == "") & pl.col("run").is_not_null())
        .with_columns(RunId=pl.when("lone").then("run").otherwise("RunId"), Mode=pl.when("lone").then("mode").otherwise("Mode"))
        .with_columns(Announced=pl.col("Ours") & (pl.col("RunId") != "") & (pl.col("Mode") != ""))
        .drop("run", "mode", "lone", "RolloutKeySource")
    )


def outdated_rollouts(arrived: pl.DataFrame, built: pl.DataFrame) -> pl.DataFrame:
    """Return rollouts of which something has arrived since they were BUILT: RunId, RolloutId, LastArrival.

    `arrived` has RunId, RolloutId and IngestedAt of rows; a run that a row does not name may be any.
    """
    newest = arrived.group_by(ROLLOUT).agg(LastArrival=pl.col("IngestedAt").max())
    unnamed = newest.filter(pl.col("RunId") == "").drop("RunId").join(built[[*ROLLOUT, "Watermark"]], on="RolloutId")
    named = newest.join(built[[*ROLLOUT, "Watermark"]], on=ROLLOUT)
    return (
        pl.concat([named, unnamed], how="diagonal")
        .filter(pl.col("LastArrival") > pl.col("Watermark"))
        .group_by(ROLLOUT, maintain_order=True)
        .agg(pl.col("LastArrival").max())
    )


def decide_rootless(
    rootless: pl.DataFrame,
    roots: pl.DataFrame,
    activity: pl.DataFrame,
    traces: pl.DataFrame,
    now: datetime,
    spec: BuilderSettings,
    *,
    force: bool = False,
) -> pl.DataFrame:
    """Decide on every rollout without a final root: return ROLLOUTS; those that have not been silent for long enough wait.

    Args:
        rootless: of `rollouts_of`.
        roots: ROOTS of the attempts of their rollouts, as far as they arrived.
        activity: ACTIVITY of their rollouts.
        traces: TRACES of their traces.
        now: the store's clock, as are all arrival times.
        spec: the waiting times.
        force: do not wait for traces that no runner announced and that have no open span.
    """
    seen = activity.group_by("RolloutId").agg(pl.col("LastArrival").max().alias("rollout_arrival"), pl.col("Rows").sum())
    of_trace = rootless.join(traces, on="TraceId", how="left")
    open_traces = of_trace.group_by(ROLLOUT).agg(
        pl.col("HasOpenSpan").fill_null(False).any(), pl.col("LastArrival").max().alias("trace_arrival"), RowsOfTraces=pl.col("Rows").sum()
    )
    known = roots.sort("Attempt").group_by(ROLLOUT, maintain_order=True).agg(pl.col(*_GROUP).last(), pl.col("Final").any())
    last = pl.max_horizontal("IngestedAt", "rollout_arrival", "trace_arrival")
    long_silence, short_silence = (
        pl.duration(milliseconds=round(seconds * 1000)) for seconds in (spec.incomplete_after_seconds, 0 if force else spec.quiet_seconds)
    )
    announced = pl.col("Announced")
    silent_at = last + pl.when(announced | pl.col("HasOpenSpan")).then(long_silence).otherwise(short_silence)
    ended = pl.when(announced).then(pl.lit(Verdict.INCOMPLETE.value)).otherwise(pl.lit(Verdict.COMPLETE.value))
    return conform(
        _gather(rootless)
        .join(open_traces, on=ROLLOUT)
        .join(seen, on="RolloutId", how="left")
        .join(known, on=ROLLOUT, how="left")
        .filter(~pl.col("Final").fill_null(False))
        .with_columns(
            pl.col("GroupId", "TaskId").fill_null(""),
            pl.col("GroupSize").fill_null(0),
            Mode=pl.when(announced).then("Mode").otherwise(pl.lit(Mode.PRODUCTION.value)),
            Verdict=pl.when(silent_at <= now).then(ended).otherwise(pl.lit(Verdict.WAITING.value)),
            Detail=pl.when(announced).then(pl.lit(NO_ROOT)).otherwise(pl.lit("")),
            SpanId=pl.lit(""),
            ChangesAt=pl.when(silent_at > now).then(silent_at),
            LastArrival=last,
            Rows=pl.max_horizontal("Rows", "RowsOfTraces"),
            Calls=pl.lit(None, pl.UInt32),
            Failure=pl.lit(""),
        ),
        ROLLOUTS,
    )


def _gather(rootless: pl.DataFrame) -> pl.DataFrame:
    """Return one row a rollout: its newest attempt and arrival."""
    return (
        rootless.sort("Attempt", "IngestedAt")
        .group_by(ROLLOUT, maintain_order=True)
        .agg(pl.col("Mode").max(), pl.col("Attempt", "TraceId").last(), pl.col("IngestedAt").max(), pl.col("Announced").any())
    )
