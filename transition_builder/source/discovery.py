"""Discovery of changes in the store since the last pass.

Invariant: history is scanned once, when the builder starts; after that each pass reads what has arrived since the last one.

A row is dated when its insert begins, and is seen when that ends, so that each pass reads a little of what the last one read: enough
for nearly every insert. For all others there is a sweep now and then, whose overlap is longer than the longest insert.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from spangrad import semconv
from spangrad.store.clickhouse import constant, microseconds
from spangrad.store.datasets import newest_sql, rows_sql
from spangrad.types import Mode
from transition_builder.completeness.reassigned_traces import CONCLUDED, KEYS
from transition_builder.completeness.resolve import NAMED, owners_of
from transition_builder.dialects import MODEL_SPAN_SQL
from transition_builder.frames import concat, conform, empty
from transition_builder.schemas import ACTIVITY, ARRIVED, MICROSECONDS, NAMES, OWNERS, ROOTLESS, ROOTS, TALLY, TRACES, Schema
from transition_builder.source.marks import Marks
from transition_builder.source.queries import StoreReader, batches

OVERLAP = timedelta(seconds=120)
"""Upper bound on the time that an insert takes to become visible after its rows were dated."""
_USUAL_OVERLAP = timedelta(seconds=10)
BETWEEN_SWEEPS = timedelta(seconds=30)
"""Time between two passes that read all that may have become visible late."""
_NAMING: Schema = {**NAMES, **dict.fromkeys(("Mode", "SessionId", "ConversationId"), pl.String())}

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
FROM spangrad_internal.rollout_spans
PREWHERE SpanName = '{semconv.ROOT_SPAN_NAME}' AND RowKind = 'span' AND RolloutKeySource = 'rollout' AND {{arrived}} AND {{which}}
WHERE mapContains(Attributes, '{semconv.ROLLOUT_FINAL}')
ORDER BY Final DESC, IngestedAt
LIMIT 1 BY RunId, RolloutId, Attempt, TraceId, SpanId
"""
# The store's clock may have been set back since the last look.
_BEGIN = "least(fromUnixTimestamp64Micro(%(since)s), now64(6) - toIntervalMicrosecond(%(overlap)s))"
_SINCE = f"rollout_spans.IngestedAt >= {_BEGIN}"
# A rollout is built after its spans have come, so that what was built before need not be looked at.
_BUILDS_SINCE = f"BuildSpec = %(spec)s AND b.IngestedAt >= {_BEGIN}"
_BUILT_SINCE = f"FROM spangrad_internal.builds AS b WHERE {_BUILDS_SINCE}"
# All of this is decided before any attributes are read, so that a pass reads those of unbuilt rollouts alone.
_UNBUILT = f"{_SINCE} AND (RunId, RolloutKey) NOT IN (SELECT RunId, RolloutId {_BUILT_SINCE})"
_OF_BUILT_SINCE = f"""
    SELECT TraceId FROM spangrad_internal.{{table}}
    WHERE BuildSpec = %(spec)s AND {{table}}.IngestedAt >= {_BEGIN} AND CallId != ''
        AND (RunId, RolloutId, Revision, Content) IN (
            SELECT RunId, RolloutId, Revision, Content FROM {newest_sql(where=_BUILDS_SINCE)} AS v)"""
