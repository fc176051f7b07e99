"""What the builder reads of the span store, and how little of it.

In: a client of the store. Out: final roots that nobody has built for this specification, calls that nobody has concluded,
facts to judge both by, and the frames to build them from. Invariant: history is scanned once, when the builder starts;
after that each poll reads what has arrived since the last one, with an overlap longer than the longest insert, and the
rollouts it asks for.

A rollout counts as built when drops name it, or transitions do: the sink writes transitions before drops, and a
rollout's transitions in one block. A builder that was killed between the two leaves rollouts that lack their drops,
all of them in its last write: the first look of a new builder takes the newest transitions for doubtful, and
builds their rollouts again. The sink writes what is missing and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad import semconv
from spangrad.clickhouse import store_errors
from spangrad.settings import Settings
from transition_builder import join
from transition_builder.build import read
from transition_builder.dialects import openinference
from transition_builder.frames import (
    ACTIVITY,
    ANSWERS,
    BUILT,
    CALLS,
    COUNTS,
    LOOSE,
    OWNERS,
    PRESENCE,
    ROOTS,
    SPANS,
    TRACES,
    Facts,
    Frames,
    concat,
    conform,
    empty,
)
from transition_builder.unclaimed import claim

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

OVERLAP_SECONDS = 120
"""Longer than any insert takes to become visible after its rows were dated."""
_KEYS_A_QUERY = 1000
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

_PRESENCE = f"""
SELECT RunId, RolloutKey, RolloutKeySource, Attempt, TraceId,
    uniqExactIf((SpanId, Choice), RowKind != 'span' AND mapContains(Attributes, '{semconv.EVALUATION_SCORE}')) AS Evaluations,
    toUnixTimestamp64Micro(max(IngestedAt)) AS LastArrival
FROM otel.rollout_spans
WHERE {{where}}
GROUP BY RunId, RolloutKey, RolloutKeySource, Attempt, TraceId
"""
_COUNTS = """
SELECT RunId, RolloutKey, RolloutKeySource, Attempt, TraceId, uniqExact(SpanId) AS Calls
FROM otel.calls
WHERE RolloutKey IN %(keys)s
GROUP BY RunId, RolloutKey, RolloutKeySource, Attempt, TraceId
"""
_NAMED = "RolloutKeySource = 'rollout' AND RolloutKey IN %(keys)s"
_INHERITED = """RolloutKeySource != 'rollout' AND TraceId IN %(traces)s AND RolloutKey IN (
    SELECT arrayJoin([TraceId, SessionId, ConversationId]) FROM otel.trace_rollouts WHERE TraceId IN %(traces)s)"""
_TIMES = {"Timestamp": "toUnixTimestamp64Nano(Timestamp) AS Timestamp"}
_SPANS = f"SELECT {', '.join(_TIMES.get(name, name) for name in SPANS)} FROM otel.rollout_spans FINAL WHERE {{where}}"
_CALLS = f"SELECT {', '.join(_TIMES.get(name, name) for name in CALLS)} FROM otel.calls FINAL WHERE RolloutKey IN %(keys)s"


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

    def facts(self, rollouts: pl.DataFrame) -> Facts:
        """What has arrived of the given rollouts (RolloutId)."""
        presence, counts = list[pl.DataFrame](), list[pl.DataFrame]()
        for keys in _batches(rollouts["RolloutId"]):
            named = self._frame(_PRESENCE.format(where=_NAMED), {"keys": keys})
            presence.append(named)
            traces = list(_batches(named["TraceId"]))
            presence += [self._frame(_PRESENCE.format(where=_INHERITED), {"traces": some}) for some in traces]
            counts += [self._frame(_COUNTS, {"keys": some}) for some in [keys, *traces]]
        return Facts(self.roots(rollouts["RolloutId"]), concat(presence, PRESENCE), concat(counts, COUNTS))

    def frames(self, rollouts: pl.DataFrame) -> Frames:
        """Everything that is known of the given rollouts (ROLLOUTS)."""
        return self._frames(rollouts, *self._rows(rollouts["RolloutId"], _NAMED, ()))

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
        spans, calls = self._rows(rollouts["RolloutId"], "RolloutKey IN %(keys)s", traces)
        owners = self.owners([*spans["TraceId"], *calls["TraceId"]])
        once = spans.unique(["TraceId", "SpanId", "RowKind", "Choice"], maintain_order=True)
        return self._frames(rollouts, conform(claim(once, owners), SPANS), conform(claim(calls, owners), CALLS))

    def _rows(self, rollouts: Iterable[str], where: str, traces: Iterable[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Spans and calls of rollouts, of the traces in which spans name them, and of further traces."""
        spans, calls, further = list[pl.DataFrame](), list[pl.DataFrame](), dict.fromkeys(traces)
        for keys in _batches(rollouts):
            spans.append(self._frame(_SPANS.format(where=where), {"keys": keys}))
            calls.append(self._frame(_CALLS, {"keys": keys}))
            further |= dict.fromkeys(spans[-1]["TraceId"])
        for some in _batches(further):
            spans.append(self._frame(_SPANS.format(where=_INHERITED), {"traces": some}))
            calls.append(self._frame(_CALLS, {"keys": some}))
        return concat(spans, SPANS), concat(calls, CALLS)

    def _frames(self, rollouts: pl.DataFrame, spans: pl.DataFrame, calls: pl.DataFrame) -> Frames:
        lean = Frames(rollouts, spans, calls, empty(ANSWERS))
        return Frames(rollouts, spans, calls, self._answers(lean))

    def _answers(self, lean: Frames) -> pl.DataFrame:
        """What openai-level spans without a gateway call below them hold: their `output.value` is too long for the lean table."""
        wanted = join.uncovered(*read(lean))
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
            table = self._client.query_arrow(sql, parameters=dict(parameters), use_strings=True)
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return frame


def _batches(keys: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Distinct keys, as many at a time as fit a statement (the engine parses at most 256 KiB)."""
    distinct = iter(dict.fromkeys(keys))
    while some := tuple(islice(distinct, _KEYS_A_QUERY)):
        yield some
