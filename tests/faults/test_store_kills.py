"""The store killed while it stores: what it acknowledged is there, and what came twice counts once (law 1)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from clickhouse_connect.driver.client import Client

from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.deliveries import Load, judge
from tests.support.load_spans import Body, Held, Rollouts
from tests.support.servers import post, running_store, start_store, store_answers, store_settings

KILLS = 20


@pytest.mark.slow
def test_store_killed_20_times_loses_no_acknowledged_span(tmp_path: Path, chance: Random, report: Callable[[str], None]) -> None:
    store, log, run = store_settings(tmp_path / "data"), tmp_path / "log", uuid.uuid4().hex[:8]
    load = Load(store.otlp_http_port, store.otlp_grpc_port, Rollouts(chance.randrange(2**32), run).bodies)
    began = time.monotonic()
    for kill in range(KILLS):
        # As it comes; with an insert always under way; and, each third, without a journal, but for what the life before left in it.
        child = start_store(store.model_copy(update={"settle_seconds": (2, 0.02, 0)[kill % 3]}), log)
        # One in four dies at some point of its start.
        if chance.random() < 0.75:
            wait_until(lambda: store_answers(store), 60, "the store", [child], poll_seconds=0.02)
        time.sleep(chance.uniform(0, 1.5))
        child.process.kill()
        child.process.wait()
        report(f"kill {kill + 1}, {load.tally.bodies} bodies acknowledged, {load.tally.broken} tries broken")
    with running_store(store, log):
        tally = load.stop()
        loaded = time.monotonic() - began
        verdict = judge(store, run, tally.held)
    report(f"{KILLS} kills in {loaded:.0f} s: {tally.bodies} bodies, {verdict}")

    assert (tally.refused, verdict.faults) == ([], {})
    # Else nothing was killed between a commit and its answer.
    assert verdict.delivered > verdict.spans > 0


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [1, 200], ids=["by Python", "by the engine"])
@pytest.mark.parametrize("table", ["otel_traces", "calls"], ids=["between its tables", "before its answer"])
def test_store_killed_within_insert_keeps_each_span_once(
    tmp_path: Path, chance: Random, report: Callable[[str], None], table: str, rollouts: int
) -> None:
    """A view that sleeps holds an insert open after the first of its tables, or after the last; there the store is killed."""
    store, log, run = store_settings(tmp_path / "data"), tmp_path / "log", uuid.uuid4().hex[:8]
    body = _body(Rollouts(chance.randrange(2**32), run), rollouts)
    with running_store(store, log) as child, connect(store) as client:
        client.command("CREATE TABLE default.nothing (n UInt8) ENGINE = Null")
        client.command(f"CREATE MATERIALIZED VIEW default.slow TO default.nothing AS SELECT toUInt8(sleep(3)) AS n FROM {stored(table)}")
        load = Load(store.otlp_http_port, store.otlp_grpc_port, lambda _: iter([body]), connections=1)
        wait_until(lambda: _counts(client)["otel_traces"] == len(body.held.spans), 60, "the first table", [child], poll_seconds=0.02)
        wait_until(lambda: table == "otel_traces" or _counts(client)["calls"] > 0, 60, "the last table", [child], poll_seconds=0.02)
        child.process.kill()
        child.process.wait()
    with running_store(store, log), connect(store) as client:
        report(f"killed with {_counts(client)}")
        client.command("DROP VIEW default.slow")
        tally = load.stop()
        verdict = judge(store, run, tally.held)

    assert (tally.refused, tally.bodies, verdict.faults) == ([], 1, {})
    assert verdict.delivered >= 2 * verdict.spans == 2 * len(body.held.spans)


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [1, 200], ids=["by Python", "by the engine"])
def test_journal_after_kill_is_inserted_by_store_with_newer_tables(tmp_path: Path, chance: Random, rollouts: int) -> None:
    """Killed with everything in the journal, its last write torn; then the journal alone comes to a store of newer tables."""
    run = uuid.uuid4().hex[:8]
    first, second = (store_settings(tmp_path / name, settle_seconds=600) for name in ("first", "second"))
    factory = Rollouts(chance.randrange(2**32), run)
    bodies = [_body(factory, rollouts) for _ in range(3)]
    with running_store(first, tmp_path / "log") as child:
        assert [_posted(first, body) for body in bodies] == [200] * 3
        child.process.kill()
        child.process.wait()
    journal = (first.path / "journals" / "first").read_bytes()
    (second.path / "journals").mkdir(parents=True)
    (second.path / "journals" / "first").write_bytes(journal + journal[100:5000])
    for store in (first, second):
        with running_store(store, tmp_path / "log"):
            verdict = judge(store, run, Held.of([body.held for body in bodies]))
        assert (verdict.faults, verdict.delivered) == ({}, verdict.spans)
        assert verdict.spans == sum(len(body.held.spans) for body in bodies)


@pytest.mark.parametrize("rollouts", [1, 200], ids=["by Python", "by the engine"])
def test_store_body_delivered_3_times_counts_once(tmp_path: Path, chance: Random, rollouts: int) -> None:
    """One after the other, and together in one insert."""
    store, run = store_settings(tmp_path / "data", settle_seconds=600), uuid.uuid4().hex[:8]
    factory = Rollouts(chance.randrange(2**32), run)
    body, logs = _body(factory, rollouts), factory.logs(factory.rollout()[1])
    with running_store(store, tmp_path / "log"), connect(store) as client:
        client.command("SYSTEM STOP MERGES")
        for inserts in (1, 2, 3):
            assert [_posted(store, request) for request in (body, logs)] == [200, 200]
            # Whoever asks brings into the tables what waits.
            assert _one(client, "SELECT uniqExact(IngestedAt) FROM spangrad_internal.calls") == (inserts,)
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(_posted, [store] * 6, [body, logs] * 3)) == [200] * 6
        assert _one(client, "SELECT uniqExact(IngestedAt) FROM spangrad_internal.calls") == (4,)
        verdict = judge(store, run, Held.of([body.held, logs.held]))

    assert (verdict.faults, verdict.delivered) == ({}, 6 * verdict.spans)


def _body(factory: Rollouts, rollouts: int) -> Body:
    return factory.traces([span for _ in range(rollouts) for span in factory.rollout()[0]])


def _posted(store: StoreSettings, body: Body) -> int:
    return post(f"{store.otlp_endpoint}/v1/{body.signal}", body.content, body.headers["Content-Type"], **_packed(body))


def _packed(body: Body) -> dict[str, str]:
    return {name: value for name, value in body.headers.items() if name == "Content-Encoding"}


def _counts(client: Client) -> dict[str, int]:
    """Rows of each table that an insert of spans fills."""
    names = ("otel_traces", "rollout_spans", "calls", "trace_rollouts")
    return dict(zip(names, _one(client, f"SELECT {', '.join(f'(SELECT count() FROM {stored(name)})' for name in names)}"), strict=True))


def _one(client: Client, sql: str) -> tuple[int, ...]:
    ((*values,),) = client.query(sql).result_rows
    return tuple(values)
