"""Reads of rollouts, by their keys and as few rows as possible.

A rollout's spans are read once, for the decision and for the build. Its calls, which hold the token ids, are read when it no longer waits;
of few rollouts, as online, already while they are decided on. A span that was delivered twice is dropped here: FINAL would sort whole
granules for the few rows that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from spangrad.settings import Settings
from spangrad.store.clickhouse import KEYS_A_STATEMENT, constant
from transition_builder import batch_sizes
from transition_builder.calls.uncovered import uncovered
from transition_builder.completeness.resolve import NAMED, claim
from transition_builder.dialects import answers
from transition_builder.dialects.conventions.gateway import IS_GATEWAY
from transition_builder.frames import Frames, concat, conform
from transition_builder.rewards import responses, sql, tool_records
from transition_builder.schemas import (
    ANSWERS,
    ARRIVALS,
    CALLS,
    DROPPED,
    MICROSECONDS,
    ROLLOUT,
    ROLLOUTS,
    SPAN,
    SPANS,
    Schema,
)
from transition_builder.source import late_spans
from transition_builder.source.discovery import Discovery
from transition_builder.source.queries import StoreReader, batches, span_constants

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_BY_TRACE = """
WITH {traces} AS traces
SELECT TraceId, SpanId, '' AS RolloutKey FROM spangrad_internal.dropped_attributes WHERE Signal = 'span' AND Attributes > 0
    AND TraceId IN traces
UNION ALL
SELECT '', '', RolloutKey FROM spangrad_internal.trace_keys PREWHERE TraceId IN traces
SETTINGS max_threads = 1
"""
"""Query by trace: spans with withheld attributes, and the keys of rows that do not name their rollout."""
_COUNTED = """
SELECT RolloutKey AS RolloutId, count() AS Rows FROM spangrad_internal.rollout_spans WHERE RolloutKey IN keys GROUP BY RolloutKey
"""
_TIMES = {
    "Timestamp": "toUnixTimestamp64Nano(Timestamp) AS Timestamp",
    "IngestedAt": "toUnixTimestamp64Micro(IngestedAt) AS IngestedAt",
    # Collectors write the duration of a span that ends before it starts modulo 2^64: its clock was set back, and its length is unknown.
    "Duration": f"if(Duration < {2**63}, Duration, 0) AS Duration",
}
_ARRIVED = {name: dtype for name, dtype in ARRIVALS.items() if name != "Dropped"}
_NAMED = "RolloutKeySource = 'rollout'"
_ANY = "true"
_INHERITED = "RolloutKeySource != 'rollout' AND TraceId IN traces"
_SETTINGS = (
    "max_threads = 1, preferred_block_size_bytes = 16777216,"
    " output_format_arrow_low_cardinality_as_dictionary = 1, output_format_arrow_compression_method = 'none'"
)
"""Settings for reads of few granules: one thread, and one block where it is no longer than the part of a result that is buffered."""
_FEW = 64
"""Largest number of rollouts of which spans are read ahead: what is read for nothing costs little then."""
_FEW_CALLS = 256
"""Largest number of the gateway's spans of which the calls are read ahead: they may hold 100,000 tokens each."""
_ROW = ["RolloutKey", "Attempt", "Timestamp", "TraceId", "SpanId"]
"""Columns that are equal in all deliveries of a row: the sorting key of the tables."""


@dataclass(frozen=True, slots=True)
class _Nearby:
    """Facts of some traces, beside the rows that name their rollouts."""

    dropped: pl.DataFrame
    """DROPPED: spans with withheld attributes."""
    inherited: pl.DataFrame
    """Rows that name no rollout."""


class _ReadAhead:
    """Rows that are read in a thread before they are requested."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._begun: tuple[frozenset[bytes], Future[pl.DataFrame]] | None = None

    def begin(self, keys: pl.Series, read: Callable[[], pl.DataFrame]) -> None:
        """Begin to read the rows of some keys."""
        self._begun = _distinct(keys), self._thread.submit(read)

    def take(self, keys: pl.Series, *, by_key: bool = False) -> pl.DataFrame | None:
        """Return what was begun, once it is read; None if that is nothing, or of other keys.

        Args:
            keys: of the rows that are needed.
            by_key: each row has one of the keys as RolloutKey, so that those of fewer keys than were begun can be told apart.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        rows, names = begun[1].result(), _distinct(keys)
        if by_key and names < begun[0]:
            return rows.filter(pl.col("RolloutKey").is_in(keys.implode()))
        return rows if names == begun[0] else None

    def drop(self) -> None:
        """Wait for what was begun, and forget it."""
        if self._begun:
            wait([self._begun[1]])
        self._begun = None

    def forget(self) -> None:
        """Forget what was begun."""
        self._begun = None


