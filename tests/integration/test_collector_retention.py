"""Retention in a real store: the rows that go are those of the rule as the guide states it, whichever tables are asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from collector.schema.cluster import Layout
from collector.schema.retention import OLD, Expired, deletion, expire
from spangrad.errors import StoreError
from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect, executing
from spangrad.store.names import stored
from tests.support.retention_stores import OLD_DAY, RandomStore, Row
from tests.support.servers import running_store, store_settings

BEFORE = 3786912000
"""2090-01-01, between the old and the new day; rows of today are old by then."""
STORES = 40
YEAR = "2090"
DERIVED = ("rewards", "transitions", "drops", "tool_calls", "builds")
Tables = dict[str, list[dict[str, Any]]]


@pytest.fixture
def own_store(tmp_path: Path) -> Generator[StoreSettings]:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log"):
        yield settings


def insert(client: Client, table: str, rows: list[Row]) -> None:
    client.raw_insert(stored(table), insert_block="\n".join(map(json.dumps, rows)), fmt="JSONEachRow")


def read(client: Client) -> Tables:
    """All rows of the tables that retention reads or writes, each once: their names and times, whatever is merged already."""
    columns = {
        "rollout_spans": "DISTINCT TraceId, SpanId, EventIndex, RolloutKey, Timestamp, IngestedAt >= '2090-01-01' AS Late",
        "attempts": "DISTINCT TraceId, SpanId, RolloutId, Timestamp",
        "calls": "DISTINCT TraceId, SpanId, RolloutKey, Timestamp",
        "otel_traces": "DISTINCT TraceId, SpanId, Timestamp",
        "otel_logs": "DISTINCT TraceId, Timestamp, LogAttributes",
        "dropped_attributes": "DISTINCT TraceId, SpanId, Timestamp, IngestedAt",
        "trace_keys": "DISTINCT TraceId, RolloutKey",
        "trace_rollouts": "TraceId, min(FirstSeen) AS First, max(LastSeen) AS Last, max(t.IngestedAt) AS Arrived",
        **dict.fromkeys(DERIVED, "DISTINCT RolloutId, CallId, TraceId, IngestedAt"),
        "builds": "DISTINCT RolloutId, IngestedAt",
        "claims": "DISTINCT RolloutId, IngestedAt",
        "batches": "DISTINCT RolloutId",
    }
    tables: Tables = {}
    for table, selected in columns.items():
        sql = f"SELECT {selected} FROM {stored(table)} AS t {'' if 'DISTINCT' in selected else 'GROUP BY TraceId'} ORDER BY ALL"
        tables[table] = [json.loads(line) for line in client.raw_query(sql, fmt="JSONEachRow").splitlines()]
    return tables


def kept(tables: Tables) -> Tables:
    """The rows that retention keeps, by the rule said plainly: whole traces, then what was concluded of rollouts without spans."""
    trained = {row["RolloutId"] for row in tables["batches"]}
    kept_traces = {
        row["TraceId"] for row in tables["trace_rollouts"] if row["First"] < YEAR and (row["Last"] >= YEAR or row["Arrived"] >= YEAR)
    }
    kept_traces |= {row["TraceId"] for row in tables["rollout_spans"] if row["RolloutKey"] in trained and row["TraceId"]}
    kept_traces |= {row["TraceId"] for row in tables["transitions"] if row["RolloutId"] in trained and row["TraceId"]}
    after = dict(tables)

    def keep(table: str, keeps: Callable[[dict[str, Any]], bool]) -> None:
        after[table] = [row for row in tables[table] if keeps(row)]

    def is_kept_span(row: dict[str, Any]) -> bool:
        return row["Timestamp"] >= YEAR or row["TraceId"] in kept_traces or row.get("IngestedAt", "") >= YEAR or bool(row.get("Late"))

    def names_trained(row: dict[str, Any]) -> bool:
        return any(row["LogAttributes"].get(key) in trained for key in ("spangrad.rollout.id", "session.id", "gen_ai.conversation.id"))

    keep("rollout_spans", lambda row: is_kept_span(row) or row["RolloutKey"] in trained)
    keep("attempts", lambda row: is_kept_span(row) or row["RolloutId"] in trained)
    keep("calls", lambda row: is_kept_span(row) or row["RolloutKey"] in trained)
    keep("otel_traces", is_kept_span)
    keep("otel_logs", lambda row: is_kept_span(row) or names_trained(row))
    keep("dropped_attributes", is_kept_span)
    keys = {(row["TraceId"], row["RolloutKey"]) for row in after["rollout_spans"]}
    keep("trace_keys", lambda row: (row["TraceId"], row["RolloutKey"]) in keys)
    keep("trace_rollouts", lambda row: row["Last"] >= YEAR or row["Arrived"] >= YEAR or row["TraceId"] in kept_traces)
    with_spans = {row["RolloutKey"] for row in after["rollout_spans"]}
    young = {row["RolloutId"] for table in ("transitions", "drops", "builds") for row in tables[table] if row["IngestedAt"] >= YEAR}
    for table in DERIVED:
        keep(table, lambda row: row["IngestedAt"] >= YEAR or row["RolloutId"] in trained | with_spans | young)
    keep("claims", lambda row: row["IngestedAt"] >= YEAR)
    return after


def test_expire_random_stores_keep_rows_of_plain_rule(own_store: StoreSettings) -> None:
    with closing(connect(own_store)) as client, executing(own_store) as execute:
        for delivery in zip(*(RandomStore(seed).deliveries for seed in range(STORES)), strict=True):
            for table in sorted({name for tables in delivery for name in tables}):
                insert(client, table, [row for tables in delivery for row in tables.get(table, ())])
        before = read(client)
        expected = kept(before)
        for table in OLD:
            assert before[table] != expected[table] != [], f"the stores say nothing about {table}"
        expire(execute, BEFORE, Layout())
        assert read(client) == expected


def await_failure(execute: Callable[[str], str]) -> None:
    failed = "SELECT count() FROM system.mutations WHERE table = 'claims' AND latest_fail_reason != ''"
    wait_until(lambda: execute(failed) == "1\n", 30, "a failed mutation", [], poll_seconds=0.05)


def test_expire_failed_deletion_of_earlier_run_is_cancelled(own_store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fails on the day before alone.
    throws = f"throwIf(RolloutId = 'poison' AND toUnixTimestamp({{cutoff}}) = {BEFORE - 86400})"
    monkeypatch.setitem(OLD, "claims", f"IngestedAt < {{cutoff}} AND RolloutId != 'it''s \\\\' AND {throws} = 0")
    with closing(connect(own_store)) as client, executing(own_store) as execute:
        insert(client, "claims", [{"RolloutId": "poison", "IngestedAt": OLD_DAY}])
        execute(f"{deletion('claims', BEFORE - 86400, Layout())} SETTINGS mutations_sync = 0")
        await_failure(execute)
        lines: list[str] = []
        assert expire(execute, BEFORE, Layout(), report=lines.append) == [Expired("claims", 1)]
        assert "cancelled an earlier deletion of old rows of spangrad_internal.claims" in lines[0]
        assert "throwIf" in lines[0]
        assert execute("SELECT count() FROM spangrad_internal.claims") == "0\n"


def test_expire_failed_deletion_of_user_is_named_and_left(own_store: StoreSettings) -> None:
    with closing(connect(own_store)) as client, executing(own_store) as execute:
        insert(client, "claims", [{"RolloutId": "poison", "IngestedAt": OLD_DAY}])
        execute("ALTER TABLE spangrad_internal.claims DELETE WHERE throwIf(RolloutId = 'poison') SETTINGS mutations_sync = 0")
        await_failure(execute)
        mutation = execute("SELECT mutation_id FROM system.mutations WHERE table = 'claims' AND NOT is_done").strip()
        with pytest.raises(StoreError, match=rf"mutation {mutation} on \S+ fails: .* mutation_id = '{mutation}' AND database = '\w+'"):
            expire(execute, BEFORE, Layout())
        assert execute("SELECT mutation_id FROM system.mutations WHERE table = 'claims' AND NOT is_done").strip() == mutation
