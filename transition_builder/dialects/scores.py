"""Rewards in a span's own attributes, by name.

Invariant: a value that is no finite number is never a score of 0: it is null, and the rollout has no score from it (see `rewards`).

Ours are `spangrad.reward` and `spangrad.reward.NAME` (`spangrad.reward.role` names the role of all of them); OpenTelemetry's
`gen_ai.evaluation.*` count as attributes too, not as events alone; Agent Lightning's are `agentlightning.reward.N.name` and `.value`, and
what its early versions kept of AgentOps; Arize's `eval.NAME.score`.
"""

from __future__ import annotations

import polars as pl

from spangrad import semconv
from transition_builder.dialects.conventions import agent_lightning
from transition_builder.dialects.reading import SCORES, AttributeColumns

_PRIMARY = "primary"
"""Agent Lightning's name of a reward without a name."""
_KEYS = rf"^({semconv.REWARD}(\..+)?|{semconv.EVALUATION_SCORE}|agentlightning\.reward\.\d+\.value|eval\..+\.score)$".replace(
    "spangrad.", r"spangrad\."
)
_OLD = r"^(agentops\.(task|entity)\.output|reward)$"


def scores(attributes: AttributeColumns, spans: pl.DataFrame) -> pl.DataFrame | None:
    """Return the scores of spans that have any: row, Scores. None where no span has. `spans` has their SpanName."""
    entries = attributes.entries(_KEYS).filter(pl.col("key") != semconv.REWARD_ROLE)
    frames = [_named(entries, attributes)] if entries.height else []
    old = attributes.entries(_OLD)
    if old.height:
        value = agent_lightning.old_reward(attributes)
        beside = attributes.frame(spans.select("SpanName"))
        rows = beside.select(row=pl.int_range(pl.len(), dtype=pl.Int64), value=value).filter(pl.col("value").is_not_null())
        frames.append(rows.select("row", at=pl.lit(0, pl.Int64), Name=pl.lit(semconv.REWARD_NAME), Value=_number()))
    if not frames:
        return None
    given = pl.concat(frames).sort("row", "at", "Name", maintain_order=True)
    return given.group_by("row", maintain_order=True).agg(pl.struct("Name", "Value").alias("Scores")).cast({"Scores": SCORES})


def _named(entries: pl.DataFrame, attributes: AttributeColumns) -> pl.DataFrame:
    """Return scores with their names: row, at (place among several), Name, Value."""
    key = pl.col("key")
    entry = key.str.extract(r"^agentlightning\.reward\.(\d+)\.value$")
    names = attributes.entries(r"^agentlightning\.reward\.\d+\.name$").select(
        "row", place=pl.col("key").str.extract(r"\.(\d+)\.name$"), given_name="value"
    )
    evaluations = (
        attributes.entries(f"^{semconv.EVALUATION_NAME}$")
        .select("row", evaluation="value")
        .unique("row", keep="first", maintain_order=True)
    )
    own = pl.coalesce(key.str.extract(rf"^{semconv.REWARD}\.(.+)$"), key.str.extract(r"^eval\.(.+)\.score$"))
    given_name = pl.col("given_name").replace(["", _PRIMARY], [None, None])
    return (
        entries.with_columns(place=entry)
        .join(names.unique(["row", "place"], keep="first", maintain_order=True), on=["row", "place"], how="left")
        .join(evaluations, on="row", how="left")
        .select(
            "row",
            at=pl.col("place").cast(pl.Int64, strict=False).fill_null(0),
            Name=pl.coalesce(
                own,
                given_name,
                pl.when(key == semconv.EVALUATION_SCORE).then(pl.col("evaluation").replace("", None)),
                pl.lit(semconv.REWARD_NAME),
            ),
            Value=_number(),
        )
    )


def _number() -> pl.Expr:
    value = pl.col("value").cast(pl.Float64, strict=False)
    return pl.when(value.is_finite()).then(value)
