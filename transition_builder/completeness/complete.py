"""Completeness: the decision on when a rollout may be built. Invariant: nothing partial is ever complete.

A rollout ends with the runner's final mark. It is complete when, for its final attempt, as many of its
calls have arrived as the gateway answered, and a reward or a failure has arrived, or SQL or rules alone give the reward; without such a
number (no gateway), when nothing new has come for `quiet_seconds`. It waits for calls of earlier attempts as well, so that
each can be dropped by name. `incomplete_after_seconds` after the final root arrived the waiting ends: a final
attempt that lacks calls is incomplete; one that lacks only its reward is complete, and has no reward.
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

from spangrad import semconv
from spangrad.settings import BuilderSettings
from transition_builder.calls.forest import SpanForest
from transition_builder.completeness.resolve import NAMED, owners_at_hand, resolve
from transition_builder.dialects.conventions.gateway import IS_GATEWAY
from transition_builder.dialects.reading import attribute
from transition_builder.frames import Facts, Verdict, conform, empty
from transition_builder.schemas import ATTEMPT, COUNTS, NAMES, NAMING, OWNERS, PRESENCE, ROLLOUT, ROLLOUTS, ROOTS, SPAN


def facts(arrivals: pl.DataFrame, owners: pl.DataFrame | None = None) -> Facts:
    """Extract the facts of completeness from ARRIVALS, and OWNERS of the traces of those that name no rollout."""
    where = list(NAMES)
    evaluation_rows = arrivals.filter(pl.col("RowKind") != "span")
    scored = evaluation_rows.filter(attribute(semconv.EVALUATION_SCORE).is_not_null())
    evaluations = scored.group_by(where).agg(pl.struct("SpanId", "EventIndex").n_unique().cast(pl.UInt64).alias("Evaluations"))
    presence = (
        arrivals.group_by(where)
        .agg(pl.col("IngestedAt").max().alias("LastArrival"), Rows=pl.len())
        .join(evaluations, on=where, how="left")
        .with_columns(pl.col("Evaluations").fill_null(0))
    )
    counts = _counted(arrivals).group_by(where).agg(pl.col("SpanId").n_unique().alias("Calls"))
    known = owners_at_hand(arrivals, empty(OWNERS) if owners is None else owners)
    return Facts(_roots(arrivals), conform(presence, PRESENCE), conform(counts, COUNTS), known)


def _counted(arrivals: pl.DataFrame) -> pl.DataFrame:
    """Return spans of calls that a gateway counts for an attempt: those that name it, once where gateways are chained."""
    links = [*SPAN, "ParentSpanId"]
    spans = arrivals.select(*NAMING, *links, "RowKind", by_gateway=IS_GATEWAY).filter(pl.col("RowKind") == "span")
    spans = spans.unique(SPAN, keep="first", maintain_order=True)
    forest = SpanForest.of_spans(spans)
    by_gateway = spans["by_gateway"].to_numpy()
    outermost = forest.nearest(by_gateway)[forest.parent[:-1]] == forest.size
    return spans.filter(pl.Series(by_gateway & outermost) & NAMED)


def _roots(arrivals: pl.DataFrame) -> pl.DataFrame:
    """Return ROOTS among ARRIVALS: of each the first delivery that is final, else the first."""
    root = (pl.col("SpanName") == semconv.ROOT_SPAN_NAME) & (pl.col("RowKind") == "span") & NAMED
    return conform(
        arrivals.filter(root)
        .filter(attribute(semconv.ROLLOUT_FINAL).is_not_null())
        .with_columns(
            RolloutId="RolloutKey",
            GroupId=attribute(semconv.GROUP_ID).fill_null(""),
            GroupSize=attribute(semconv.GROUP_SIZE).cast(pl.UInt32, strict=False).fill_null(0),
            TaskId=attribute(semconv.TASK_ID).fill_null(""),
            Calls=attribute(semconv.ROLLOUT_CALLS).cast(pl.UInt32, strict=False),
            Final=(attribute(semconv.ROLLOUT_FINAL) == "true"),
            Failure=attribute(semconv.ROLLOUT_FAILURE).fill_null(""),
        )
        .sort(~pl.col("Final"), "IngestedAt", maintain_order=True)
        .unique([*ATTEMPT, *SPAN], keep="first", maintain_order=True),
        ROOTS,
    )


def decide(facts: Facts, now: datetime, spec: BuilderSettings) -> pl.DataFrame:
    """Decide on every rollout that has a final root: return ROLLOUTS, waiting ones included.

    A span counts once however often it was delivered; `now` is the store's clock, as are all arrival times.
    """
    # A worker that died may have written a root before another one wrote the root that ends the rollout.
    roots = facts.roots.sort("Attempt", ~pl.col("Final"), "IngestedAt").unique(ATTEMPT, keep="first", maintain_order=True)
    final = roots.filter("Final").unique(ROLLOUT, keep="last", maintain_order=True)
    last = final.select(*ROLLOUT, pl.col("Attempt").alias("final_attempt"))

    counts = resolve(facts.counts, facts.owners, final).group_by(ATTEMPT).agg(pl.col("Calls").sum().alias("arrived"))
    presence = resolve(facts.presence, facts.owners, final).join(last, on=ROLLOUT)
    seen = presence.group_by(ROLLOUT).agg(
        pl.col("Evaluations").filter(pl.col("Attempt") == pl.col("final_attempt")).sum().alias("evaluations"),
        pl.col("LastArrival").max().alias("last_arrival"),
        pl.col("Rows").sum(),
    )
    lacks = pl.col("Calls") > pl.col("arrived").fill_null(0)
    lacking = (
        roots.join(last, on=ROLLOUT)
        .join(counts, on=ATTEMPT, how="left")
        .group_by(ROLLOUT)
        .agg(
            pl.col("arrived").filter(pl.col("Attempt") == pl.col("final_attempt")).sum(),
            (lacks.fill_null(False) & (pl.col("Attempt") < pl.col("final_attempt"))).any().alias("earlier_lack"),
            ((pl.col("Attempt") <= pl.col("final_attempt")).sum() <= pl.col("final_attempt").first()).alias("roots_lack"),
        )
    )
    counted = pl.col("Calls").is_not_null()
    expires_at = pl.col("IngestedAt") + pl.duration(milliseconds=round(spec.incomplete_after_seconds * 1000))
    quiet_at = pl.max_horizontal("IngestedAt", "last_arrival") + pl.duration(milliseconds=round(spec.quiet_seconds * 1000))
    expired, quiet = expires_at <= now, quiet_at <= now
    changes_at = pl.when(counted | quiet).then(expires_at).otherwise(quiet_at)
    whole = pl.when(counted).then(pl.col("arrived") >= pl.col("Calls")).otherwise(quiet)
    concluded = (pl.col("Failure") != "") | (pl.col("evaluations").fill_null(0) > 0) | pl.lit(not spec.waits_for_reward)
    settled = concluded & ~pl.col("earlier_lack") & ~pl.col("roots_lack")
    missing = pl.format("{} of {} calls arrived within {} s", "arrived", "Calls", pl.lit(f"{spec.incomplete_after_seconds:g}")) + pl.when(
        pl.col("Failure") != ""
    ).then(pl.format("; the attempt failed: {}", "Failure")).otherwise(pl.lit(""))
    return conform(
        final.join(seen, on=ROLLOUT, how="left")
        .join(lacking, on=ROLLOUT, how="left")
        .with_columns(
            Verdict=pl.when(whole & (settled | expired))
            .then(pl.lit(Verdict.COMPLETE.value))
            .when(counted & expired)
            .then(pl.lit(Verdict.INCOMPLETE.value))
            .otherwise(pl.lit(Verdict.WAITING.value))
        )
        .with_columns(
            Detail=pl.when(pl.col("Verdict") == Verdict.INCOMPLETE.value).then(missing).otherwise(pl.lit("")),
            LastArrival=pl.max_horizontal("IngestedAt", "last_arrival"),
            ChangesAt=pl.when(pl.col("Verdict") == Verdict.WAITING.value).then(changes_at),
        ),
        ROLLOUTS,
    )