_ROOTLESS = f"""
SELECT RunId, Mode, RolloutKey, RolloutKeySource, Attempt, TraceId, toUnixTimestamp64Micro(max(rollout_spans.IngestedAt)) AS IngestedAt
FROM spangrad_internal.rollout_spans
PREWHERE RowKind = 'span' AND {{arrived}} AND {_SINCE}
    AND multiIf(
        RolloutKeySource != 'rollout', TraceId NOT IN ({{of_built}}),
        RunId = '', RolloutKey NOT IN (SELECT RolloutId {_BUILT_SINCE}),
        (RunId, RolloutKey) NOT IN (SELECT RunId, RolloutId {_BUILT_SINCE}))
WHERE ScopeName = '{semconv.GATEWAY_SCOPE}' OR ({MODEL_SPAN_SQL})
GROUP BY RunId, Mode, RolloutKey, RolloutKeySource, Attempt, TraceId
ORDER BY IngestedAt
"""
_OF_KEYED = f"""
SELECT RunId, Mode, RolloutKey, RolloutKeySource, Attempt, TraceId, toUnixTimestamp64Micro(max(rollout_spans.IngestedAt)) AS IngestedAt
FROM spangrad_internal.rollout_spans
PREWHERE RowKind = 'span' AND {{arrived}} AND RolloutKeySource != 'rollout' AND RolloutKey IN {{keys}}
WHERE ScopeName = '{semconv.GATEWAY_SCOPE}' OR ({MODEL_SPAN_SQL})
GROUP BY RunId, Mode, RolloutKey, RolloutKeySource, Attempt, TraceId
"""
_ARRIVED = f"""
SELECT RunId, Mode, RolloutKey, RolloutKeySource, Attempt, TraceId, toUnixTimestamp64Micro(max(rollout_spans.IngestedAt)) AS IngestedAt,
    max(SpanName = '{semconv.ROOT_SPAN_NAME}' AND RowKind = 'span' AND RolloutKeySource = 'rollout') = 1 AS HasRoot,
    toUnixTimestamp64Micro(now64(6)) AS Now
FROM spangrad_internal.rollout_spans
WHERE {{arrived}} AND {_SINCE} AND {{which}}
GROUP BY RunId, Mode, RolloutKey, RolloutKeySource, Attempt, TraceId
"""
_UNNAMED = "RolloutKeySource != 'rollout'"
_EVER_BUILT = f"({_UNNAMED} OR RolloutKey IN (SELECT RolloutId FROM spangrad_internal.builds WHERE BuildSpec = %(spec)s))"
_OWNERS = f"SELECT {', '.join(OWNERS)} FROM spangrad_internal.trace_owners WHERE TraceId IN {{keys}}"
# The final owner of a trace may differ from its owner at that time.
_NAMES_THEN = f"""
SELECT DISTINCT {", ".join(_NAMING)} FROM spangrad_internal.rollout_spans WHERE RowKind = 'span' AND {{arrived}} AND TraceId IN {{keys}}
"""
_ACTIVITY = """
SELECT RunId, max(Mode) AS Mode, RolloutKey AS RolloutId, count() AS Rows,
    toUnixTimestamp64Micro(max(rollout_spans.IngestedAt)) AS LastArrival
FROM spangrad_internal.rollout_spans
WHERE {arrived} AND RolloutKey IN {keys}
GROUP BY RunId, RolloutKey
"""
_TRACES = """
SELECT TraceId, count() AS Rows, toUnixTimestamp64Micro(max(rollout_spans.IngestedAt)) AS LastArrival,
    uniqExactArray(if(ParentSpanId = '', [SpanId], [SpanId, ParentSpanId])) > uniqExact(SpanId) AS HasOpenSpan
FROM spangrad_internal.rollout_spans
WHERE {arrived} AND RowKind != 'evaluation_log' AND TraceId IN {keys} AND RolloutKey IN (
    SELECT arrayJoin([TraceId, ifNull(FirstRolloutId, ''), ifNull(LastRolloutId, ''), SessionId, ConversationId])
    FROM spangrad_internal.trace_rollouts WHERE TraceId IN {keys})
GROUP BY TraceId
"""
_TALLY = """
SELECT RunId, RolloutKey, RolloutKeySource, TraceId, uniqExact(Attempt, Timestamp, SpanId, EventIndex) AS Rows
FROM spangrad_internal.rollout_spans
WHERE {arrived} AND {which}
GROUP BY RunId, RolloutKey, RolloutKeySource, TraceId
"""
_OF_KEYS = "RolloutKey IN {keys}"
_KEYS = "SELECT DISTINCT TraceId, RolloutKey FROM spangrad_internal.trace_keys WHERE TraceId IN {keys}"
_CONCLUDED = f"""
SELECT DISTINCT RunId, RolloutId, TraceId FROM {{transitions}} AS t WHERE Mode = '{Mode.PRODUCTION.value}'
UNION DISTINCT
SELECT DISTINCT RunId, RolloutId, TraceId FROM {{drops}} AS d WHERE Mode = '{Mode.PRODUCTION.value}' AND CallId != ''
"""
_NAMELESS = (
    f"{_UNNAMED} AND TraceId IN {{keys}} AND RolloutKey IN (SELECT RolloutKey FROM spangrad_internal.trace_keys WHERE TraceId IN {{keys}})"
)


