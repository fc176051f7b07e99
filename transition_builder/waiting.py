"""Rollouts that wait: when each is looked at again, which are built first, and how long they have waited.

Invariant: what a runner announced of training, validation and its baselines comes before production and trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import polars as pl

from spangrad.settings import BuilderSettings
from spangrad.types import Mode
from transition_builder.completeness.resolve import NAMED
from transition_builder.schemas import MICROSECONDS

BEHIND = frozenset({Mode.PRODUCTION, Mode.TRIAL})
"""Modes whose rollouts are built in slices, behind all others."""
_RECHECK_FRACTION = 0.05
"""Fraction of its waiting time after which a waiting rollout is checked again where nothing tells when its state changes."""
_ANNOUNCED = NAMED & (pl.col("RunId") != "") & (pl.col("Mode") != "")
IS_BEHIND = pl.col("Mode").is_in([mode.value for mode in BEHIND])


def due(waiting: pl.DataFrame, now: datetime) -> pl.DataFrame:
    """Return the rows with DueAt and IngestedAt that are to be checked now, all that never were among them."""
    if waiting.is_empty():
        return waiting
    # What arrived during this pass may be dated after its begin.
    return waiting.filter((pl.col("DueAt") <= pl.col("IngestedAt")) | (now >= pl.col("DueAt")))


def to_conclude(pending: pl.DataFrame, ending: pl.DataFrame, now: datetime) -> pl.DataFrame:
    """Return RolloutId and TraceId of what is due of training, validation and their baselines, once rollouts that end are pending as well.

    Args:
        pending: PENDING with DueAt.
        ending: roots that have just arrived, with Mode.
        now: the store's clock.
    """
    return pl.concat([rows.filter(~IS_BEHIND)[["RolloutId", "TraceId"]] for rows in (due(pending, now), ending)])


def checked(waiting: pl.DataFrame, rows: pl.DataFrame, key: list[str], now: datetime) -> pl.DataFrame:
    """Return the waiting rows, those of the same keys as `rows` due later.

    Where `rows` have a time ChangesAt, their age decides then, and until then only what arrives (`touched`, `continued`).
    As some of it may be overlooked for a while, they are due as well when they have waited twice as long.
    """
    if rows.is_empty() or waiting.is_empty():
        return waiting
    waited = pl.lit(now) - pl.col("IngestedAt")
    later = pl.when(pl.col("Next").is_null()).then(now + waited * _RECHECK_FRACTION).otherwise(pl.min_horizontal("Next", now + waited))
    next_due = rows.select(*key, Next=pl.col("ChangesAt") if "ChangesAt" in rows.columns else None, Checked=True).unique(key)
    joined = waiting.join(next_due, on=key, how="left", maintain_order="left")
    return joined.with_columns(DueAt=pl.when("Checked").then(later).otherwise("DueAt").cast(MICROSECONDS)).select(waiting.columns)


def touched(pending: pl.DataFrame, arrived: pl.DataFrame) -> pl.DataFrame:
    """Return PENDING with DueAt, where those of which something arrived are due; `arrived` is ARRIVED."""
    if pending.is_empty() or arrived.is_empty():
        return pending
    keys = arrived.select(pl.col("RolloutKey", "TraceId").unique().implode())
    now_due = pl.col("RolloutId").is_in(keys["RolloutKey"]) | pl.col("TraceId").is_in(keys["TraceId"])
    return pending.with_columns(DueAt=pl.when(now_due).then("IngestedAt").otherwise("DueAt"))


def continued(rootless: pl.DataFrame, arrived: pl.DataFrame, silent_at: datetime) -> pl.DataFrame:
    """Return ROOTLESS with DueAt, where those of whose trace something arrived are due when it may be silent; `arrived` is ARRIVED."""
    if rootless.is_empty() or arrived.is_empty():
        return rootless
    of_trace = pl.col("TraceId").is_in(arrived["TraceId"].unique().implode())
    return rootless.with_columns(DueAt=pl.when(of_trace).then(pl.min_horizontal("DueAt", pl.lit(silent_at))).otherwise("DueAt"))


def silence(spec: BuilderSettings, quiet_seconds: float) -> pl.Expr:
    """Return the least silence of a row's rollout without a root, as a duration."""
    seconds = pl.when(_ANNOUNCED).then(spec.incomplete_after_seconds).otherwise(quiet_seconds)
    return pl.duration(milliseconds=seconds * 1000)


def seconds_until_due(rows: pl.DataFrame, now: datetime, least: pl.Expr | None = None) -> float:
    """Return the time until the first of the rows is due; infinite where there is none.

    Args:
        rows: rows with IngestedAt and DueAt.
        now: the store's clock.
        least: least age, as a duration. None: any.
    """
    if rows.is_empty():
        return float("inf")
    due_at = pl.col("DueAt") if least is None else pl.max_horizontal(pl.col("IngestedAt") + least, "DueAt")
    return (rows.select(due_at.min()).item() - now) / timedelta(seconds=1)


def oldest(*waiting: pl.DataFrame) -> datetime | None:
    """Return the time at which the oldest of rows with IngestedAt arrived. None: there is no row."""
    return pl.concat([rows["IngestedAt"] for rows in waiting]).min()  # type: ignore[return-value]


def lags(pending: pl.DataFrame, silent: pl.DataFrame, now: datetime, modes: Sequence[str]) -> Mapping[str, tuple[float, int]]:
    """Return, by mode, the age in seconds of the oldest rollout that ended and is not built, and the number of those.

    Args:
        pending: PENDING.
        silent: ROOTLESS that have been silent for long enough; without a mode they are production's.
        now: the store's clock.
        modes: all modes.
    """
    named = pl.concat(
        [
            pending.select("Mode", "IngestedAt", Rollout="RolloutId"),
            silent.select(pl.col("Mode").replace("", Mode.PRODUCTION.value), "IngestedAt", Rollout="RolloutKey"),
        ]
    )
    of_modes = named.group_by("Mode").agg(pl.col("IngestedAt").min(), pl.col("Rollout").n_unique())
    waiting = {mode: ((now - oldest) / timedelta(seconds=1), count) for mode, oldest, count in of_modes.iter_rows()}
    return {mode: waiting.get(mode, (0.0, 0)) for mode in modes}
