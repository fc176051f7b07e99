"""What the builder reads of the span store, and how little of it.

In: a client of the store. Out: final roots that nobody has built for this specification, calls that nobody has concluded,
what has arrived of rollouts, and the frames to build them from. Invariant: history is scanned once, when the builder starts;
after that each poll reads what has arrived since the last one, with an overlap longer than the longest insert, and the
rollouts it asks for, by their keys.

A rollout's spans are read once, and judged and built from. Its calls, which hold the token ids, are read when it no longer waits.
A span that was delivered twice is dropped here: FINAL would sort whole granules for the few rows that are asked for.

A rollout counts as built when drops name it, or transitions do: the sink writes transitions before drops, and a
rollout's transitions in one block. A builder that was killed between the two leaves rollouts that lack their drops,
all of them in its last write: the first look of a new builder takes the newest transitions for doubtful, and
builds their rollouts again. The sink writes what is missing and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad import semconv
from spangrad.clickhouse import store_errors
from spangrad.settings import Settings
from transition_builder import join
from transition_builder.dialects import openinference
from transition_builder.dialects.gateway import IS_GATEWAY
from transition_builder.frames import (
    ACTIVITY,
    ANSWERS,
    ARRIVALS,
    BUILT,
    CALLS,
    LOOSE,
    MICROSECONDS,
    OWNERS,
    ROOTS,
    SPANS,
    TRACES,
    Frames,
    Schema,
    concat,
    conform,
)
from transition_builder.resolve import NAMED
from transition_builder.unclaimed import claim

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

OVERLAP_SECONDS = 120
"""Longer than any insert takes to become visible after its rows were dated."""
_KEYS_A_QUERY = 500
_NEVER = 2**62

_ROOTS = f"""
SELECT
    RunId, Mode, RolloutKey AS RolloutId, Attempt,
    Attributes['{semconv.GROUP_ID}'] AS GroupId,
    toUInt32OrZero(Attributes['{semconv.GROUP_SIZE}']) AS GroupSize,
    Attributes['{semconv.TASK_ID}'] AS TaskId,
    toUInt32OrNull(Attributes['{semconv.ROLLOUT_CALLS}']) AS Calls,
    Attributes['{semconv.ROLLOUT_FINAL}'] = 'true' AS Final,
    Attributes['{semconv.ROLLOUT_FAILURE}'] AS Failure,
    TraceId, SpanId, toUnixTimestamp64Micro(IngestedAt) AS IngestedAt
FROM otel.rollout_spans
PREWHERE SpanName = '{semconv.ROOT_SPAN_NAME}' AND RowKind = 'span' AND RolloutKeySource = 'rollout' AND {{which}}
WHERE mapContains(Attributes, '{semconv.ROLLOUT_FINAL}')
ORDER BY IngestedAt
LIMIT 1 BY RunId, RolloutId, Attempt, TraceId, SpanId
"""
# All of this is decided before any attributes are read, so that a poll reads those of unbuilt rollouts alone.
_UNBUILT = """
otel.rollout_spans.IngestedAt >= fromUnixTimestamp64Micro(%(since)s) AND (RunId, RolloutKey) NOT IN (
    SELECT RunId, RolloutId FROM otel.drops WHERE BuildSpec = %(spec)s AND IngestedAt >= fromUnixTimestamp64Micro(%(since)s)
    UNION ALL
    SELECT RunId, RolloutId FROM otel.transitions
    WHERE BuildSpec = %(spec)s AND IngestedAt >= fromUnixTimestamp64Micro(%(since)s)
        AND toUnixTimestamp64Micro(IngestedAt) < %(doubtful)s)
"""
# A conclusion is dated after the call that it concludes.
_LOOSE = """
SELECT RunId, Mode, RolloutKey, RolloutKeySource, Attempt, TraceId, CallId, toUnixTimestamp64Micro(otel.calls.IngestedAt) AS IngestedAt
FROM otel.calls
WHERE otel.calls.IngestedAt >= fromUnixTimestamp64Micro(%(since)s) AND CallId NOT IN (
    SELECT CallId FROM otel.drops WHERE BuildSpec = %(spec)s AND IngestedAt >= fromUnixTimestamp64Micro(%(since)s)
    UNION ALL
    SELECT CallId FROM otel.transitions WHERE BuildSpec = %(spec)s AND IngestedAt >= fromUnixTimestamp64Micro(%(since)s))