class Discovery:
    """Finds rollouts for one build specification."""

    def __init__(self, reader: StoreReader, since: datetime | None = None, marks: Marks | None = None) -> None:
        """Find what has arrived since a time; None: since the newest of the marks, or ever. This does not query the store yet."""
        self._reader = reader
        self._marks = marks
        self._arrived = reader.arrived("rollout_spans")
        self._begin = since
        self._now: datetime | None = None
        self.sweeps = False
        """True if this look sweeps."""
        self._last: datetime | None = None
        self._last_sweep: datetime | None = None
        self._seen = empty(ARRIVED)
        self._seen_next = self._seen

    def begin(self, now: datetime, *, sweeps: bool) -> None:
        """Begin a look, about now. It counts when it is `done`; else the next one reads the same again.

        Args:
            now: the store's clock.
            sweeps: read all that may have arrived since the last sweep; the first sweep reads history.
        """
        if self.is_first and self._begin is None and self._marks:
            begin = self._marks.read()
            # A mark in the future was written before the store's clock was set back: what has arrived since then may be dated before it.
            self._begin = begin if begin and begin <= now else None
        self._now, self.sweeps = now, sweeps

    def mark(self, oldest: datetime | None) -> None:
        """Mark that what was found before is built.

        Args:
            oldest: arrival of the oldest that was found and is not built. None: all is built.
        """
        if self._marks and self._last_sweep:
            self._marks.move(min(self._last_sweep, oldest or self._last_sweep) - OVERLAP)

    def done(self) -> None:
        """Mark the pass as done: the caller has all that it found."""
        if self.sweeps:
            self._last_sweep = self._now
        self._last = self._now
        self._seen = self._seen_next

    @property
    def now(self) -> datetime:
        """The store's clock at this look."""
        assert self._now is not None
        return self._now

    @property
    def is_first(self) -> bool:
        """True until history was read."""
        return self._last_sweep is None

    def sweep_is_due(self, now: datetime) -> bool:
        """Return whether the last sweep was long ago, by the store's clock, or that was set back since."""
        return self._last_sweep is None or abs(now - self._last_sweep) >= BETWEEN_SWEEPS

    @property
    def _window(self) -> dict[str, object]:
        overlap = OVERLAP if self.sweeps else _USUAL_OVERLAP
        last = self._last_sweep if self.sweeps else self._last
        since = last - overlap if last else self._begin
        return {
            "since": microseconds(since) if since else 0,
            "overlap": overlap // timedelta(microseconds=1),
            "spec": self._reader.spec,
        }

    def new_roots(self) -> pl.DataFrame:
        """Return final ROOTS of rollouts that are not built, of all history. Read after `arrivals`, whose time the next look begins at."""
        sql = _ROOTS.format(arrived=self._arrived, which=_UNBUILT)
        return conform(self._reader.frame(sql, self._window, fresh=True, scans=True), ROOTS).filter("Final")

    def rootless(self) -> pl.DataFrame:
        """Return ROOTLESS rows with a span that is, or may be, a call of a model, of traces and rollouts that are not concluded.

        For sweeps: only they read rows that name their rollout, which wait for their root, or for a long timeout.
        """
        of_built = " UNION ALL ".join(_OF_BUILT_SINCE.format(table=table) for table in ("transitions", "drops"))
        sql = _ROOTLESS.format(arrived=self._arrived, of_built=of_built)
        return conform(self._reader.frame(sql, self._window, scans=True), ROOTLESS)

    def rootless_of(self, arrived: pl.DataFrame) -> pl.DataFrame:
        """Return ROOTLESS rows as `rootless` does, of those of ARRIVED that name no rollout; they may be concluded."""
        return self._by_keys(_OF_KEYED, arrived.select(pl.col("RolloutKey").filter(~NAMED)).to_series(), ROOTLESS)

    def arrivals(self) -> pl.DataFrame:
        """Return ARRIVED: everything that has arrived, at first only what may belong to rollouts that are built.

        The store puts all acknowledged spans into its tables before; `now` is its clock then.
        """
        which = _EVER_BUILT if self.is_first else "true"
        sql = _ARRIVED.format(arrived=self._arrived, which=which)
        answered = self._reader.frame(sql, self._window, fresh=True, scans=self.sweeps)
        if answered.height and not self._reader.as_of:
            self._now = answered.select(pl.col("Now").first().cast(MICROSECONDS)).item()
        rows = conform(answered, ARRIVED)
        self._seen_next = rows
        return rows if self.sweeps else rows.join(self._seen, on=rows.columns, how="anti")

    def keys(self, arrived: pl.DataFrame) -> pl.DataFrame:
        """Return KEYS of the traces of ARRIVED."""
        own = conform(arrived.filter(~NAMED), KEYS).unique(maintain_order=True)
        if self.is_first and self._begin is None:
            # This sweep reads all of history: all rows of those traces that name no rollout have arrived.
            return own
        return pl.concat([own, self._by_keys(_KEYS, arrived["TraceId"], KEYS)]).unique(maintain_order=True)

    def concluded(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return CONCLUDED of those of the rollouts that no runner announced."""
        named = f"BuildSpec = '{self._reader.spec}' AND RolloutId IN {{keys}}"
        sql = _CONCLUDED.format(transitions=rows_sql("transitions", where=named), drops=rows_sql("drops", where=named))
        return self._by_keys(sql, rollouts, CONCLUDED)

    def owners(self, traces: pl.Series) -> pl.DataFrame:
        """Return OWNERS of traces."""
        return owners_of(self._by_keys(_NAMES_THEN, traces, _NAMING)) if self._reader.as_of else self._by_keys(_OWNERS, traces, OWNERS)

    def activity(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return ACTIVITY of rollouts."""
        return self._by_keys(_ACTIVITY, rollouts, ACTIVITY)

    def traces(self, traces: pl.Series) -> pl.DataFrame:
        """Return TRACES."""
        return self._by_keys(_TRACES, traces, TRACES)

    def roots(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return ROOTS of all attempts of rollouts."""
        return self._by_keys(_ROOTS.replace("{which}", _OF_KEYS), rollouts, ROOTS)

    def tally(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return TALLY of all rows that name rollouts, and of those in the same traces that name none."""
        named = self._by_keys(_TALLY.replace("{which}", _OF_KEYS), rollouts, TALLY)
        nameless = self._by_keys(_TALLY.replace("{which}", _NAMELESS), named["TraceId"], TALLY)
        return pl.concat([named, nameless]).unique([name for name in TALLY if name != "Rows"])

    def _by_keys(self, sql: str, keys: pl.Series, schema: Schema) -> pl.DataFrame:
        key_batches = batches(keys.filter(keys != ""))
        return concat((self._reader.frame(sql.format(arrived=self._arrived, keys=constant(those))) for those in key_batches), schema)
