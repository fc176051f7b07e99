"""Calls that were built under one name and go by another now.

In: how the spans of traces name their rollouts, and what those traces say of themselves. Out: names that are theirs no longer, and
rollouts to build anew. Invariant (law 2): a call counts in one rollout: what was built under a former name gets a revision without it.

A trace that names no rollout is built under its session, its conversation or its own id. When a span comes that says more, its calls
are that rollout's.
"""

from __future__ import annotations

import polars as pl

from spangrad.types import Mode
from transition_builder.completeness.rootless_traces import claim
from transition_builder.frames import Verdict, conform
from transition_builder.schemas import LOOSE, ROLLOUTS

KEYS = {"TraceId": pl.String(), "RolloutKey": pl.String()}
"""How spans that do not name their rollout are found, by their trace."""
CONCLUDED = {"RunId": pl.String(), "RolloutId": pl.String(), "TraceId": pl.String()}
"""Traces of which a rollout's newest revision has calls."""
MOVED = {**CONCLUDED, "IngestedAt": LOOSE["IngestedAt"]}
"""CONCLUDED, of traces that go by another name now, and when their newest row came."""
_ROLLOUT = ["RunId", "RolloutId"]
_UNNAMED = {"RunId": pl.lit(""), "Mode": pl.lit(""), "RolloutKeySource": pl.lit("trace"), "Attempt": pl.lit(0, LOOSE["Attempt"])}


def former(keys: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """TraceId and RolloutId: names that were a trace's before it said more.

    Args:
        keys: KEYS.
        owners: OWNERS of their traces.
    """
    now = claim(keys.with_columns(**_UNNAMED), owners)["RolloutKey"]
    return keys.filter(keys["RolloutKey"] != now).select("TraceId", RolloutId="RolloutKey").unique(maintain_order=True)


def to_rebuild(moved: pl.DataFrame, built: pl.DataFrame) -> pl.DataFrame:
    """ROLLOUTS to build without the calls that have moved: nobody announced them, and they have fallen silent before.

    Args:
        moved: MOVED.
        built: BUILT of those rollouts.
    """
    texts = {name: pl.lit("") for name in ("GroupId", "TaskId", "Failure", "SpanId", "Detail")}
    return conform(
        moved.group_by(_ROLLOUT, maintain_order=True)
        .agg(pl.col("TraceId").last())
        .join(built.select(*_ROLLOUT, "Watermark"), on=_ROLLOUT, maintain_order="left")
        .with_columns(
            Mode=pl.lit(Mode.PRODUCTION.value),
            Verdict=pl.lit(Verdict.COMPLETE.value),
            Attempt=0,
            GroupSize=0,
            Calls=pl.lit(None, pl.UInt32),
            RowsRead=pl.lit(None, pl.UInt64),
            IngestedAt="Watermark",
            LastArrival="Watermark",
            **texts,
        ),
        ROLLOUTS,
    )


def loose(moved: pl.DataFrame) -> pl.DataFrame:
    """LOOSE rows that stand for the calls of MOVED: they are nobody's until they are built under their new name."""
    return conform(moved.with_columns(RolloutKey="TraceId", **_UNNAMED), LOOSE).unique(maintain_order=True)