ORDER BY IngestedAt
LIMIT 1 BY CallId
"""
_OWNERS = """
SELECT TraceId, max(RunId) AS RunId, max(Mode) AS Mode, max(RolloutId) AS RolloutId, max(SessionId) AS SessionId,
    max(ConversationId) AS ConversationId, max(Attempt) AS Attempt
FROM otel.trace_rollouts
WHERE TraceId IN %(traces)s
GROUP BY TraceId
"""
_ACTIVITY = """
SELECT RunId, max(Mode) AS Mode, RolloutKey AS RolloutId, toUnixTimestamp64Micro(max(IngestedAt)) AS LastArrival
FROM otel.rollout_spans
WHERE RolloutKey IN %(keys)s
GROUP BY RunId, RolloutKey
"""
_TRACES = """
SELECT TraceId, toUnixTimestamp64Micro(max(IngestedAt)) AS LastArrival,
    uniqExactArray(if(ParentSpanId = '', [SpanId], [SpanId, ParentSpanId])) > uniqExact(SpanId) AS Torn
FROM otel.rollout_spans
WHERE RowKind != 'evaluation_log' AND TraceId IN %(traces)s AND RolloutKey IN (
    SELECT arrayJoin([TraceId, RolloutId, SessionId, ConversationId]) FROM otel.trace_rollouts WHERE TraceId IN %(traces)s)
GROUP BY TraceId
"""
_BUILT = """
SELECT RunId, any(Mode) AS Mode, RolloutId, max(Attempt) AS Attempt, any(GroupId) AS GroupId, any(GroupSize) AS GroupSize,
    any(TaskId) AS TaskId
FROM (
    SELECT RunId, Mode, RolloutId, Attempt, GroupId, GroupSize, TaskId FROM otel.transitions
    WHERE BuildSpec = %(spec)s AND RolloutId IN %(keys)s
    UNION ALL
    SELECT RunId, Mode, RolloutId, Attempt, GroupId, GroupSize, TaskId FROM otel.drops
    WHERE BuildSpec = %(spec)s AND RolloutId IN %(keys)s)
