"""Reassigned traces: calls that were built under one rollout name and now belong to another.

Invariant: a call counts in one rollout; the former rollout gets a revision without it.

A trace that names no rollout is built under its session, its conversation or its own id. When a span with a more specific name
arrives, its calls belong to that rollout.
"""

from __future__ import annotations

import polars as pl

from spangrad.types import Mode
from transition_builder.completeness.resolve import claim
from transition_builder.frames import Verdict, conform
from transition_builder.schemas import MICROSECONDS, ROLLOUT, ROLLOUTS, ROOTLESS

KEYS = {"TraceId": pl.String(), "RolloutKey": pl.String()}
"""Rollout keys of the spans in a trace that do not name their rollout."""
CONCLUDED = {"RunId": pl.String(), "RolloutId": pl.String(), "TraceId": pl.String()}
"""Traces with calls in a rollout's newest revision."""
REASSIGNED = {**CONCLUDED, "IngestedAt": ROOTLESS["IngestedAt"]}
"""CONCLUDED, of traces that now belong to another rollout, with the arrival time of their newest row."""
_UNNAMED = {"RunId": pl.lit(""), "Mode": pl.lit(""), "RolloutKeySource": pl.lit("trace"), "Attempt": pl.lit(0, ROOTLESS["Attempt"])}


def former_owners(keys: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """Return TraceId and RolloutId: former names, of KEYS, of traces that have a more specific one now, by their OWNERS."""
    if keys.is_empty():
        return keys.rename({"RolloutKey": "RolloutId"})
    now = claim(keys.with_columns(**_UNNAMED), owners)["RolloutKey"]
    return keys.filter(keys["RolloutKey"] != now).select("TraceId", RolloutId="RolloutKey").unique(maintain_order=True)


def merge(known: pl.DataFrame, traces: pl.DataFrame, arrived: pl.DataFrame) -> pl.DataFrame:
    """Return REASSIGNED, with traces (CONCLUDED) of which rows have arrived (ARRIVED)."""
    newest = arrived.group_by("TraceId").agg(pl.col("IngestedAt").max())
    reassigned = traces.join(newest, on="TraceId", maintain_order="left")
    return pl.concat([known.join(reassigned, on=list(CONCLUDED), how="anti"), reassigned])


def to_rebuild(reassigned: pl.DataFrame, built: pl.DataFrame) -> pl.DataFrame:
    """Return ROLLOUTS of REASSIGNED, to rebuild without the calls that have moved; `built` is BUILT of those.

    No runner announced them, and they have been silent for long enough.
    """
    texts = {name: pl.lit("") for name in ("GroupId", "TaskId", "Failure", "SpanId", "Detail")}
    return conform(
        reassigned.group_by(ROLLOUT, maintain_order=True)
        .agg(pl.col("TraceId").last())
        .join(built.select(*ROLLOUT, "Watermark", Rows="RowsRead"), on=ROLLOUT, maintain_order="left")
        .with_columns(
            Mode=pl.lit(Mode.PRODUCTION.value),
            Verdict=pl.lit(Verdict.COMPLETE.value),
            Attempt=0,
            GroupSize=0,
            Calls=pl.lit(None, pl.UInt32),
            IngestedAt="Watermark",
            LastArrival="Watermark",
            ChangesAt=pl.lit(None, MICROSECONDS),
            **texts,
        ),
        ROLLOUTS,
    )


def rootless(reassigned: pl.DataFrame) -> pl.DataFrame:
    """Return ROOTLESS rows for the calls of REASSIGNED, which belong to no rollout until they are built under their new name."""
    return conform(reassigned.with_columns(RolloutKey="TraceId", **_UNNAMED), ROOTLESS).unique(maintain_order=True)
