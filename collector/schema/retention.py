"""Retention: deletes old rows of the tables that grow with spans, except those of rollouts that a committed batch used.

In: a point in time, and a function that runs a statement. Out: fewer rows. Invariant: of a rollout that a committed batch used,
nothing is deleted: neither its spans (all spans of its traces), calls and logs, nor the rows derived from it; and derived rows
outlive their spans, so that no builder takes a rollout that was already built for a new one (docs/decisions/0007).

A trace is deleted as a whole, when its newest span both began and arrived before that time. Rows of no trace are deleted by their own time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from collector.database import Handle
from collector.schema.cluster import Layout
from collector.schema.migrations import Execute
from spangrad.errors import StoreError
from spangrad.store.names import stored

logger = logging.getLogger(__name__)

LOOK_SECONDS = 3600
"""Interval at which the embedded store checks whether a new day has begun, and retries what failed."""
_POLL_SECONDS = 0.1
_PARTITIONS_A_STATEMENT = 100
"""Most partitions of a deletion, which repeats its condition for each, within the 256 KiB that the database parses."""

_TRAINED = "SELECT RolloutId FROM spangrad_internal.batches"
# Traces whose spans name several rollouts: of those, the key table keeps the least and the greatest.
_SEVERAL = """SELECT TraceId FROM spangrad_internal.trace_rollouts
    GROUP BY TraceId HAVING min(FirstRolloutId) != max(LastRolloutId)"""
# All traces of rollout_spans with what their rows name, from tables of one row a trace. Of rollout_spans itself only those rows are read
# that these do not cover: of a trace that names several rollouts, and log records, which name rollouts for themselves alone.
_NAMES = f"""
    SELECT TraceId, RolloutKey FROM spangrad_internal.trace_keys
    UNION ALL
    SELECT TraceId, arrayJoin([assumeNotNull(FirstRolloutId), assumeNotNull(LastRolloutId)]) AS RolloutKey
    FROM spangrad_internal.trace_rollouts WHERE FirstRolloutId IS NOT NULL
    UNION ALL
    SELECT TraceId, RolloutKey FROM spangrad_internal.rollout_spans WHERE RowKind = 'evaluation_log'
    UNION ALL
    SELECT TraceId, RolloutKey FROM spangrad_internal.rollout_spans WHERE TraceId IN ({_SEVERAL})"""
# Some spans of a trace are old, some are not. Rows of a trace that are not merged yet each know a part of it.
# Every span that names a trained rollout, be it by session, conversation or trace, has that name as its RolloutKey; so has some span
# of every trace that the rollout has transitions in.
_KEPT_TRACES = f"""
    SELECT TraceId FROM spangrad_internal.trace_rollouts
    WHERE (LastSeen >= {{cutoff}} OR IngestedAt >= {{cutoff}})
        AND TraceId IN (SELECT TraceId FROM spangrad_internal.trace_rollouts WHERE FirstSeen < {{cutoff}})
    UNION ALL
    SELECT TraceId FROM ({_NAMES}) WHERE RolloutKey IN ({_TRAINED}) AND TraceId != ''"""
_OLD_TRACE = f"TraceId NOT IN ({_KEPT_TRACES})"
_OLD_SPAN = f"Timestamp < {{cutoff}} AND {_OLD_TRACE}"
_OLD_TYPED = f"IngestedAt < {{cutoff}} AND RolloutKey NOT IN ({_TRAINED}) AND {_OLD_SPAN}"
# All derived rows of a rollout are deleted at once, and after its spans, which are already deleted when this is evaluated.
_OLD_DERIVED = f"""IngestedAt < {{cutoff}} AND RolloutId NOT IN ({_TRAINED}) AND RolloutId NOT IN (
    SELECT RolloutId FROM (
        SELECT RolloutKey AS RolloutId FROM spangrad_internal.rollout_spans
        UNION ALL
        SELECT RolloutId FROM spangrad_internal.transitions WHERE IngestedAt >= {{cutoff}}
        UNION ALL
        SELECT RolloutId FROM spangrad_internal.drops WHERE IngestedAt >= {{cutoff}}
        UNION ALL
        SELECT RolloutId FROM spangrad_internal.builds WHERE IngestedAt >= {{cutoff}})
    WHERE RolloutId IN (SELECT RolloutId FROM spangrad_internal.{{table}} WHERE IngestedAt < {{cutoff}}))"""
_NAMES_TRAINED = " OR ".join(
    f"{name} IN ({_TRAINED})"
    for name in (
        "LogAttributes['spangrad.rollout.id']",
        "ResourceAttributes['spangrad.rollout.id']",
        "LogAttributes['session.id']",
        "LogAttributes['gen_ai.conversation.id']",
    )
)

OLD = {
    "rollout_spans": _OLD_TYPED,
    "attempts": f"IngestedAt < {{cutoff}} AND RolloutId NOT IN ({_TRAINED}) AND {_OLD_SPAN}",
    "calls": _OLD_TYPED,
    "otel_traces": _OLD_SPAN,
    "otel_logs": f"{_OLD_SPAN} AND NOT ({_NAMES_TRAINED})",
    "dropped_attributes": f"IngestedAt < {{cutoff}} AND {_OLD_SPAN}",
    "trace_keys": "IngestedAt < {cutoff} AND (TraceId, RolloutKey) NOT IN (SELECT TraceId, RolloutKey"
    " FROM spangrad_internal.rollout_spans WHERE RolloutKey IN (SELECT RolloutKey FROM spangrad_internal.trace_keys))",
    "trace_rollouts": f"LastSeen < {{cutoff}} AND IngestedAt < {{cutoff}} AND {_OLD_TRACE}",
    "rewards": _OLD_DERIVED,
    "transitions": _OLD_DERIVED,
    "drops": _OLD_DERIVED,
    "tool_calls": _OLD_DERIVED,
    "builds": _OLD_DERIVED,
    "claims": "IngestedAt < {cutoff}",
}
"""Table -> condition of the rows to delete, in this order. Tables that are not listed are kept: they record what was trained."""


def cutoff(execute: Execute, ttl_days: int) -> int:
    """Return the start of the store's day, `ttl_days` ago, in seconds since 1970: whole days are deleted, one at a time."""
    return int(execute(f"SELECT toUnixTimestamp(toStartOfDay(now() - INTERVAL {ttl_days} DAY))"))