GROUP BY RunId, RolloutId
"""
_NEWEST_TRANSITION = "SELECT toUnixTimestamp64Micro(max(IngestedAt)) FROM otel.transitions WHERE BuildSpec = %(spec)s"

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
_PLAIN = {"enable_http_compression": 0}
"""Arrow is compressed already, where that is worth it."""
_SETTINGS = "max_threads = 1, output_format_arrow_low_cardinality_as_dictionary = 1, output_format_arrow_compression_method = 'lz4_frame'"
"""For reads of few granules. Packed even on loopback: every copy on the way costs more than LZ4 does."""
_ROW = ["RolloutKey", "Attempt", "Timestamp", "TraceId", "SpanId", "Choice"]
"""What is the same in all deliveries of a row: the sorting key of the tables."""


class Source:
    """Reads rollouts for one build specification."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Read with `client`; nothing is asked of the store yet."""
        self._client = client
        self._url = settings.store.url
        self._spec = settings.builder.spec
        self._seen_until: int | None = None
        self._calls_seen_until: int | None = None

    def now(self) -> datetime:
        """The store's clock, that dates every arrival."""
        return self._frame("SELECT toUnixTimestamp64Micro(now64(6)) AS now", {}).select(pl.col("now").cast(pl.Datetime("us", "UTC"))).item()

    def new_roots(self) -> pl.DataFrame:
        """Final roots (ROOTS) that arrived since the last call, or shortly before it, and that are not built."""
        overlap = OVERLAP_SECONDS * 1_000_000
        until = int(self.now().timestamp() * 1_000_000)
        doubtful = _NEVER
        if self._seen_until is None:
            doubtful = int(self._frame(_NEWEST_TRANSITION, {"spec": self._spec}).item()) - overlap
        since = 0 if self._seen_until is None else self._seen_until - overlap
        roots = conform(self._frame(_ROOTS.format(which=_UNBUILT), {"since": since, "spec": self._spec, "doubtful": doubtful}), ROOTS)
        self._seen_until = until
        return roots.filter("Final")

    def arrivals(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        """What has arrived of the given rollouts (RolloutId, TraceId): ARRIVALS, a row each delivery."""
        found, asked = list[pl.DataFrame](), set[str]()
        for some in rollouts.iter_slices(_KEYS_A_QUERY):
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
        return self._frames(rollouts, conform(spans, SPANS), self._calls([*rollouts["RolloutId"], *inherited]))

    def loose_calls(self) -> pl.DataFrame:
        """Calls (LOOSE) that arrived since the last call of this, or shortly before it, and that are not concluded."""
        until = int(self.now().timestamp() * 1_000_000)
        since = 0 if self._calls_seen_until is None else self._calls_seen_until - OVERLAP_SECONDS * 1_000_000
        calls = conform(self._frame(_LOOSE, {"since": since, "spec": self._spec}), LOOSE)
        self._calls_seen_until = until
        return calls

    def owners(self, traces: Iterable[str]) -> pl.DataFrame:
        """OWNERS of traces."""
        return concat((self._frame(_OWNERS, {"traces": some}) for some in _batches(traces)), OWNERS)

    def activity(self, rollouts: Iterable[str]) -> pl.DataFrame:
        """ACTIVITY of rollouts."""
        return concat((self._frame(_ACTIVITY, {"keys": some}) for some in _batches(rollouts)), ACTIVITY)

    def traces(self, traces: Iterable[str]) -> pl.DataFrame:
        """TRACES."""
        return concat((self._frame(_TRACES, {"traces": some}) for some in _batches(traces)), TRACES)

    def roots(self, rollouts: Iterable[str]) -> pl.DataFrame:
        """ROOTS of all attempts of rollouts."""
        return concat((self._frame(_ROOTS.format(which="RolloutKey IN %(keys)s"), {"keys": some}) for some in _batches(rollouts)), ROOTS)

    def built(self, rollouts: Iterable[str]) -> pl.DataFrame:
        """Those of the given rollouts that are BUILT."""
        return concat((self._frame(_BUILT, {"spec": self._spec, "keys": some}) for some in _batches(rollouts)), BUILT)

    def claimed_frames(self, rollouts: pl.DataFrame, traces: Iterable[str]) -> Frames:
        """Everything that is known of rollouts without a root to claim their traces: each row is claimed by its own trace.

        Args:
            rollouts: ROLLOUTS.
            traces: of calls of theirs.
        """
        keys = tuple(dict.fromkeys(rollouts["RolloutId"]))
        found = [self._arrivals(some, (), _ANY) for some in _batches(keys)]
        further = dict.fromkeys([*traces, *(trace for frame in found for trace in frame["TraceId"])])
        spans = _first_deliveries(concat([*found, *self._inherited(further)], ARRIVALS))
        calls = self._calls([*keys, *further])
        owners = self.owners([*spans["TraceId"], *calls["TraceId"]])
        once = spans.unique(["TraceId", "SpanId", "RowKind", "Choice"], maintain_order=True)
        return self._frames(rollouts, conform(claim(once, owners), SPANS), conform(claim(calls, owners), CALLS))

    def _inherited(self, traces: Iterable[str]) -> Iterator[pl.DataFrame]:
        """ARRIVALS of traces that do not name their rollouts."""
        return (self._arrivals((), some, _ANY) for some in _batches(traces))

    def _arrivals(self, keys: Collection[str], traces: Collection[str], of_keys: str) -> pl.DataFrame:
        """ARRIVALS by their keys, as far as a condition holds, and those that inherit from traces."""
        constants, among, where = list[str](), list[str](), list[str]()
        if keys:
            constants.append(f"{_constant(keys)} AS keys")
            among.append("RolloutKey IN keys")
            where.append(of_keys)
        if traces:
            constants.append(f"{_constant(traces)} AS traces")
            among.append(_INHERITED_KEYS)
            where.append(_INHERITED)
        return self._read("rollout_spans", ARRIVALS, constants, " OR ".join(among), " OR ".join(where))

    def _calls(self, keys: Iterable[str]) -> pl.DataFrame:
        """CALLS by their keys."""
        schema = {**CALLS, "IngestedAt": MICROSECONDS}
        read = (self._read("calls", schema, [f"{_constant(some)} AS keys"], "RolloutKey IN keys", _RECORDED) for some in _batches(keys))
        return concat(map(_first_deliveries, read), CALLS)

    def _read(self, table: str, schema: Schema, constants: Iterable[str], among: str, where: str) -> pl.DataFrame:
        columns = ", ".join(_TIMES.get(name, name) for name in schema)
        sql = f"WITH {', '.join(constants)} SELECT {columns} FROM otel.{table} PREWHERE {among} WHERE {where} SETTINGS {_SETTINGS}"
        return self._frame(sql, {})

    def _frames(self, rollouts: pl.DataFrame, spans: pl.DataFrame, calls: pl.DataFrame) -> Frames:
        return Frames(rollouts, spans, calls, self._answers(spans, calls))

    def _answers(self, spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
        """What openai-level spans without a gateway call below them hold: their `output.value` is too long for the lean table."""
        wanted = join.uncovered(spans, calls)
        found = list[pl.DataFrame]()
        for some in wanted.sort("Timestamp").iter_slices(_KEYS_A_QUERY):
            times = some["Timestamp"].cast(pl.Int64)
            parameters = {
                "services": tuple(some["ServiceName"].unique()),
                "names": tuple(some["SpanName"].unique()),
                "first": times[0],
                "last": times[-1],
                "traces": tuple(some["TraceId"].unique()),
                "spans": tuple(some["SpanId"]),
            }
            found.append(self._frame(openinference.ANSWER_SQL, parameters).join(some, on=["TraceId", "SpanId"], how="semi"))
        return concat(found, ANSWERS)

    def _frame(self, sql: str, parameters: Mapping[str, Any]) -> pl.DataFrame:
        with store_errors(self._url):
            table = self._client.query_arrow(sql, parameters=dict(parameters), use_strings=True, settings=_PLAIN)
        frame = pl.from_arrow(_with_plain_map_keys(table))
        assert isinstance(frame, pl.DataFrame)
        return frame


def _batches(keys: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Distinct keys, as many at a time as fit a statement (the engine parses at most 256 KiB)."""
    distinct = iter(dict.fromkeys(keys))
    while some := tuple(islice(distinct, _KEYS_A_QUERY)):
        yield some


def _constant(texts: Iterable[str]) -> str:
    """Texts as a constant array in SQL.

    In hexadecimal, because the store refuses statements with certain words in them; and without a lambda, which the engine would
    not evaluate in time to look the keys up in the index.
    """
    return f"JSONExtract(unhex('{json.dumps(list(texts)).encode().hex()}'), 'Array(String)')"


def _first_deliveries(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows without those that came again."""
    if rows.select("TraceId", "SpanId", "Choice").is_unique().all():
        return rows
    return rows.sort("IngestedAt", maintain_order=True).unique(_ROW, keep="first", maintain_order=True)


def _with_plain_map_keys(table: Any) -> Any:
    """The same table: Polars takes a dictionary for any text but the key of a map."""
    import pyarrow as pa

    for place, column in enumerate(table.columns):
        if pa.types.is_map(column.type) and pa.types.is_dictionary(column.type.key_type):
            maps = [pa.MapArray.from_arrays(one.offsets, one.keys.dictionary_decode(), one.items) for one in column.chunks]
            table = table.set_column(place, table.column_names[place], pa.chunked_array(maps, pa.map_(pa.string(), pa.string())))
    return table
