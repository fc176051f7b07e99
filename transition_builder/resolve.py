"""Which rollout a row belongs to.

In: rows keyed by the best name that each span itself gives for its rollout (RolloutKey, RolloutKeySource).
Out: the same rows with RunId, RolloutId and Attempt filled in, and only those of the rollouts asked for.
Invariant: a row that names its rollout is believed; one that does not inherits from its trace, and only when
everybody else in that trace names the same attempt of the same rollout.
"""

from __future__ import annotations

import polars as pl

NAMED = pl.col("RolloutKeySource") == "rollout"
KEY = ("RunId", "RolloutId", "Attempt")


def resolve(rows: pl.DataFrame, witnesses: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Fill in RunId, RolloutId and Attempt.

    Args:
        rows: any frame with RunId, RolloutKey, RolloutKeySource, Attempt and TraceId.
        witnesses: a frame with the same columns that says whose traces are whose.
        rollouts: RunId and RolloutId of the rollouts of interest; rows of others are left out.
    """
    wanted = rollouts.select("RunId", "RolloutId").unique()
    owners = (
        _named(witnesses, wanted)
        .select("TraceId", *KEY)
        .unique()
        .group_by("TraceId")
        .agg(*(pl.col(name).first() for name in KEY), pl.len().alias("owners"))
        .filter(pl.col("owners") == 1)
        .drop("owners")
    )
    inherited = rows.filter(~NAMED).drop("RunId", "Attempt").join(owners, on="TraceId")
    return pl.concat([_named(rows, wanted), inherited], how="diagonal")


def _named(rows: pl.DataFrame, wanted: pl.DataFrame) -> pl.DataFrame:
    """Rows that name their rollout; a run that they do not name is that of the rollout's root, when there is only one."""
    only_run = (
        wanted.group_by("RolloutId").agg(pl.col("RunId").first().alias("root_run"), pl.len().alias("runs")).filter(pl.col("runs") == 1)
    )
    return (
        rows.filter(NAMED)
        .with_columns(RolloutId=pl.col("RolloutKey"))
        .join(only_run.drop("runs"), on="RolloutId", how="left")
        .with_columns(RunId=pl.when(pl.col("RunId") == "").then(pl.col("root_run")).otherwise("RunId"))
        .drop("root_run")
        .join(wanted, on=["RunId", "RolloutId"], how="semi")
    )
