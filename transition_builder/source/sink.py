"""How conclusions get into the store: whole revisions, each once.

In: `Built`, and the rollouts that it is of. Out: rows of otel.rewards, otel.transitions, otel.drops and, last, otel.builds. Invariants: a
revision counts for readers when its row in otel.builds is there, and then all its rows are; what was concluded before is not written
again, and stays what it was.

Content is a hash of what was concluded of a rollout. The same content as that of its newest revision is no news: nothing is
written. Other content is the next revision. All rows carry it, and it is in their sorting keys: what a builder left that was killed
before it wrote to otel.builds is nobody's, and becomes part of a revision only when the same is concluded again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import polars as pl

from spangrad.types import transition_id
from transition_builder.frames import Built, conform
from transition_builder.schemas import BUILDS, DROPS, REWARDS, TRANSITIONS, Schema
from transition_builder.source.queries import Reader

_ROLLOUT = ["RunId", "RolloutId"]
_AFTER = {"BuildSpec", "Revision", "Content", "TransitionId"}
"""Columns that follow from what was concluded."""
_LONG = {"PromptIds", "ResponseIds", "Logprobs"}
"""What CallId names already: its length is enough."""
_BETWEEN, _WITHIN = "\x1f", "\x1e"


@dataclass(frozen=True, slots=True)
class Written:
    """What was new."""

    rows: Built
    builds: pl.DataFrame
    """BUILDS: the revisions that `rows` are of."""


class Sink:
    """Writes for one build specification."""

    def __init__(self, reader: Reader, builder: str = "") -> None:
        """Write in a builder's name; nothing is asked of the store yet."""
        self._reader = reader
        self._builder = builder

    def write(self, built: Built, rollouts: pl.DataFrame) -> Written:
        """Write a new revision of each rollout of which something else was concluded than before.

        Args:
            built: all that was concluded of the rollouts.
            rollouts: ROLLOUTS.

        Raises:
            StoreError: the store failed; what it holds of an unfinished write counts for nobody.
        """
        fresh = revise(built, rollouts, self._reader.built(rollouts["RolloutId"]), self._reader.spec, self._builder)
        for table, rows in (
            ("rewards", fresh.rows.rewards),
            ("transitions", fresh.rows.transitions),
            ("drops", fresh.rows.drops),
            ("builds", fresh.builds),
        ):
            if rows.height:
                self._reader.insert(table, rows)
        return fresh


def revise(built: Built, rollouts: pl.DataFrame, before: pl.DataFrame, spec: str, builder: str = "") -> Written:
    """What is to be written: whole rollouts of which something new was concluded, stamped with revision and content.

    Args:
        built: all that was concluded of some rollouts.
        rollouts: ROLLOUTS.
        before: BUILT, the newest revisions of them.
        spec: name of the build specification.
        builder: who writes.
    """
    known = before.select(*_ROLLOUT, newest="Revision", newest_content="Content")
    news = (
        contents(built)
        .join(known, on=_ROLLOUT, how="left")
        .filter(pl.col("newest_content").is_null() | (pl.col("newest_content") != pl.col("Content")))
        .select(*_ROLLOUT, "Content", Revision=(pl.col("newest").cast(pl.Int64) + 1).fill_null(0).cast(pl.UInt32))
    )
    transitions, drops, rewards = (
        _stamp(frame, news, schema) for frame, schema in ((built.transitions, TRANSITIONS), (built.drops, DROPS), (built.rewards, REWARDS))
    )
    later = transitions.filter(pl.col("Revision") > 0)
    if later.height:
        names = [transition_id(*row) for row in later.select("CallId", "BuildSpec", "Revision").iter_rows()]
        of_later = later.select(*_ROLLOUT, "CallId").with_columns(pl.Series("TransitionId", names, dtype=pl.String))
        transitions = transitions.update(of_later, on=[*_ROLLOUT, "CallId"])
    return Written(
        Built(transitions, drops, rewards),
        conform(_builds(rollouts.join(news, on=_ROLLOUT), transitions, drops, spec, builder), BUILDS),
    )


def _stamp(rows: pl.DataFrame, news: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """The rows of rollouts that are news."""
    if rows.is_empty():
        return conform(rows, schema)
    at = rows.select(_ROLLOUT).with_row_index("row").join(news, on=_ROLLOUT, maintain_order="left")
    whole = rows if at.height == rows.height else rows[at["row"]]
    return conform(whole.with_columns(at["Revision"], at["Content"]), schema)


def _builds(rollouts: pl.DataFrame, transitions: pl.DataFrame, drops: pl.DataFrame, spec: str, builder: str) -> pl.DataFrame:
    kept = transitions.group_by(_ROLLOUT).agg(Transitions=pl.len(), Rewards=pl.col("Rewards.Value").list.len().sum())
    dropped = drops.group_by(_ROLLOUT).agg(Drops=pl.len(), named=(pl.col("CallId") != "").sum())
    return (
        rollouts.join(kept, on=_ROLLOUT, how="left")
        .join(dropped, on=_ROLLOUT, how="left")
        .with_columns(pl.col("Transitions", "Drops", "Rewards", "named").fill_null(0))
        .with_columns(
            Calls=pl.col("Transitions") + pl.col("named"),
            BuildSpec=pl.lit(spec),
            Builder=pl.lit(builder),
            Watermark=pl.coalesce("LastArrival", "IngestedAt"),
            RowsRead=pl.col("RowsRead").fill_null(0),
        )
    )


def contents(built: Built) -> pl.DataFrame:
    """RunId, RolloutId and Content of each rollout that left something: the same for the same rows in any order."""
    texts = [_texts(built.transitions, TRANSITIONS, "t"), _texts(built.drops, DROPS, "d"), _texts(built.rewards, REWARDS, "r")]
    rows = pl.concat(texts)
    # As bytes: not all that a store holds is UTF-8.
    hashes = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) for text in rows["text"].cast(pl.Binary)]
    hashed = rows.select(_ROLLOUT).with_columns(pl.Series("hash", hashes, dtype=pl.UInt64))
    concluded = pl.concat([built.transitions.select(_ROLLOUT), built.drops.select(_ROLLOUT)]).unique()
    # A sum in UInt64 wraps around, which is what is wanted: each row counts, in whatever order.
    return hashed.group_by(_ROLLOUT).agg(Content=pl.col("hash").sum()).join(concluded, on=_ROLLOUT, how="semi").sort(_ROLLOUT)


def _texts(rows: pl.DataFrame, schema: Schema, kind: str) -> pl.DataFrame:
    """All of each row that decides, as one text."""
    told = [_told(name, dtype) for name, dtype in schema.items() if name not in _AFTER]
    return rows.select(*_ROLLOUT, text=pl.concat_str([pl.lit(kind), *told], separator=_BETWEEN))


def _told(name: str, dtype: pl.DataType) -> pl.Expr:
    value = pl.col(name)
    if name in _LONG:
        value = value.list.len()
    elif isinstance(dtype, pl.List):
        value = value.cast(pl.List(pl.String())).list.join(_WITHIN)
    elif isinstance(dtype, pl.Datetime):
        value = value.cast(pl.Int64)
    return value.cast(pl.String).fill_null("")
