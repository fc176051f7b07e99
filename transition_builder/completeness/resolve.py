"""Resolution of the rollout that each row belongs to.

In: rows keyed by the best name that each span itself has for its rollout (RolloutKey, RolloutKeySource).
Out: the same rows with RunId, RolloutId and Attempt filled in, and only those of the rollouts asked for.
Invariant: a row that names its rollout is believed; one that does not inherits from its trace, and only when
all other named rows of that trace name the same attempt of the same rollout.

All is decided on a few columns, one join on one key. Wide rows (attributes, token ids) are copied only when some of them are left out.
"""

from __future__ import annotations

import polars as pl

from transition_builder.schemas import ATTEMPT, ROLLOUT

NAMED = pl.col("RolloutKeySource") == "rollout"
_FACTS = ("RunId", "RolloutKey", "RolloutKeySource", "Attempt", "TraceId")


def resolve(rows: pl.DataFrame, witnesses: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Fill in RunId, RolloutId and Attempt.

    Args:
        rows: any frame with RunId, RolloutKey, RolloutKeySource, Attempt and TraceId.
        witnesses: a frame with the same columns that names the rollouts of traces; others than the rollouts of interest may be named.
        rollouts: RunId and RolloutId of the rollouts of interest; rows of others are left out.
    """
    runs = _runs(rollouts)
    keys = _named(rows, runs)
    if not rows.select(NAMED.all()).item():
        keys = _inherited(rows, keys, _owners(witnesses, runs))
    resolved = rows.with_columns(keys)
    ours = keys["RolloutId"].is_not_null()
    return resolved if ours.all() else resolved.filter(ours)


def shared(rows: pl.DataFrame, witnesses: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that `resolve` leaves out because their traces name several attempts; with the first ATTEMPT, if it is of interest.

    Ids begin with their time, so that the first stays the first, whatever comes.
    """
    nameless = rows.filter(~NAMED)
    if nameless.is_empty():
        return nameless.with_columns(RolloutId=pl.lit(""))
    keys = _keys_of_traces(witnesses, _runs(rollouts)).filter(pl.len().over("TraceId") > 1)
    first = keys.sort("RolloutId", "RunId", "Attempt").unique("TraceId", keep="first", maintain_order=True).filter("ours").drop("ours")
    return nameless.drop("RunId", "Attempt").join(first, on="TraceId", maintain_order="left")


def _runs(rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return all runs of each rollout of interest."""
    return rollouts.select(ROLLOUT).group_by("RolloutId").agg(pl.col("RunId").unique().alias("runs"))


def _named(rows: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return the ATTEMPT of rows that name a rollout of interest, nulls for others; a run that is not named is the rollout's only one."""
    keyed = rows.select(_FACTS).join(runs, left_on="RolloutKey", right_on="RolloutId", how="left", maintain_order="left")
    only = pl.when(pl.col("runs").list.len() == 1).then(pl.col("runs").list.first())
    run = pl.when(pl.col("RunId") == "").then(only).otherwise("RunId")
    return keyed.select(run.alias("run"), "RolloutKey", "Attempt", ours=NAMED & pl.col("runs").list.contains(run)).select(
        pl.when("ours").then(name).alias(key) for name, key in zip(("run", "RolloutKey", "Attempt"), ATTEMPT, strict=True)
    )


def _owners(witnesses: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return TraceId and ATTEMPT of traces in which all named rows are of one attempt."""
    return _keys_of_traces(witnesses, runs).filter((pl.len().over("TraceId") == 1) & pl.col("ours")).drop("ours")


def _keys_of_traces(witnesses: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return each trace's named attempts: TraceId, ATTEMPT, and `ours`: it is a rollout of interest."""
    keys = _named(witnesses, runs).with_columns(witnesses["TraceId"], ours=pl.lit(True)).filter(pl.col("RolloutId").is_not_null())
    others = witnesses.filter(NAMED & ~pl.col("RolloutKey").is_in(runs["RolloutId"].implode()))
    foreign = others.select("RunId", "Attempt", "TraceId", RolloutId="RolloutKey", ours=pl.lit(False))
    return pl.concat([keys, foreign.select(keys.columns)]).unique()


def _inherited(rows: pl.DataFrame, keys: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """Return the same keys, with those of the trace where a row names no rollout."""
    of_trace = rows.select("TraceId").join(owners, on="TraceId", how="left", maintain_order="left")
    named = rows.select(NAMED).to_series()
    return keys.select(pl.when(named).then(name).otherwise(of_trace[name]).alias(name) for name in ATTEMPT)
