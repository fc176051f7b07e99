"""Writes of conclusions to the store: whole revisions, each once.

Invariants: a revision counts for readers when its row in builds is there, and then all its rows are; unchanged conclusions are not written
again.

Content is a hash of the conclusions of a rollout. Where it equals that of the newest revision, nothing is
written. Other content is the next revision. All rows carry it, and it is in their sorting keys: rows of a builder that was killed
before it wrote to spangrad_internal.builds belong to no revision, and become part of one only when the same is concluded again.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property

import polars as pl

from spangrad.types import transition_id
from transition_builder.frames import Built, concat, conform
from transition_builder.schemas import BUILDS, DROPS, NANOSECONDS, REWARDS, ROLLOUT, TOOL_CALLS, TRANSITIONS, Schema
from transition_builder.source.known_builds import KnownBuilds
from transition_builder.source.queries import StoreReader

_TABLES = {"rewards": REWARDS, "transitions": TRANSITIONS, "drops": DROPS, "tool_calls": TOOL_CALLS}
"""Tables of conclusions, which are written at once."""
_KINDS = {"rewards": "r", "transitions": "t", "drops": "d", "tool_calls": "c"}
_AFTER = {"BuildSpec", "Revision", "Content", "TransitionId"}
"""Columns that follow from the conclusions."""
_LONG = {"PromptIds", "ResponseIds", "Logprobs"}
"""Columns that CallId determines: their length is enough."""
_TEXTS = dict.fromkeys([*ROLLOUT, "text"], pl.String())
_BETWEEN, _WITHIN = "\x1f", "\x1e"


@dataclass(frozen=True)
class Written:
    """Rows of new revisions."""

    rows: Built
    rollouts: pl.DataFrame
    """ROLLOUTS of `rows`, with Revision and Content."""
    spec: str
    builder: str

    @cached_property
    def builds(self) -> pl.DataFrame:
        """Return BUILDS: revisions of `rows`."""
        return conform(_builds(self.rollouts, self.rows, self.spec, self.builder), BUILDS)


class Sink:
    """Writes for one build specification."""

    def __init__(self, reader: StoreReader, known: KnownBuilds, builder: str = "") -> None:
        """Write in a builder's name what `known` does not have yet; this does not query the store yet."""
        self._reader = reader
        self._known = known
        self._builder = builder
        self._inserts = ThreadPoolExecutor(len(_TABLES), "insert")

    def write(self, built: Built, rollouts: pl.DataFrame) -> Written:
        """Write a new revision of each rollout whose conclusions changed.

        Args:
            built: all conclusions of the rollouts.
            rollouts: ROLLOUTS.

        Raises:
            StoreError: the store failed; readers ignore the rows of an unfinished write.
        """
        new_rows = revise(built, rollouts, self._known.of(rollouts["RolloutId"]), self._reader.spec, self._builder)
        filled = [(table, rows) for table in _TABLES if (rows := getattr(new_rows.rows, table)).height]
        inserts = [self._inserts.submit(self._reader.insert, table, rows) for table, rows in filled]
        builds = new_rows.builds  # computed beside the inserts
        for insert in inserts:
            insert.result()
        if builds.height:
            self._reader.insert("builds", builds)
        self._known.forget(rollouts["RolloutId"])
        return new_rows


def revise(built: Built, rollouts: pl.DataFrame, before: pl.DataFrame, spec: str, builder: str = "") -> Written:
    """Return what to write: whole rollouts whose conclusions changed, stamped with revision and content.

    Args:
        built: all conclusions of some rollouts.
        rollouts: ROLLOUTS.
        before: BUILT, the newest revisions of them.
        spec: name of the build specification.
        builder: name of the builder that writes.
    """
    known = before.select(*ROLLOUT, newest="Revision", newest_content="Content")
    news = (
        contents(built)
        .join(known, on=ROLLOUT, how="left")
        .filter(pl.col("newest_content").is_null() | (pl.col("newest_content") != pl.col("Content")))
        .select(*ROLLOUT, "Content", Revision=(pl.col("newest").cast(pl.Int64) + 1).fill_null(0).cast(pl.UInt32))
    )
    rows = replace(built, **{table: _stamp(getattr(built, table), news, schema) for table, schema in _TABLES.items()})
    later = rows.transitions.filter(pl.col("Revision") > 0)
    if later.height:
        names = [transition_id(*row) for row in later[["CallId", "BuildSpec", "Revision"]].iter_rows()]
        of_later = later[[*ROLLOUT, "CallId"]].with_columns(pl.Series("TransitionId", names, dtype=pl.String))
        rows = replace(rows, transitions=rows.transitions.update(of_later, on=[*ROLLOUT, "CallId"]))
    return Written(rows, rollouts.join(news, on=ROLLOUT), spec, builder)