class RolloutReader:
    """Reads rollouts for one build specification."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Read with `client`; this does not query the store yet."""
        self._settings = settings
        self._reader = StoreReader(client, settings)
        self._owners_of_traces = Discovery(self._reader).owners
        self._beside = ThreadPoolExecutor(1, "traces of rollouts")
        self._spans_ahead, self._calls_ahead = _ReadAhead("spans of rollouts"), _ReadAhead("calls of rollouts")

    def portions(self, rollouts: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield the given rollouts (RolloutId) in their order, as many at a time as are read at once; a few are always one portion."""
        if rollouts.height <= _FEW:
            return iter([rollouts])
        statements = (f"WITH {constant(keys)} AS keys {_COUNTED}" for keys in batches(rollouts["RolloutId"]))
        counted = concat(map(self._reader.frame, statements), {"RolloutId": pl.String(), "Rows": pl.UInt64()})
        return batch_sizes.portions(rollouts.join(counted, on="RolloutId", how="left", maintain_order="left"), batch_sizes.ROWS_A_BUILD)

    def begin(self, rollouts: pl.DataFrame) -> None:
        """Begin to read ARRIVALS of a few rollouts (RolloutId, TraceId): the next `arrivals` takes them, if it is of the same rollouts.

        What was begun before and not taken is dropped: more may have arrived since.
        """
        self._spans_ahead.drop()
        if 0 < rollouts.height <= _FEW:
            self._spans_ahead.begin(rollouts["RolloutId"], lambda: self._arrivals(rollouts))

    def arrivals(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        """Return ARRIVALS of the given rollouts (RolloutId, TraceId), a row each delivery."""
        rows = self._spans_ahead.take(rollouts["RolloutId"])
        return self._arrivals(rollouts) if rows is None else rows

    def _arrivals(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        self._calls_ahead.forget()
        nearby = self._beside.submit(self._nearby, rollouts["TraceId"])
        by_key = self._by_keys(rollouts["RolloutId"], _NAMED)
        others = by_key["TraceId"].filter(~by_key["TraceId"].is_in(rollouts["TraceId"].implode()))
        arrivals = _with_dropped(by_key, [*nearby.result(), *self._nearby(others)])
        if arrivals.select(IS_GATEWAY.sum()).item() <= _FEW_CALLS:
            # After the spans: a span without its calls is left out later, calls without their span are not.
            keys = _keys_of_calls(rollouts, arrivals)
            self._calls_ahead.begin(keys, lambda: self._calls(keys))
        return arrivals

    def owners(self, arrivals: pl.DataFrame) -> pl.DataFrame:
        """Return OWNERS of the traces of ARRIVALS that name no rollout: whose they are depends on spans that may not be among them."""
        return self._owners_of_traces(arrivals.select(pl.col("TraceId").filter(~NAMED)).to_series())

    def frames(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, owners: pl.DataFrame) -> Frames:
        """Return the frames of the given rollouts (ROLLOUTS), from ARRIVALS that may include others', and OWNERS of their traces."""
        matching = arrivals.select(~NAMED | pl.col("RolloutKey").is_in(rollouts["RolloutId"].implode())).to_series()
        spans = _first_deliveries(arrivals if matching.all() else arrivals.filter(matching), "EventIndex")
        keys = _keys_of_calls(rollouts, spans)
        calls = self._calls_ahead.take(keys, by_key=True)
        calls = self._calls(keys) if calls is None else calls
        return self._frames(_read_of(rollouts, spans), spans, calls, owners)

    def claimed_frames(self, rollouts: pl.DataFrame, traces: pl.Series) -> Frames:
        """Return the frames of rollouts without a root that claims their traces: each row is claimed by its own trace.

        Args:
            rollouts: ROLLOUTS.
            traces: traces of calls of these rollouts.
        """
        by_key = self._by_keys(rollouts["RolloutId"], _ANY)
        nearby = self._nearby(pl.concat([traces, by_key["TraceId"]]), read=rollouts["RolloutId"])
        spans = _first_deliveries(_with_dropped(by_key, nearby), "EventIndex")
        calls = self._calls(pl.concat([rollouts["RolloutId"], traces, by_key["TraceId"]]))
        owners = self._owners_of_traces(pl.concat([spans["TraceId"], calls["TraceId"]]))
        once = spans.unique([*SPAN, "RowKind", "EventIndex"], maintain_order=True)
        return self._frames(_read_of(rollouts, spans), claim(once, owners), conform(claim(calls, owners), CALLS), owners)

    def _nearby(self, traces: pl.Series, read: pl.Series | None = None) -> list[_Nearby]:
        """Return the facts of traces, some traces at a time; `read`: keys of which all rows are read."""
        parts = list[_Nearby]()
        for trace_batch in batches(traces):
            rows = self._reader.frame(_BY_TRACE.format(traces=constant(trace_batch)))
            is_key = pl.col("RolloutKey") != ""
            keys = rows.filter(is_key)["RolloutKey"]
            keys = keys if read is None else keys.filter(~keys.is_in(read.implode()))
            parts.append(_Nearby(rows.filter(~is_key), self._by_keys(keys, _INHERITED, trace_batch)))
        return parts

    def _by_keys(self, keys: pl.Series, where: str, traces: Collection[bytes] = ()) -> pl.DataFrame:
        """Return rows of spangrad_internal.rollout_spans by their keys that meet a condition, which may use `traces`."""
        constants = [f"{constant(traces)} AS traces"] if traces else []
        return concat((self._read("rollout_spans", _ARRIVED, key_batch, where, constants) for key_batch in batches(keys)), _ARRIVED)

    def _calls(self, keys: pl.Series) -> pl.DataFrame:
        """Return CALLS by their keys."""
        schema = {**CALLS, "IngestedAt": MICROSECONDS}
        read = (self._read("calls", schema, key_batch, _ANY) for key_batch in batches(keys))
        return concat((_first_deliveries(rows, "ChoiceIndex") for rows in read), CALLS)

    def _read(self, table: str, schema: Schema, keys: Collection[bytes], where: str, constants: Iterable[str] = ()) -> pl.DataFrame:
        """Return rows of a table by their keys that meet a condition over some further constants."""
        columns = ", ".join(_TIMES.get(name, name) for name in schema)
        known = ", ".join([f"{constant(keys)} AS keys", *constants])
        among = f"RolloutKey IN keys AND ({where}) AND {self._reader.arrived(table)}"
        return self._reader.frame(f"WITH {known} SELECT {columns} FROM spangrad_internal.{table} PREWHERE {among} SETTINGS {_SETTINGS}")

    def _frames(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, calls: pl.DataFrame, owners: pl.DataFrame) -> Frames:
        dropped = arrivals.select(pl.col(*DROPPED).filter("Dropped")).unique()
        # One chunk makes each step of a build cheaper.
        spans, calls = conform(arrivals, SPANS).rechunk(), calls.rechunk()
        answered = self._answers(spans, calls)
        reader, spec = self._reader, self._settings.builder
        given = sql.read(reader, spec, rollouts, spans, calls)
        responded, records = responses.read(reader, spec, spans, answered), tool_records.read(reader, spec, spans)
        return Frames(rollouts, spans, calls, answered, given, responded, dropped, owners, *records)

    def _answers(self, spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
        """Return the answers in openai-level spans without a gateway call below them; `output.value` is too long for the lean table."""
        holders = uncovered(spans, calls)
        parts = list[pl.DataFrame]()
        for batch in holders.sort("Timestamp").iter_slices(KEYS_A_STATEMENT):
            answered = answers.with_modality(self._reader.frame(answers.ANSWER_SQL % span_constants(batch)))
            parts.append(answered.join(batch, on=SPAN, how="semi"))
        return concat(parts, ANSWERS)


def _distinct(names: pl.Series) -> frozenset[bytes]:
    """Return names as a set; as bytes: a store may hold keys that are not UTF-8."""
    return frozenset(names.cast(pl.Binary).to_list())


def _keys_of_calls(rollouts: pl.DataFrame, spans: pl.DataFrame) -> pl.Series:
    """Return the keys of the calls of rollouts: their names, and the traces of the gateway's spans (ARRIVALS) that name none."""
    return pl.concat([rollouts["RolloutId"], spans.select(pl.col("TraceId").filter(~NAMED & IS_GATEWAY)).to_series()])


def _with_dropped(by_key: pl.DataFrame, nearby: Sequence[_Nearby]) -> pl.DataFrame:
    """Return ARRIVALS: the rows found by their keys, and those near them, marked where the gateway withheld attributes."""
    rows, withheld = pl.concat([by_key, *(part.inherited for part in nearby)]), concat([part.dropped for part in nearby], DROPPED)
    if withheld.is_empty():
        return rows.with_columns(Dropped=pl.lit(False))
    among = withheld.select(pl.struct(*DROPPED)).to_series().implode()
    return rows.with_columns(Dropped=pl.struct(*DROPPED).is_in(among))


def _read_of(rollouts: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Return ROLLOUTS with the number of rows that were read of them."""
    counted = late_spans.count(late_spans.tally(rows), rollouts)
    return conform(rollouts.drop("Rows").join(counted, on=ROLLOUT, how="left", maintain_order="left"), ROLLOUTS)


def _first_deliveries(rows: pl.DataFrame, index: str) -> pl.DataFrame:
    """Return the rows without repeated deliveries; `index` is the column that tells the rows of one span apart."""
    if rows.select(*SPAN, index).is_unique().all():
        return rows
    return rows.sort("IngestedAt", maintain_order=True).unique([*_ROW, index], keep="first", maintain_order=True)
