"""Assignment of rows to rollouts: the one rule for spans, calls and evaluations (docs/concepts/spans.md).

In: rows keyed by the best name that each span itself has for its rollout (RolloutKey, RolloutKeySource), and OWNERS of their traces.
Out: the rollout and attempt of each. Invariants: a row that names its rollout is believed; one that does not belongs to the only attempt
that spans of its trace name, whichever rollouts are built together; where they name several, it belongs to none of them, and a call is
dropped to the first. The view `spangrad.rollout_spans` gives the same.

All is decided on a few columns, one join on one key. Wide rows (attributes, token ids) are copied only when some of them are left out.
"""

from __future__ import annotations

import polars as pl

from transition_builder.frames import conform
from transition_builder.schemas import ATTEMPT, NAMES, OWNERS, ROLLOUT

_OF_NAMED = "rollout"
"""Value of RolloutKeySource of a row that names its rollout."""
NAMED = pl.col("RolloutKeySource") == _OF_NAMED
_SEVERAL = 2
"""Value of Attempts that stands for two and more."""


def _all_named(rows: pl.DataFrame) -> bool:
    """Return whether every row names its rollout."""
    # Compared as a series: the expression would be a query plan of its own.
    return (rows["RolloutKeySource"] == _OF_NAMED).all()


def owners_of(spans: pl.DataFrame) -> pl.DataFrame:
    """Return OWNERS of the traces of spans, as spangrad_internal.trace_owners does for all that have arrived.

    Spans have the columns of NAMES, Mode, SessionId and ConversationId.
    """
    name, attempt = (pl.col(column).filter(NAMED) for column in ("RolloutKey", "Attempt"))
    known = (_text(column).max() for column in ("SessionId", "ConversationId"))
    return conform(
        spans.filter(pl.col("TraceId") != "")
        .group_by("TraceId", maintain_order=True)
        .agg(
            pl.col("RunId", "Mode").max(),
            RolloutId=pl.coalesce(name.min(), *known, pl.lit("")),
            Attempts=pl.struct(name, attempt).n_unique().clip(upper_bound=_SEVERAL),
            Attempt=attempt.min().fill_null(0),
        ),
        OWNERS,
    )


def owners_at_hand(rows: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """Return OWNERS that take the spans at hand into account: the store may not show all of an insert yet.

    Rows have the columns of NAMES, and RowKind; `known` are the OWNERS that the store knows.
    """
    if _all_named(rows):
        return known
    texts = {name: pl.lit("") for name in ("Mode", "SessionId", "ConversationId")}
    at_hand = owners_of(rows.filter(NAMED & (pl.col("RowKind") == "span")).select(list(NAMES)).with_columns(**texts))
    both = pl.concat([known, at_hand]).sort("Attempts", descending=True, maintain_order=True)
    return both.unique("TraceId", keep="first", maintain_order=True)


def claim(rows: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """Make every row name its rollout, except for rows that belong to none: those name the one that their calls are dropped to.

    Args:
        rows: any frame with RunId, Mode, RolloutKey, RolloutKeySource, Attempt and TraceId.
        owners: OWNERS of their traces.

    Returns:
        The rows with those columns filled in; and Ours: some span named the rollout as a spangrad rollout.
    """
    keys = _assigned(rows, owners)
    alone = keys["Attempts"] < _SEVERAL
    return rows.with_columns(
        keys["RunId"],
        keys["Mode"],
        keys["Attempt"],
        RolloutKey=keys["RolloutId"],
        RolloutKeySource=pl.when(alone).then(pl.lit(_OF_NAMED)).otherwise("RolloutKeySource"),
        Ours=keys["Attempts"] > 0,
    )


def resolve(rows: pl.DataFrame, owners: pl.DataFrame, rollouts: pl.DataFrame, *, shared: bool = False) -> pl.DataFrame:
    """Return the rows of attempts of some rollouts, with RunId, RolloutId and Attempt filled in.

    Args:
        rows: any frame with the columns of NAMES.
        owners: OWNERS of the traces of those that name no rollout.
        rollouts: RunId and RolloutId of the rollouts of interest; rows of others are left out.
        shared: return instead the rows that belong to no attempt, because their traces name several, with the first of those. Ids begin
            with their time, so that the first stays the first, whatever comes.
    """
    if _all_named(rows):
        rows = rows.clear() if shared else rows
        keys = pl.DataFrame([rows["RunId"], rows["RolloutKey"].alias("RolloutId"), rows["Attempt"]])
    else:
        keys = _assigned(rows, owners)
        keys = keys.with_columns(RolloutId=pl.when(pl.col("Attempts") == (_SEVERAL if shared else 1)).then("RolloutId"))
    keys = _of_interest(keys, rollouts)
    resolved = rows.with_columns(keys)
    return resolved.filter(pl.col("RolloutId").is_not_null()) if keys["RolloutId"].has_nulls() else resolved


def _assigned(rows: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """Return RunId, RolloutId, Attempt and Attempts (1, or of a nameless row those of its trace) of each row; Mode where rows have it."""
    facts = [name for name in ("RunId", "Mode") if name in rows.columns]
    of_trace = owners.rename({name: f"trace_{name}" for name in owners.columns if name != "TraceId"})
    keyed = rows.select(*dict.fromkeys([*NAMES, *facts])).join(of_trace, on="TraceId", how="left", maintain_order="left")
    return keyed.select(
        *(
            pl.when(NAMED & (pl.col(name) != "")).then(name).otherwise(pl.coalesce(_text(f"trace_{name}"), name)).alias(name)
            for name in facts
        ),
        RolloutId=pl.when(NAMED).then("RolloutKey").otherwise(pl.coalesce(_text("trace_RolloutId"), "RolloutKey")),
        Attempt=pl.when(NAMED).then("Attempt").otherwise(pl.col("trace_Attempt").fill_null(0)),
        Attempts=pl.when(NAMED).then(1).otherwise(pl.col("trace_Attempts").fill_null(0)),
    )


def _of_interest(keys: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return the ATTEMPT of rows of rollouts of interest, nulls for others; a run that is not named is the rollout's only one."""
    if (keys["RunId"] != "").all():
        ours = keys[ROLLOUT].to_struct().is_in(rollouts[ROLLOUT].to_struct().implode())
        return keys[ATTEMPT] if ours.all() else keys.select(pl.when(ours).then(name).alias(name) for name in ATTEMPT)
    runs = rollouts[ROLLOUT].group_by("RolloutId").agg(pl.col("RunId").unique().alias("runs"))
    keyed = keys.join(runs, on="RolloutId", how="left", maintain_order="left")
    only = pl.when(pl.col("runs").list.len() == 1).then(pl.col("runs").list.first())
    run = pl.when(pl.col("RunId") == "").then(only).otherwise("RunId")
    ours = pl.col("runs").list.contains(run)
    return keyed.select(pl.when(ours).then(run if name == "RunId" else pl.col(name)).alias(name) for name in ATTEMPT)


def _text(name: str) -> pl.Expr:
    return pl.col(name).replace("", None)
