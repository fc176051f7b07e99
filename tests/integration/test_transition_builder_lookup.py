"""A batch of rollouts out of a store full of them: read by their keys, and equal to what a scan of everything finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from benchmarks.lookup_data import FOREIGN_RUN, RUNS, SPANS_A_ROLLOUT, STEP, Workload
from spangrad import semconv
from spangrad.processes import wait_until
from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.built_rollouts import post, settings_of
from tests.support.servers import client_of, running_store, store_settings
from tests.support.spans import SpanFactory
from transition_builder.builder import Builder
from transition_builder.completeness.complete import decide, facts
from transition_builder.frames import Frames, conform
from transition_builder.schemas import CALLS, SPANS, Schema
from transition_builder.source.rollouts import RolloutReader

WORKLOAD = Workload(3 * RUNS * STEP, ordered=True)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """61,440 spans; the first rollouts of every run were delivered twice."""
    directory = tmp_path_factory.mktemp("full")
    settings = store_settings(directory / "data")
    with running_store(settings, directory / "store.log"):
        client = connect(settings)
        for statement in WORKLOAD.statements():
            client.command(statement)
        for run in range(RUNS):
            client.command(WORKLOAD.traces_sql(WORKLOAD.steps(run)[0].start, 16))
            client.command(WORKLOAD.logs_sql(WORKLOAD.steps(run)[0].start, 16))
        client.command("OPTIMIZE TABLE spangrad_internal.trace_rollouts FINAL")  # as merges leave it
        yield settings
        client.close()


class Recording:
    """A client that remembers what it was asked."""

    def __init__(self, client: Any) -> None:
        self.client, self.url = client, client.url
        self.asked: list[str] = []

    def query_arrow(self, sql: str, parameters: dict[str, Any], **options: Any) -> Any:
        self.asked.append(sql % {name: str(value) for name, value in parameters.items()} if parameters else sql)
        return self.client.query_arrow(sql, parameters=parameters, **options)

    def granules(self, sql: str) -> list[tuple[str, int, int]]:
        """Return each table that a statement reads, with the number of granules read, and of all its granules."""
        plan = "\n".join(row[0] for row in self.client.query(f"EXPLAIN indexes = 1 {sql}").result_rows)
        tables = re.split(r"ReadFromMergeTree \(", plan)[1:]
        steps = [(table.split(")")[0], re.findall(r"Granules: (\d+)/(\d+)", table)) for table in tables]
        return [(table, int(step[-1][0]), int(step[0][1])) for table, step in steps]


def named(store: StoreSettings, rollouts: range) -> pl.DataFrame:
    sql = f"SELECT {WORKLOAD.id_sql('number')} AS RolloutId, {WORKLOAD.trace_sql('number')} AS TraceId FROM numbers"
    frame = pl.from_arrow(client_of(store).query_arrow(f"{sql}({rollouts.start}, {len(rollouts)})", use_strings=True))
    assert isinstance(frame, pl.DataFrame)
    return frame


def read(source: RolloutReader, rollouts: pl.DataFrame) -> Frames:
    arrivals = source.arrivals(rollouts)
    owners = source.owners(arrivals)
    return source.frames(decide(facts(arrivals, owners), datetime.now(UTC), BuilderSettings()), arrivals, owners)


def everything(store: StoreSettings, table: str, schema: Schema) -> pl.DataFrame:
    columns = ", ".join("toUnixTimestamp64Nano(Timestamp) AS Timestamp" if name == "Timestamp" else name for name in schema)
    frame = pl.from_arrow(client_of(store).query_arrow(f"SELECT {columns} FROM {stored(table)} FINAL", use_strings=True))
    assert isinstance(frame, pl.DataFrame)
    return conform(frame, schema)


def comparable(frame: pl.DataFrame) -> pl.DataFrame:
    maps = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Map)]
    entries = frame.with_columns(pl.col(name).map.entries().list.sort() for name in maps)
    return entries.sort("RolloutKey", "TraceId", "SpanId", *({"ChoiceIndex", "EventIndex"} & set(frame.columns)))


@pytest.mark.parametrize("run", [0, FOREIGN_RUN])
def test_rollout_reader_read_equals_full_scan(full: StoreSettings, run: int) -> None:
    rollouts = named(full, WORKLOAD.steps(run)[0])
    frames = read(RolloutReader(client_of(full), Settings(store=full)), rollouts)
    ours = pl.col("RolloutKeySource") == "rollout"
    of_them = (ours & pl.col("RolloutKey").is_in(rollouts["RolloutId"].implode())) | (
        ~ours & pl.col("TraceId").is_in(rollouts["TraceId"].implode())
    )
    for frame, table, schema in ((frames.spans, "rollout_spans", SPANS), (frames.calls, "calls", CALLS)):
        assert_frame_equal(comparable(frame), comparable(everything(full, table, schema).filter(of_them)))
    assert frames.spans.height == STEP * (SPANS_A_ROLLOUT + 1) + STEP // 4
    assert frames.calls.height == STEP * 8
    assert frames.rollouts.height == STEP
    assert frames.answers.is_empty()


@pytest.mark.parametrize("run", [0, FOREIGN_RUN])
def test_rollout_reader_few_rollouts_are_read_without_scan(full: StoreSettings, run: int) -> None:
    recording = Recording(client_of(full))
    rollouts = named(full, WORKLOAD.steps(run)[1][:8])
    frames = read(RolloutReader(recording, Settings(store=full)), rollouts)  # type: ignore[arg-type]
    assert (frames.rollouts.height, frames.calls.height) == (8, 8 * 8)
    assert frames.spans.height == 8 * (SPANS_A_ROLLOUT + 1) + 2
    reads = [row for sql in recording.asked if "now64" not in sql for row in recording.granules(sql)]
    assert {table for table, _, _ in reads} == {
        "spangrad_internal.calls",
        "spangrad_internal.rollout_spans",
        "spangrad_internal.trace_keys",
        *(["spangrad_internal.trace_rollouts"] if run == FOREIGN_RUN else []),  # two spans name no rollout
    }
    for table, granules, whole in reads:
        # Traces lie anywhere among others': a granule each, of a table of names alone.
        most = rollouts.height if table.startswith("spangrad_internal.trace_") else whole / 4
        assert granules <= most, f"{granules} of {whole} granules of {table}"


def test_rollout_reader_begun_read_is_taken_by_the_same_rollouts(full: StoreSettings) -> None:
    first, second = (named(full, WORKLOAD.steps(FOREIGN_RUN)[2][start : start + 4]) for start in (16, 20))

    def read_arrivals(*begun: pl.DataFrame) -> tuple[pl.DataFrame, int]:
        recording = Recording(client_of(full))
        source = RolloutReader(recording, Settings(store=full))  # type: ignore[arg-type]
        for rollouts in begun:
            source.begin(rollouts)
        arrivals = source.arrivals(first)
        return comparable(arrivals), len([sql for sql in recording.asked if "spangrad_internal.calls" not in sql])

    usual, statements = read_arrivals()
    same, of_same = read_arrivals(first)
    others, of_others = read_arrivals(second)
    assert_frame_equal(same, usual)
    assert_frame_equal(others, usual)
    assert (of_same, of_others) == (statements, 2 * statements)


def test_rollout_reader_calls_of_few_rollouts_are_read_once(full: StoreSettings) -> None:
    recording = Recording(client_of(full))
    source = RolloutReader(recording, Settings(store=full))  # type: ignore[arg-type]
    rollouts = named(full, WORKLOAD.steps(0)[2][8:16])
    arrivals = source.arrivals(rollouts)
    owners = source.owners(arrivals)
    judged = decide(facts(arrivals, owners), datetime.now(UTC), BuilderSettings())
    part, whole = source.frames(judged[:3], arrivals, owners), source.frames(judged, arrivals, owners)
    of_part = pl.col("RolloutKey").is_in(judged[:3]["RolloutId"].implode())
    assert_frame_equal(comparable(part.calls), comparable(whole.calls.filter(of_part)))
    assert (whole.calls.height, part.calls.height) == (8 * 8, 3 * 8)
    statements = len([sql for sql in recording.asked if "spangrad_internal.calls" in sql])
    assert statements == 2, "the part's calls are among those read ahead, and the whole's are read again"


def test_rollout_reader_many_calls_are_not_read_ahead(full: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = named(full, WORKLOAD.steps(0)[2][24:28])
    for most, statements in ((32, 1), (31, 0)):
        monkeypatch.setattr("transition_builder.source.rollouts._FEW_CALLS", most)
        recording = Recording(client_of(full))
        source = RolloutReader(recording, Settings(store=full))  # type: ignore[arg-type]
        arrivals = source.arrivals(rollouts)
        source._calls_ahead._thread.shutdown()  # waits for what was begun
        assert len([sql for sql in recording.asked if "spangrad_internal.calls" in sql]) == statements
        assert arrivals.filter(pl.col("ScopeName") == semconv.GATEWAY_SCOPE).height == 32


@pytest.mark.parametrize("run", [0, FOREIGN_RUN])
def test_rollout_reader_reports_dropped_attributes_once(full: StoreSettings, run: int) -> None:
    rollouts = named(full, WORKLOAD.steps(run)[2][:2])
    client = client_of(full)
    source = RolloutReader(client, Settings(store=full))
    agents = read(source, rollouts).spans.filter(pl.col("SpanName") == "agent").sort("TraceId")
    trace, span = agents.select("TraceId", "SpanId").row(0)
    for signal, attributes, lossy in (("span", 2, span), ("span", 2, span), ("span", 0, agents["SpanId"][1]), ("log", 1, "f" * 16)):
        values = f"('{signal}', now64(9), '{trace}', '{lossy}', {attributes})"
        client.command(f"INSERT INTO spangrad_internal.dropped_attributes (Signal, Timestamp, TraceId, SpanId, Attributes) VALUES {values}")
    assert read(source, rollouts).dropped.rows() == [(trace, span)]
    client.close()


def test_rollout_reader_call_in_one_table_only_has_not_arrived(store: StoreSettings) -> None:
    import urllib.request

    spans = SpanFactory(run="torn")
    root = spans.root("torn-1", calls=2)
    spans.evaluation(root)
    calls = [spans.call(root, rollout="torn-1") for _ in range(2)]

    def post(*chosen: str) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", spans.otlp(*chosen), headers, method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    post()
    client = client_of(store)
    client.command(f"DELETE FROM spangrad_internal.calls WHERE RunId = 'torn' AND SpanId = '{calls[1]}'")
    builder = Builder(Settings(store=store, builder=BuilderSettings(selection=Selection(agents=".*|torn"))))
    builder.build_ready()
    built = "SELECT SpanId, Turn FROM spangrad_internal.transitions WHERE RunId = 'torn' ORDER BY Turn"
    assert client.query(built).result_rows == []
    post(calls[1])
    builder.build_ready()
    assert [tuple(row) for row in client.query(built).result_rows] == [(calls[0], 0), (calls[1], 1)]
    client.close()


def test_rollout_reader_rootless_call_in_one_table_only_has_not_arrived(store: StoreSettings) -> None:
    spans = SpanFactory(run="torn-alone")
    call = spans.call("", trace="torn-alone")
    trace = spans.trace("torn-alone")
    for row in (*spans.spans, *spans.calls):
        row |= {"RunId": "", "Mode": "", "RolloutKey": trace, "RolloutKeySource": "trace"}
    post(store, spans.otlp())
    client = client_of(store)
    client.command(f"DELETE FROM spangrad_internal.calls WHERE TraceId = '{trace}'")
    settings = settings_of(store, "torn-alone", quiet_seconds=0)
    builder = Builder(settings)
    built = f"SELECT SpanId, Reason FROM spangrad.drops WHERE BuildSpec = '{settings.builder.spec}' AND TraceId = '{trace}'"
    builder.build_ready()
    assert client.query(built).result_rows == []
    post(store, spans.otlp(call))
    wait_until(lambda: builder.build_ready().rollouts > 0, 60, "the build", poll_seconds=0.02)
    assert [tuple(row) for row in client.query(built).result_rows] == [(call, "no_reward")]
    client.close()


def test_rollout_reader_arrivals_accept_any_key_text(store: StoreSettings) -> None:
    names = ["file('/etc/passwd')", "into outfile", "o'clock \\ --", "ü\x00,"]
    nothing = RolloutReader(client_of(store), Settings(store=store)).arrivals(pl.DataFrame({"RolloutId": names, "TraceId": names}))
    assert nothing.is_empty()