def _stamp(rows: pl.DataFrame, news: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Return the rows of rollouts in `news`, stamped with their revision and content."""
    if rows.is_empty():
        return conform(rows, schema)
    at = rows[ROLLOUT].with_row_index("row").join(news, on=ROLLOUT, maintain_order="left")
    whole = rows if at.height == rows.height else rows[at["row"]]
    return conform(whole.with_columns(at["Revision"], at["Content"]), schema)


def _builds(rollouts: pl.DataFrame, rows: Built, spec: str, builder: str) -> pl.DataFrame:
    kept = rows.transitions.group_by(ROLLOUT).agg(
        Transitions=pl.len(),
        Rewards=pl.col("Rewards.Value").list.len().sum(),
        InputTokens=pl.col("PromptIds").list.len().sum(),
        OutputTokens=pl.col("ResponseIds").list.len().sum(),
        AgentNames=pl.col("AgentName").unique().sort(),
        Models=pl.col("Model").unique().sort(),
        PolicyVersions=pl.col("Versions.Version").list.explode().unique().sort(),
    )
    dropped = rows.drops.group_by(ROLLOUT).agg(Drops=pl.len(), named=(pl.col("CallId") != "").sum())
    ran = rows.tool_calls.group_by(ROLLOUT).agg(ToolCalls=pl.len(), FailedToolCalls=pl.col("Failed").sum())
    totals = (
        rows.rewards.group_by(*ROLLOUT, "Name", "Role")
        .agg(pl.col("Value").sum())
        .sort(*ROLLOUT, "Name", "Role")
        .group_by(ROLLOUT, maintain_order=True)
        .agg(pl.col("Name", "Role", "Value").name.prefix("RewardTotals."))
    )
    counts = ["Transitions", "Drops", "Rewards", "named", "InputTokens", "OutputTokens", "ToolCalls", "FailedToolCalls"]
    lists = [name for name, dtype in BUILDS.items() if isinstance(dtype, pl.List)]
    for facts in (kept, dropped, ran, totals, rows.times):
        rollouts = rollouts.join(facts, on=ROLLOUT, how="left")
    return rollouts.with_columns(
        pl.col(counts).fill_null(0),
        pl.col(lists).fill_null([]),
        pl.col("Attempts").fill_null(1),
        pl.col("StartedAt").fill_null(pl.lit(0).cast(NANOSECONDS)),
        pl.col("Seconds").fill_null(0.0),
    ).with_columns(
        Calls=pl.col("Transitions") + pl.col("named"),
        RowsRead=pl.col("Rows").fill_null(0),
        BuildSpec=pl.lit(spec),
        Builder=pl.lit(builder),
        Watermark=pl.coalesce("LastArrival", "IngestedAt"),
    )


def contents(built: Built) -> pl.DataFrame:
    """Return RunId, RolloutId and Content of each rollout with conclusions; Content is independent of the order of rows."""
    filled = {table: rows for table in _TABLES if (rows := getattr(built, table)).height}
    rows = concat((rows.select(*ROLLOUT, text=_text_of(table)) for table, rows in filled.items()), _TEXTS)
    # As bytes: a store may hold text that is not UTF-8.
    hashes = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) for text in rows["text"].cast(pl.Binary)]
    hashed = rows[ROLLOUT].with_columns(pl.Series("hash", hashes, dtype=pl.UInt64))
    concluded = pl.concat([built.transitions[ROLLOUT], built.drops[ROLLOUT]])
    # A sum in UInt64 wraps around, as intended: each row counts, in any order.
    return hashed.group_by(ROLLOUT).agg(Content=pl.col("hash").sum()).join(concluded, on=ROLLOUT, how="semi").sort(ROLLOUT)


@cache
def _text_of(table: str) -> pl.Expr:
    """Return the deciding columns of a row of a table, joined as one text."""
    columns = [_as_text(name, dtype) for name, dtype in _TABLES[table].items() if name not in _AFTER]
    return pl.concat_str([pl.lit(_KINDS[table]), *columns], separator=_BETWEEN)


def _as_text(name: str, dtype: pl.DataType) -> pl.Expr:
    value = pl.col(name)
    if name in _LONG:
        value = value.list.len()
    elif isinstance(dtype, pl.List):
        value = value.cast(pl.List(pl.String())).list.join(_WITHIN)
    elif isinstance(dtype, pl.Datetime):
        value = value.cast(pl.Int64)
    return value.cast(pl.String).fill_null("")