def expire(
    execute: Execute,
    before: int,
    layout: Layout,
    report: Callable[[str], None] = logger.info,
    stop: threading.Event | None = None,
) -> dict[str, int]:
    """Delete the rows older than a point in time, in seconds since 1970; return their number by table once they are gone.

    Rows that replace each other are counted each. Once `stop` is set, no further statement begins; a deletion that has begun goes on.

    Raises:
        StoreError: the store refused a statement, or a deletion failed.
    """
    stop = stop or threading.Event()
    expired = dict[str, int]()
    for table in OLD:
        old = _old(table, before, layout)
        if reason := _cancel_failed(execute, table, layout):
            report(f"cancelled an earlier deletion of old rows of {stored(table)}, which had failed: {reason}")
        _await_deletions(execute, table, layout, stop)
        if stop.is_set():
            return expired
        # A deletion evaluates its condition anew for each part of the partitions that it names, with all that this reads of other tables.
        counts = execute(f"SELECT _partition_id, count() FROM {stored(table)} WHERE {old} GROUP BY _partition_id ORDER BY _partition_id")
        rows = {partition: int(count) for partition, count in (line.split("\t") for line in counts.splitlines())}
        partitions = list(rows)
        for first in range(0, len(partitions), _PARTITIONS_A_STATEMENT):
            statement = deletion(table, before, layout, partitions[first : first + _PARTITIONS_A_STATEMENT], layout.on_cluster)
            # Replicas that find different rows, because one has not arrived at the other yet, take over one another's result.
            execute(f"{statement} SETTINGS mutations_sync = 0, allow_nondeterministic_mutations = 1")
            _await_deletions(execute, table, layout, stop)
            if stop.is_set():
                return expired
        if rows:
            expired[table] = sum(rows.values())
            report(f"deleted {expired[table]} old rows of {stored(table)}")
    return expired


def deletion(table: str, before: int, layout: Layout, partitions: Iterable[str], on_cluster: str = "") -> str:
    """Return the statement that deletes the rows of some partitions older than a point in time, in seconds since 1970."""
    where = _old(table, before, layout)
    deletions = ", ".join(f"DELETE IN PARTITION ID '{partition}' WHERE {where}" for partition in partitions)
    return f"ALTER TABLE {stored(layout.local(table))}{on_cluster} {deletions}"


