"""What the builder reads of the span store, and how little of it.

In: a client of the store. Out: final roots that nobody has built for this specification, facts to judge them by, and
the frames to build them from. Invariant: history is scanned once, when the builder starts; after that each poll reads
what has arrived since the last one, with an overlap longer than the longest insert, and the rollouts it asks for.

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
from transition_builder.frames import ANSWERS, CALLS, COUNTS, PRESENCE, ROOTS, SPANS, Facts, Frames, concat, conform, empty

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
        roots, presence, counts = list[pl.DataFrame](), list[pl.DataFrame](), list[pl.DataFrame]()
        for keys in _batches(rollouts["RolloutId"]):
            roots.append(self._frame(_ROOTS.format(which="RolloutKey IN %(keys)s"), {"keys": keys}))
            named = self._frame(_PRESENCE.format(where=_NAMED), {"keys": keys})
            presence.append(named)
            traces = list(_batches(named["TraceId"]))
            presence += [self._frame(_PRESENCE.format(where=_INHERITED), {"traces": some}) for some in traces]
            counts += [self._frame(_COUNTS, {"keys": some}) for some in [keys, *traces]]
        return Facts(concat(roots, ROOTS), concat(presence, PRESENCE), concat(counts, COUNTS))

    def frames(self, rollouts: pl.DataFrame) -> Frames:
        """Everything that is known of the given rollouts (ROLLOUTS)."""
        spans, calls = list[pl.DataFrame](), list[pl.DataFrame]()
        for keys in _batches(rollouts["RolloutId"]):
            named = self._frame(_SPANS.format(where=_NAMED), {"keys": keys})
            spans.append(named)
            traces = list(_batches(named["TraceId"]))
            spans += [self._frame(_SPANS.format(where=_INHERITED), {"traces": some}) for some in traces]
            calls += [self._frame(_CALLS, {"keys": some}) for some in [keys, *traces]]
        lean = Frames(rollouts, concat(spans, SPANS), concat(calls, CALLS), empty(ANSWERS))
        return Frames(lean.rollouts, lean.spans, lean.calls, self._answers(lean))

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
