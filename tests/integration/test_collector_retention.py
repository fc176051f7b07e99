"""Retention in a real store: the rows that go are those of the rule as the guide states it, whichever tables are asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from collector.schema import retention
from collector.schema.cluster import Layout
from collector.schema.retention import OLD, deletion, expire
from spangrad.errors import StoreError
from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect, executing
from spangrad.store.names import stored
from tests.support.servers import running_store, store_settings

OLD_DAY, NEW_DAY = "2080-01-01 00:00:00", "2095-01-01 00:00:00"
DELIVERIES = 3
"""Inserts that the rows are spread over, so that a trace has several parts."""
Row = dict[str, object]


class RandomStore:
    """Rows of one store."""

    def __init__(self, seed: int) -> None:
        """Make the rows of a seed."""
        self.seed = seed
        self.deliveries: list[dict[str, list[Row]]] = [{} for _ in range(DELIVERIES)]
        """Rows by table, of each delivery."""
        self._inserts = self.deliveries
        self._random = random.Random(seed)
        choose = self._random.choice
        self._rollouts, self._sessions = self._names("rollout", 4), self._names("session", 2)
        self._conversations = self._names("conversation", 2)
        owned: dict[str, set[str]] = {}
        for trace in self._names("trace", 6):
            # A row of trace_rollouts knows of one delivery alone.
            self._inserts = self._random.sample(self.deliveries, choose([1, DELIVERIES]))
            named = self._random.sample(self._rollouts, choose([0, 0, 1, 1, 2, 3, 4, 4]))
            days = choose([[OLD_DAY], [OLD_DAY], [NEW_DAY], [OLD_DAY, NEW_DAY]])
            for owner in self._trace(trace, named, days):
                owned.setdefault(owner, set()).add(trace)
        self._inserts = self.deliveries
        for _ in range(4):
            self._log(choose(["", *self._names("trace", 8)]))
        for name in [*self._rollouts, *self._sessions, *self._conversations, *self._names("trace", 6)]:
            self._conclusions(name, sorted(owned.get(name, ())))

    def _names(self, kind: str, count: int) -> list[str]:
        return [f"{kind}-{self.seed}-{number}" for number in range(count)]

    def _likely(self, probability: float) -> bool:
        return self._random.random() < probability

    def _add(self, table: str, row: Row) -> None:
        """Deliver a row, now and then twice."""
        for _ in range(2 if self._likely(0.2) else 1):
            self._random.choice(self._inserts).setdefault(table, []).append(row)

    def _trace(self, trace: str, named: list[str], days: list[str]) -> Iterator[str]:
        """Add a trace whose spans name some rollouts, and sessions or none; yield the rollouts that its calls may be built for."""
        sessions = [("session.id", name) for name in self._sessions] + [("gen_ai.conversation.id", name) for name in self._conversations]
        known = self._random.sample(sessions, self._random.choice([0, 0, 1, 2]))
        names = [("spangrad.rollout.id", name) for name in named]
        for number in range(len(names) + self._random.randrange(1, 4)):
            # The first spans name every rollout of the trace, the others some name or none.
            name = names[number : number + 1] or self._random.sample([*known, *names], self._random.choice([0, min(1, len(known + names))]))
            attributes = dict([*name, *(self._random.sample(known, 1) if known and self._likely(0.3) else [])])
            if "spangrad.rollout.id" in attributes and self._likely(0.4):
                attributes["spangrad.rollout.final"] = "true"
            day = self._random.choice(days)
            span: Row = {
                "Timestamp": day,
                "TraceId": trace,
                "SpanId": f"{trace}-{number}",
                "SpanName": "rollout" if "spangrad.rollout.final" in attributes else "work",
                "ScopeName": self._random.choice(["spangrad.gateway", "test"]),
                "SpanAttributes": attributes,
            }
            if self._likely(0.2):
                span |= {"Events.Timestamp": [day], "Events.Name": ["gen_ai.evaluation.result"], "Events.Attributes": [{}]}
            self._add("otel_traces", span)
            yield next(
                (attributes[key] for key in ("spangrad.rollout.id", "session.id", "gen_ai.conversation.id") if key in attributes), trace
            )
            if self._likely(0.2):
                self._add(
                    "dropped_attributes",
                    {"Timestamp": day, "TraceId": trace, "SpanId": f"{trace}-{number}", "Attributes": 1, "IngestedAt": self._day()},
                )
        if self._likely(0.5):
            self._log(trace)
        if self._likely(0.15):
            # All of it began long ago, and the last of it arrived lately.
            late: Row = {"RolloutKey": trace, "RolloutKeySource": "trace", "RowKind": "span", "Timestamp": OLD_DAY, "TraceId": trace}
            self._add("rollout_spans", late | {"SpanId": f"{trace}-late", "IngestedAt": NEW_DAY})
            self._add("trace_rollouts", {"TraceId": trace, "FirstSeen": OLD_DAY, "LastSeen": OLD_DAY, "IngestedAt": NEW_DAY})

    def _day(self) -> str:
        return self._random.choice([OLD_DAY, OLD_DAY, NEW_DAY])

    def _log(self, trace: str) -> None:
        names = [("spangrad.rollout.id", self._rollouts), ("session.id", self._sessions), ("gen_ai.conversation.id", self._conversations)]
        key, values = self._random.choice([*names, ("any", ["none"])])
        event = "gen_ai.evaluation.result" if self._likely(0.7) else ""
        log: Row = {"Timestamp": self._day(), "TraceId": trace, "EventName": event, "LogAttributes": {key: self._random.choice(values)}}
        self._add("otel_logs", log)

    def _conclusions(self, name: str, traces: list[str]) -> None:
        """Add rows derived from a rollout, and the batch that trained it, if one did."""
        build: Row = {"RunId": "run", "RolloutId": name, "BuildSpec": "b", "Revision": 1, "Content": 7}
        for table in ("rewards", "drops", "tool_calls", "builds"):
            if self._likely(0.5):
                self._add(table, build | {"IngestedAt": self._day()} | ({"Name": "r"} if table == "rewards" else {}))
        for trace in traces if self._likely(0.7) else []:
            call: Row = {"TraceId": trace, "CallId": trace, "Policy": "p", "Timestamp": OLD_DAY}
            self._add("transitions", build | call | {"IngestedAt": self._day()})
        if self._likely(0.3):
            self._add("claims", {"BuildSpec": "b", "RunId": "run", "RolloutId": name, "IngestedAt": self._day()})
        if self._likely(0.25):
            batch: Row = {"Policy": "p", "Branch": "main", "BatchId": f"batch-{self.seed}", "Version": 1, "RunId": "run", "GroupId": "g"}
            self._add("batches", batch | {"RolloutId": name, "BuildSpec": "b", "Revision": 1})


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


def test_expire_deletes_in_partitions_with_old_rows_alone(own_store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_PARTITIONS_A_STATEMENT", 2)
    days = ["2080-01-01", "2080-01-02", "2080-01-03", "2095-01-01"]
    with closing(connect(own_store)) as client, executing(own_store) as execute:
        insert(client, "otel_traces", [{"Timestamp": f"{day} 00:00:00", "TraceId": day} for day in days])
        assert expire(execute, BEFORE, Layout())["otel_traces"] == 3
        assert execute("SELECT TraceId FROM otel.otel_traces") == "2095-01-01\n"
        visited = r"SELECT groupArray(extract(command, 'PARTITION ID \'(\\w+)\'')) FROM system.mutations WHERE table = 'otel_traces'"
        commands = f"{visited} GROUP BY mutation_id ORDER BY ALL"
        assert execute(commands) == "['20800101','20800102']\n['20800103']\n"


def await_failure(execute: Callable[[str], str]) -> None:
    failed = "SELECT count() FROM system.mutations WHERE table = 'claims' AND latest_fail_reason != ''"
    wait_until(lambda: execute(failed) == "1\n", 30, "a failed mutation", [], poll_seconds=0.05)


def test_expire_failed_deletion_of_earlier_run_is_cancelled(own_store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fails on the day before alone.
    throws = f"throwIf(RolloutId = 'poison' AND toUnixTimestamp({{cutoff}}) = {BEFORE - 86400})"
    monkeypatch.setitem(OLD, "claims", f"IngestedAt < {{cutoff}} AND RolloutId != 'it''s \\\\' AND {throws} = 0")
    with closing(connect(own_store)) as client, executing(own_store) as execute:
        insert(client, "claims", [{"RolloutId": "poison", "IngestedAt": OLD_DAY}])
        execute(f"{deletion('claims', BEFORE - 86400, Layout(), ['all'])} SETTINGS mutations_sync = 0")
        await_failure(execute)
        lines: list[str] = []
        assert expire(execute, BEFORE, Layout(), report=lines.append) == {"claims": 1}
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
