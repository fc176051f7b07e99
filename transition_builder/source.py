"""What the builder reads of rollouts, and how little of it.

In: names of rollouts. Out: what has arrived of them, and the frames to build them from. Invariant: only the rollouts that are asked
for, by their keys.

A rollout's spans are read once, and judged and built from. Its calls, which hold the token ids, are read when it no longer waits.
A span that was delivered twice is dropped here: FINAL would sort whole granules for the few rows that are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import polars as pl

from spangrad.settings import Settings
from transition_builder import dialects, join, late
from transition_builder.dialects.gateway import IS_GATEWAY
from transition_builder.discovery import Discovery
from transition_builder.frames import (
    ANSWERS,
    ARRIVALS,
    CALLS,
    DROPPED,
    MICROSECONDS,
    ROLLOUTS,
    SPANS,
    Frames,
    Schema,
    concat,
    conform,
)
from transition_builder.reading import KEYS_A_QUERY, Reader, batches, constant
from transition_builder.resolve import NAMED
from transition_builder.rewards import responses, sql
from transition_builder.unclaimed import claim

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_DROPPED = """
SELECT DISTINCT TraceId, SpanId FROM otel.dropped_attributes
WHERE Signal = 'span' AND Attributes > 0 AND TraceId IN %(traces)s
"""
_TIMES = {
    "Timestamp": "toUnixTimestamp64Nano(Timestamp) AS Timestamp",
    "IngestedAt": "toUnixTimestamp64Micro(IngestedAt) AS IngestedAt",
}
_NAMED = "RolloutKeySource = 'rollout'"
_ANY = "true"
_RECORDED = "IdsSource != 'agent'"
"""Calls that the gateway recorded. The plain road's are built from the agents' own spans, which say what they are part of."""
_INHERITED_KEYS = "RolloutKey IN (SELECT RolloutKey FROM otel.trace_keys PREWHERE TraceId IN traces)"
_INHERITED = "RolloutKeySource != 'rollout' AND TraceId IN traces"
_SETTINGS = "max_threads = 1, output_format_arrow_low_cardinality_as_dictionary = 1, output_format_arrow_compression_method = 'lz4_frame'"
"""For reads of few granules. Packed even on loopback: every copy on the way costs more than LZ4 does."""
_ROW = ["RolloutKey", "Attempt", "Timestamp", "TraceId", "SpanId", "Choice"]
"""What is the same in all deliveries of a row: the sorting key of the tables."""


class Source:
    """Reads rollouts for one build specification."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Read with `client`; nothing is asked of the store yet."""
        self._settings = settings
        self._reader = Reader(client, settings)
        self._owners = Discovery(self._reader).owners

    def now(self) -> datetime:
        """The store's clock, that dates every arrival."""
        return self._reader.now()

    def arrivals(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        """What has arrived of the given rollouts (RolloutId, TraceId): ARRIVALS, a row each delivery."""
        found, asked = list[pl.DataFrame](), set[str]()
        for some in rollouts.iter_slices(KEYS_A_QUERY):
            traces = tuple(dict.fromkeys(some["TraceId"]))
            found.append(self._arrivals(tuple(dict.fromkeys(some["RolloutId"])), traces, _NAMED))
            asked.update(traces)
        named = (trace for frame in found for trace in frame.filter(NAMED)["TraceId"].unique(maintain_order=True))
        return concat([*found, *self._inherited(trace for trace in named if trace not in asked)], ARRIVALS)

    def frames(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame) -> Frames:
        """Everything that is known of the given rollouts (ROLLOUTS), given their ARRIVALS, perhaps among others'."""
        of_them = arrivals.filter(~NAMED | pl.col("RolloutKey").is_in(rollouts["RolloutId"].implode()))
        spans = _first_deliveries(of_them)
        inherited = spans.filter(~NAMED & IS_GATEWAY)["TraceId"]
        return self._frames(_read_of(rollouts, spans), conform(spans, SPANS), self._calls([*rollouts["RolloutId"], *inherited]))

    def claimed_frames(self, rollouts: pl.DataFrame, traces: Iterable[str]) -> Frames:
        """Everything that is known of rollouts without a root to claim their traces: each row is claimed by its own trace.

        Args:
            rollouts: ROLLOUTS.
            traces: of calls of theirs.
        """
        keys = tuple(dict.fromkeys(rollouts["RolloutId"]))
        found = [self._arrivals(some, (), _ANY) for some in batches(keys)]
        further = dict.fromkeys([*traces, *(trace for frame in found for trace in frame["TraceId"])])
        spans = _first_deliveries(concat([*found, *self._inherited(further)], ARRIVALS))
        calls = self._calls([*keys, *further])
        owners = self._owners([*spans["TraceId"], *calls["TraceId"]])
        once = spans.unique(["TraceId", "SpanId", "RowKind", "Choice"], maintain_order=True)
        return self._frames(_read_of(rollouts, spans), conform(claim(once, owners), SPANS), conform(claim(calls, owners), CALLS))

    def _inherited(self, traces: Iterable[str]) -> Iterator[pl.DataFrame]:
        """ARRIVALS of traces that do not name their rollouts."""
        return (self._arrivals((), some, _ANY) for some in batches(traces))

    def _arrivals(self, keys: Collection[str], traces: Collection[str], of_keys: str) -> pl.DataFrame:
        """ARRIVALS by their keys, as far as a condition holds, and those that inherit from traces."""
        constants, among, where = list[str](), list[str](), list[str]()
        if keys:
            constants.append(f"{constant(keys)} AS keys")
            among.append("RolloutKey IN keys")
            where.append(of_keys)
        if traces:
            constants.append(f"{constant(traces)} AS traces")
            among.append(_INHERITED_KEYS)
            where.append(_INHERITED)
        return self._read("rollout_spans", ARRIVALS, constants, " OR ".join(among), " OR ".join(where))

    def _calls(self, keys: Iterable[str]) -> pl.DataFrame:
        """CALLS by their keys."""
        schema = {**CALLS, "IngestedAt": MICROSECONDS}
        read = (self._read("calls", schema, [f"{constant(some)} AS keys"], "RolloutKey IN keys", _RECORDED) for some in batches(keys))
        return concat(map(_first_deliveries, read), CALLS)

    def _read(self, table: str, schema: Schema, constants: Iterable[str], among: str, where: str) -> pl.DataFrame:
        columns = ", ".join(_TIMES.get(name, name) for name in schema)
        then = f"({where}) AND {self._reader.arrived(table)}"
        return self._reader.frame(
            f"WITH {', '.join(constants)} SELECT {columns} FROM otel.{table} PREWHERE {among} WHERE {then} SETTINGS {_SETTINGS}"
        )

    def _frames(self, rollouts: pl.DataFrame, spans: pl.DataFrame, calls: pl.DataFrame) -> Frames:
        # In one piece: each step of a build is the cheaper for it.
        spans, calls = spans.rechunk(), calls.rechunk()
        answers = self._answers(spans, calls)
        store = (self._reader.client, self._reader.url, self._settings.builder)
        given = sql.read(*store, rollouts, spans, calls)
        return Frames(rollouts, spans, calls, answers, given, responses.read(*store, spans, answers), self._dropped(spans))

    def _dropped(self, spans: pl.DataFrame) -> pl.DataFrame:
        """DROPPED among spans."""
        return concat((self._reader.frame(_DROPPED, {"traces": some}) for some in batches(spans["TraceId"])), DROPPED)

    def _answers(self, spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
        """What openai-level spans without a gateway call below them hold: their `output.value` is too long for the lean table."""
        wanted = join.uncovered(spans, calls)
        found = list[pl.DataFrame]()
        for some in wanted.sort("Timestamp").iter_slices(KEYS_A_QUERY):
            times = some["Timestamp"].cast(pl.Int64)
            parameters = {
                "services": tuple(some["ServiceName"].unique()),
                "names": tuple(some["SpanName"].unique()),
                "first": times[0],
                "last": times[-1],
                "traces": tuple(some["TraceId"].unique()),
                "spans": tuple(some["SpanId"]),
            }
            found.append(self._reader.frame(dialects.ANSWER_SQL, parameters).join(some, on=["TraceId", "SpanId"], how="semi"))
        return concat(found, ANSWERS)


def _read_of(rollouts: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """ROLLOUTS with the number of rows that were read of them."""
    counted = late.count(late.tally(rows), rollouts).rename({"Rows": "RowsRead"})
    return conform(rollouts.drop("RowsRead").join(counted, on=["RunId", "RolloutId"], how="left", maintain_order="left"), ROLLOUTS)


def _first_deliveries(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows without those that came again."""
    if rows.select("TraceId", "SpanId", "Choice").is_unique().all():
        return rows
    return rows.sort("IngestedAt", maintain_order=True).unique(_ROW, keep="first", maintain_order=True)