def _old(table: str, before: int, layout: Layout) -> str:
    return layout.reading(OLD[table].format(cutoff=f"fromUnixTimestamp({before})", table=table))


def _unfinished(table: str, layout: Layout) -> str:
    """Return the condition of a server's unfinished mutations of a table, as rows of system.mutations."""
    return f"{_of_table(table, layout)} AND NOT is_done AND NOT is_killed"


def _of_table(table: str, layout: Layout) -> str:
    return f"database = '{stored(table).split('.')[0]}' AND table = '{layout.local(table)}'"


def _mutations(layout: Layout) -> str:
    return f"clusterAllReplicas('{layout.cluster}', system.mutations)" if layout.cluster else "system.mutations"


def _cancel_failed(execute: Execute, table: str, layout: Layout) -> str:
    """Cancel the table's failed deletions of earlier runs, which the database would try again for ever.

    Returns:
        The reason of the failure; empty: none had failed.
    """
    # Of any partition and any earlier day; whatever else was asked for, by users or by other versions of the rule, is not ours to cancel.
    # Both texts are formatted by the server itself. By text, not by id: on another shard the same id is another mutation.
    own = deletion(table, 0, layout, ["0"]).replace("\\", "\\\\").replace("'", "\\'")
    alter = f"ALTER TABLE {stored(layout.local(table))} "
    of_day_0 = "replaceRegexpAll(command, 'fromUnixTimestamp\\\\(\\\\d+\\\\)', 'fromUnixTimestamp(0)')"
    of_partition_0 = f"replaceRegexpOne({of_day_0}, 'PARTITION ID \\'\\\\w+\\'', 'PARTITION ID \\'0\\'')"
    failed = (
        f"{_unfinished(table, layout)} AND latest_fail_reason != ''"
        f" AND formatQuerySingleLineOrNull(concat('{alter}', {of_partition_0})) = formatQuerySingleLine('{own}')"
    )
    reason = execute(f"SELECT max(latest_fail_reason) FROM {_mutations(layout)} WHERE {failed}").rstrip("\n")
    if reason:
        execute(f"KILL MUTATION{layout.on_cluster} WHERE {failed}")
    return reason[:500]


def _await_deletions(execute: Execute, table: str, layout: Layout, stop: threading.Event) -> None:
    """Wait for the table's mutations; poll, since they may take longer than a connection lives."""
    # One of the reasons stands for all; servers and shards have mutations of equal ids.
    sql = f"""SELECT count(), argMax(mutation_id, latest_fail_reason), argMax(hostName(), latest_fail_reason), max(latest_fail_reason)
        FROM {_mutations(layout)} WHERE {_unfinished(table, layout)}"""
    while not stop.is_set():
        count, mutation, host, reason = execute(sql).rstrip("\n").split("\t")
        if reason:
            raise StoreError(
                f"old rows of {stored(table)} can't be deleted, as its mutation {mutation} on {host} fails: {reason[:500]}. Remove"
                f" the cause; or, if the mutation is your own, cancel it there by KILL MUTATION WHERE mutation_id = '{mutation}'"
                f" AND {_of_table(table, layout)}. Expiry's own is cancelled by its next run."
            )
        if count == "0":
            return
        stop.wait(_POLL_SECONDS)


class Expiry:
    """Expiry of the embedded store: a thread that deletes old rows once a day."""

    def __init__(self, open_handle: Callable[[], Handle], ttl_days: int) -> None:
        """Start the thread; `open_handle` opens a session for it."""
        self._open = open_handle
        self._ttl_days = ttl_days
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expiry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop before the next statement."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the running statement, which may have been cancelled."""
        self._thread.join()

    def _run(self) -> None:
        handle = self._open()
        try:
            done: int | None = None
            while not self._stop.is_set():
                try:
                    done = self._expire_if_due(lambda sql: handle.query(sql).body.decode(), done)
                except StoreError as error:
                    if not self._stop.is_set():
                        logger.error("old rows were not all deleted, next try in %d s: %s", LOOK_SECONDS, error)
                self._stop.wait(LOOK_SECONDS)
        finally:
            handle.close()

    def _expire_if_due(self, execute: Execute, done: int | None) -> int:
        before = cutoff(execute, self._ttl_days)
        if before != done:
            expire(execute, before, Layout(), stop=self._stop)
        return before
