"""When a rollout may be built.

In: the roots of its attempts, and how many of its calls and evaluations have arrived (`Facts`), all dated by
the store's clock. Out: one row a rollout with a verdict. Invariant: nothing partial is ever complete.

A rollout ends with the runner's final mark. It is complete when, for its final attempt, as many distinct gateway
spans have arrived as the gateway answered calls, and a reward or a failure has arrived; without such a number (no
gateway), when nothing new has come for `quiet_seconds`. Calls of earlier attempts are waited for as well, so that
each can be dropped by name. `incomplete_after_seconds` after the final root arrived the waiting ends: a final
attempt that lacks calls is incomplete; one that lacks only its reward is complete, and has no reward.
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

from spangrad.settings import BuilderSettings
from transition_builder.frames import ROLLOUTS, Facts, Verdict, conform
from transition_builder.resolve import resolve

_ROLLOUT = ["RunId", "RolloutId"]


def decide(facts: Facts, now: datetime, spec: BuilderSettings) -> pl.DataFrame:
    """Judge every rollout that has a final root.

    Args:
        facts: of the rollouts in question; a span counts once however often it was delivered.
        now: the store's clock, as are all arrival times.
        spec: the waiting times.

    Returns:
        ROLLOUTS, waiting ones included.
    """
    roots = facts.roots.sort("Attempt", "IngestedAt").unique([*_ROLLOUT, "Attempt"], keep="first", maintain_order=True)
    final = roots.filter("Final").unique(_ROLLOUT, keep="last", maintain_order=True)
    last = final.select(*_ROLLOUT, pl.col("Attempt").alias("final_attempt"))

    counts = resolve(facts.counts, facts.presence, final).group_by(*_ROLLOUT, "Attempt").agg(pl.col("Calls").sum().alias("arrived"))
    presence = resolve(facts.presence, facts.presence, final).join(last, on=_ROLLOUT)
    seen = presence.group_by(_ROLLOUT).agg(
        pl.col("Evaluations").filter(pl.col("Attempt") == pl.col("final_attempt")).sum().alias("evaluations"),
        pl.col("LastArrival").max().alias("last_arrival"),
    )
    lacking = (
        roots.join(last, on=_ROLLOUT)
        .join(counts, on=[*_ROLLOUT, "Attempt"], how="left")
        .with_columns(pl.col("arrived").fill_null(0))
        .with_columns(lacks=pl.col("Calls") > pl.col("arrived"))
        .group_by(_ROLLOUT)
        .agg(
            pl.col("arrived").filter(pl.col("Attempt") == pl.col("final_attempt")).sum(),
            (pl.col("lacks").fill_null(False) & (pl.col("Attempt") < pl.col("final_attempt"))).any().alias("earlier_lack"),
            ((pl.col("Attempt") <= pl.col("final_attempt")).sum() <= pl.col("final_attempt").first()).alias("roots_lack"),
        )
    )
    counted = pl.col("Calls").is_not_null()
    expired = now - pl.col("IngestedAt") >= pl.duration(milliseconds=round(spec.incomplete_after_seconds * 1000))
    quiet = now - pl.max_horizontal("IngestedAt", "last_arrival") >= pl.duration(milliseconds=round(spec.quiet_seconds * 1000))
    whole = pl.when(counted).then(pl.col("arrived") >= pl.col("Calls")).otherwise(quiet)
    concluded = (pl.col("Failure") != "") | (pl.col("evaluations") > 0)
    settled = concluded & ~pl.col("earlier_lack") & ~pl.col("roots_lack")
    missing = pl.format("{} of {} calls arrived within {} s", "arrived", "Calls", pl.lit(f"{spec.incomplete_after_seconds:g}")) + pl.when(
        pl.col("Failure") != ""
    ).then(pl.format("; the attempt failed: {}", "Failure")).otherwise(pl.lit(""))
    return conform(
        final.join(seen, on=_ROLLOUT, how="left")
        .with_columns(pl.col("evaluations").fill_null(0))
        .join(lacking, on=_ROLLOUT, how="left")
        .with_columns(
            Verdict=pl.when(whole & (settled | expired))
            .then(pl.lit(Verdict.COMPLETE.value))
            .when(counted & expired)
            .then(pl.lit(Verdict.INCOMPLETE.value))
            .otherwise(pl.lit(Verdict.WAITING.value))
        )
        .with_columns(Detail=pl.when(pl.col("Verdict") == Verdict.INCOMPLETE.value).then(missing).otherwise(pl.lit(""))),
        ROLLOUTS,
    )
