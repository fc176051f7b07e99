"""The schema in real engines: every variant is understood, migrations run over HTTP, old rows go and trained ones stay."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError

from collector import database
from collector.schema.cluster import Layout
from collector.schema.columns import meanings
from collector.schema.migrations import SCHEMA, Execute, migrate, preamble, read_migrations
from collector.schema.retention import OLD, cutoff, expire
from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.servers import running_store, store_settings

BEFORE = 3786912000
"""2090-01-01. Rows that are inserted today are old by then; what is to be younger says so."""
OLD_DAY, NEW_DAY = "2080-01-01", "2095-01-01"
TABLES = [*OLD, "batches", "policy_versions"]

SHARDED = Layout("prod", sharded=True)
_CLUSTER = """<tcp_port>9000</tcp_port>
<remote_servers><prod><shard><replica><host>127.0.0.1</host><port>9000</port></replica></shard></prod></remote_servers>
</clickhouse>"""
_REPLICATED = re.compile(r"Replicated(\w*MergeTree)\('[^']*', '[^']*'(?:, )?")


@contextmanager
def one_shard(directory: Path) -> Generator[Execute]:
    """Statements run by an engine of this process on `directory`; nothing listens: the shard is the engine itself."""
    config = directory / "config"
    config.mkdir()
    (config / "config.xml").write_text((database.CONFIG / "config.xml").read_text().replace("</clickhouse>", _CLUSTER))
    # The embedded store's own rights deny other servers.
    users = re.sub(r"<grants>.*</grants>", "", (database.CONFIG / "users.xml").read_text(), flags=re.DOTALL)
    (config / "users.xml").write_text(users)
    with patch.object(database, "CONFIG", config):
        opened = database.EmbeddedDatabase(directory / "data")
        handle = opened.handle()
    handle.query("SET distributed_product_mode = 'global'")
    handle.query("SET distributed_foreground_insert = 1")
    try:
        yield lambda sql: handle.query(_REPLICATED.sub(r"\1(", sql.replace(SHARDED.on_cluster, ""))).body.decode()
    finally:
        handle.close()
        opened.close()


@contextmanager
def executing(store: StoreSettings) -> Generator[Execute]:
    client = connect(store)
    yield lambda sql: client.raw_query(sql).decode()
    client.close()


@pytest.fixture(params=["one server", "sharded"])
def laid_out(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[tuple[Execute, Layout]]:
    """An empty store of each layout."""
    if request.param == "sharded":
        with one_shard(tmp_path) as execute:
            migrate(execute, SHARDED)
            yield execute, SHARDED
        return
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log"), executing(settings) as execute:
        yield execute, Layout()


# --- what the engine understands ---


@pytest.fixture(scope="module")
def client(store: StoreSettings) -> Generator[Client]:
    client = connect(store)
    yield client
    client.close()


def understood(client: Client, statement: str) -> bool:
    """Return whether the database's own parser accepts a statement."""
    try:
        client.query("SELECT formatQuery({sql:String})", parameters={"sql": statement})
    except DatabaseError as error:
        if error.code != 62:
            raise
        return False
    return True


@pytest.mark.parametrize("layout", [Layout(), Layout("prod"), SHARDED], ids=str)
def test_schema_statements_of_every_layout_parse(client: Client, layout: Layout) -> None:
    statements = [*preamble(layout), *(statement for migration in read_migrations(SCHEMA) for statement in migration.script(layout))]
    definitions = [statement for statement in statements if not statement.startswith("INSERT")]
    assert len(definitions) > 25
    assert [statement for statement in definitions if not understood(client, statement)] == []


def test_schema_broken_statement_does_not_parse(client: Client) -> None:
    [statement] = Layout("prod").statements(["CREATE TABLE IF NOT EXISTS otel.t (a String) ENGINE = MergeTree ORDERED BY a"])
    assert not understood(client, statement)


def comments(execute: Execute) -> dict[tuple[str, str], str]:
    """Return the comments of the public tables' columns."""
    lines = execute("SELECT table, name, comment FROM system.columns WHERE database = 'spangrad'").splitlines()
    return {(table, column): comment for table, column, comment in (line.split("\t") for line in lines)}


def test_columns_of_public_tables_have_their_meaning_as_comment(laid_out: tuple[Execute, Layout]) -> None:
    execute, layout = laid_out
    written = comments(execute)

    assert [column for column, comment in written.items() if not comment] == []
    assert written["attempts", "Calls"] != written["rollouts", "Calls"] == meanings()["every"]["Calls"]
    assert {*meanings()["every"]} <= {column for _, column in written}
    assert {(table, column) for table, columns in meanings().items() if table != "every" for column in columns} <= written.keys()
    execute("ALTER TABLE spangrad.rollouts COMMENT COLUMN Mode 'other'")
    execute("CREATE MATERIALIZED VIEW spangrad.own ENGINE = MergeTree ORDER BY Mode AS SELECT RunId, Mode FROM spangrad_internal.attempts")
    migrate(execute, layout)
    assert {place: comment for place, comment in comments(execute).items() if place[0] in {table for table, _ in written}} == written
    assert comments(execute)["own", "Mode"] == ""


# --- over all shards ---


def insert(execute: Execute, table: str, **row: str) -> None:
    """A row of SQL expressions."""
    execute(f"INSERT INTO {stored(table)} ({', '.join(row)}) SELECT {', '.join(row.values())}")


@contextmanager
def at_once(execute: Execute) -> Generator[Execute]:
    """Put off inserts of rows: each table gets all of a kind in one statement at the end, since each statement runs all views."""
    rows: dict[str, list[str]] = {}
    yield lambda sql: rows.setdefault(sql.partition(" SELECT ")[0], []).append(sql.partition(" SELECT ")[2]) or ""
    for head, selected in rows.items():
        execute(f"{head} SELECT {' UNION ALL SELECT '.join(selected)}")


def span(execute: Execute, trace: str, name: str, day: str, *, scope: str = "test", **attributes: str) -> None:
    pairs = ", ".join(f"'{key.replace('__', '.')}', '{value}'" for key, value in attributes.items())
    insert(
        execute,
        "otel_traces",
        Timestamp=f"toDateTime64('{day}', 9)",
        TraceId=f"'{trace}'",
        SpanId=f"'{name}'",
        SpanName=f"'{name}'",
        ScopeName=f"'{scope}'",
        SpanAttributes=f"map({pairs})",
    )


def conclude(execute: Execute, table: str, rollout: str, day: str, trace: str = "", call: str = "c") -> None:
    own = {"BuildSpec": "'b'", "Revision": "1", "Content": "7", **({"Name": "'r'"} if table == "rewards" else {"GroupId": "'g'"})}
    insert(
        execute,
        table,
        RunId="'run'",
        RolloutId=f"'{rollout}'",
        IngestedAt=f"toDateTime64('{day}', 6)",
        **own,
        **({} if table == "builds" else {"TraceId": f"'{trace}'", "CallId": f"'{call}'"}),
        **({"Policy": "'p'", "Timestamp": "toDateTime64('2080-01-01', 9)"} if table == "transitions" else {}),
    )


def commit(execute: Execute, *rollouts: str) -> None:
    """One batch, and the version that it made."""
    names = {"Policy": "'p'", "Branch": "'main'", "Version": "1", "BatchId": "'one'", "RunId": "'run'"}
    for rollout in rollouts:
        insert(execute, "batches", **names, GroupId="'g'", RolloutId=f"'{rollout}'", BuildSpec="'b'", Revision="1")
    insert(execute, "policy_versions", **names, Status="'committed'")
    file = {"Method": "'sft'", "Name": "'rows.jsonl'", "Sha256": "'00'"}
    insert(execute, "batch_files", **{name: value for name, value in names.items() if name != "RunId"}, **file)


def test_schema_views_count_spans_delivered_twice_once(laid_out: tuple[Execute, Layout]) -> None:
    execute, _ = laid_out
    for _ in range(2):
        with at_once(execute) as put:
            for trace in ("t1", "t2", "t3"):
                span(put, trace, "chat", OLD_DAY, scope="spangrad.gateway", spangrad__rollout__id=f"rollout-{trace}")
                span(put, trace, "rollout", OLD_DAY, spangrad__rollout__id=f"rollout-{trace}", spangrad__rollout__final="true")
                conclude(put, "rewards", f"rollout-{trace}", OLD_DAY, trace)
                conclude(put, "transitions", f"rollout-{trace}", OLD_DAY, trace)
                conclude(put, "drops", f"rollout-{trace}", OLD_DAY, trace, call="d")
                conclude(put, "tool_calls", f"rollout-{trace}", OLD_DAY, trace)
                conclude(put, "builds", f"rollout-{trace}", OLD_DAY)
                commit(put, f"rollout-{trace}")

    counted = {
        view: execute(f"SELECT {column}, count() FROM spangrad.{view} GROUP BY ALL ORDER BY ALL").split("\n")[:-1]
        for view, column in {
            "rollout_spans": "TraceId, SpanName",
            "rollout_traces": "RolloutId",
            "calls": "TraceId",
            "attempts": "RolloutId",
            "rewards": "RolloutId",
            "transitions": "RolloutId",
            "drops": "RolloutId",
            "tool_calls": "RolloutId",
            "rollouts": "RolloutId",
            "steps": "Version",
            "builds": "RolloutId",
            "batches": "RolloutId",
            "policy_versions": "Version",
            "batch_files": "Version, Name",
            "lineage": "Version, BatchId, RolloutId, TraceId",
            "already_trained": "RolloutId",
        }.items()
    }
    each = [f"rollout-{trace}\t1" for trace in ("t1", "t2", "t3")]
    assert counted == {
        "rollout_spans": [f"{trace}\t{name}\t1" for trace in ("t1", "t2", "t3") for name in ("chat", "rollout")],
        "calls": ["t1\t1", "t2\t1", "t3\t1"],
        **dict.fromkeys(
            ("rollout_traces", "attempts", "rewards", "transitions", "drops", "tool_calls", "rollouts", "builds", "batches"), each
        ),
        "policy_versions": ["1\t1"],
        "steps": ["1\t1"],
        "batch_files": ["1\trows.jsonl\t1"],
        "lineage": [f"1\tone\trollout-{trace}\t{trace}\t1" for trace in ("t1", "t2", "t3")],
        "already_trained": [],
    }


# --- what is kept ---


def test_migrate_creates_later_indexes_of_dropped_table_again(laid_out: tuple[Execute, Layout]) -> None:
    execute, layout = laid_out
    table = layout.local("builds")
    indexes = f"SELECT name FROM system.data_skipping_indices WHERE table = '{table}' ORDER BY name"
    before = execute(indexes)
    execute(f"DROP TABLE spangrad_internal.{table} SYNC")

    assert "idx_rollout_bounds" in before
    assert [migration.number for migration in migrate(execute, layout)] == [3, 9]
    assert execute(indexes) == before
    assert migrate(execute, layout) == []


def left(execute: Execute) -> dict[str, list[str]]:
    """The traces, or else rollouts, of the rows in each table, with how many rows each has."""
    names = {
        "batches": "RolloutId",
        "policy_versions": "BatchId",
        **dict.fromkeys(("rewards", "transitions", "drops", "tool_calls", "builds", "claims"), "RolloutId"),
    }
    return {
        table: execute(f"SELECT {names.get(table, 'TraceId')}, count() FROM {stored(table)} GROUP BY ALL ORDER BY ALL")
        .replace("\t", " ")
        .split("\n")[:-1]
        for table in TABLES
    }


def log(execute: Execute, trace: str, day: str, rollout: str = "", resource: str = "") -> None:
    insert(
        execute,
        "otel_logs",
        Timestamp=f"toDateTime64('{day}', 9)",
        TraceId=f"'{trace}'",
        EventName="'gen_ai.evaluation.result'",
        LogAttributes=f"map('spangrad.rollout.id', '{rollout}')",
        ResourceAttributes=f"map('spangrad.rollout.id', '{resource}')",
    )


def rollout(execute: Execute, rollout_id: str, trace: str, day: str) -> None:
    """A rollout of three spans, one of which does not know whose it is, three logs, two of them without a trace, and conclusions."""
    span(execute, trace, "rollout", day, spangrad__rollout__id=rollout_id, spangrad__rollout__final="true")
    span(execute, trace, "chat", day, scope="spangrad.gateway", spangrad__rollout__id=rollout_id)
    span(execute, trace, "foreign", day)
    insert(execute, "dropped_attributes", Timestamp=f"toDateTime64('{day}', 9)", TraceId=f"'{trace}'", Attributes="1")
    log(execute, trace, day)
    log(execute, "", day, rollout_id)
    log(execute, "", day, resource=rollout_id)
    for table in ("rewards", "transitions", "drops", "tool_calls", "builds"):
        conclude(execute, table, rollout_id, day, trace)


@pytest.mark.parametrize("laid_out", ["one server", pytest.param("sharded", marks=pytest.mark.slow)], indirect=True)
def test_expire_removes_old_rows_except_those_of_committed_batches(laid_out: tuple[Execute, Layout]) -> None:
    execute, layout = laid_out
    with at_once(execute) as put:
        rollout(put, "trained", "trained-1", OLD_DAY)
        # Its second attempt, which no batch used, and a trace that names the conversation that was trained on one span alone.
        span(put, "trained-2", "rollout", OLD_DAY, spangrad__rollout__id="trained")
        span(put, "chat", "turn", OLD_DAY, session__id="conversation")
        span(put, "chat", "tool", OLD_DAY)
        conclude(put, "transitions", "conversation", OLD_DAY, "chat")
        conclude(put, "builds", "conversation", OLD_DAY)
        rollout(put, "untrained", "untrained-1", OLD_DAY)
        rollout(put, "young", "young-1", NEW_DAY)
        # Began before, goes on after: nothing of it goes, nor what was concluded of it.
        span(put, "lasting-1", "rollout", OLD_DAY, spangrad__rollout__id="lasting")
        span(put, "lasting-1", "late", NEW_DAY)
        conclude(put, "transitions", "lasting", OLD_DAY, "lasting-1")
        # All of its spans are old, but its last conclusion is not.
        span(put, "doubted-1", "rollout", OLD_DAY, spangrad__rollout__id="doubted")
        conclude(put, "transitions", "doubted", OLD_DAY, "doubted-1")
        conclude(put, "drops", "doubted", NEW_DAY, "doubted-1")
        # Its last revision was written of late, of rows that are old.
        conclude(put, "transitions", "revised", OLD_DAY)
        conclude(put, "builds", "revised", NEW_DAY)
        # Trained, and its spans were lost.
        conclude(put, "transitions", "bare", OLD_DAY)
        conclude(put, "builds", "bare", OLD_DAY)
        commit(put, "trained", "conversation", "bare")

    expired = expire(execute, BEFORE, layout)

    # How many rows a trace has in its own table is the engine's business: it merges them.
    spans = ["chat 2", "lasting-1 2", "trained-1 3", "trained-2 1", "young-1 3"]
    after = left(execute)
    traces, keys = ([line.split()[0] for line in after.pop(table)] for table in ("trace_rollouts", "trace_keys"))
    assert traces == ["chat", "lasting-1", "trained-1", "trained-2", "young-1"]
    assert keys == ["chat", "lasting-1", "trained-1", "young-1"]
    assert after == {
        "rollout_spans": [" 4", "chat 2", "lasting-1 2", "trained-1 4", "trained-2 1", "young-1 4"],
        "attempts": ["trained-1 1", "young-1 1"],
        "calls": ["trained-1 1", "young-1 1"],
        "otel_traces": spans,
        "otel_logs": [" 4", "trained-1 1", "young-1 1"],
        "dropped_attributes": ["trained-1 1", "young-1 1"],
        "rewards": ["trained 1", "young 1"],
        "transitions": ["bare 1", "conversation 1", "doubted 1", "lasting 1", "revised 1", "trained 1", "young 1"],
        "drops": ["doubted 1", "trained 1", "young 1"],
        "tool_calls": ["trained 1", "young 1"],
        "builds": ["bare 1", "conversation 1", "revised 1", "trained 1", "young 1"],
        "claims": [],
        "batches": ["bare 1", "conversation 1", "trained 1"],
        "policy_versions": ["one 1"],
    }
    assert [entry for entry in expired.items() if entry[0] not in {"trace_rollouts", "trace_keys"}] == [
        ("rollout_spans", 7),
        ("attempts", 1),
        ("calls", 1),
        ("otel_traces", 4),
        ("otel_logs", 3),
        ("dropped_attributes", 1),
        ("rewards", 1),
        ("transitions", 1),
        ("drops", 1),
        ("tool_calls", 1),
        ("builds", 1),
    ]
    assert execute("SELECT RolloutId, TraceId FROM spangrad.lineage ORDER BY ALL") == "bare\t\nconversation\tchat\ntrained\ttrained-1\n"
    before = left(execute)
    assert (expire(execute, BEFORE, layout), left(execute)) == ({}, before)


def test_expire_covers_every_table_that_grows_with_spans() -> None:
    statements = [statement for migration in read_migrations(SCHEMA) for statement in migration.script(Layout())]
    tables = {statement.split("(")[0].split(".")[1].strip() for statement in statements if statement.startswith("CREATE TABLE")}
    kept = {"batches", "batch_calls", "batch_files", "trained_calls", "trained_tokens", "datasets", "builder_marks", "policy_versions"}
    assert tables - set(OLD) == kept


def test_embedded_store_expires_old_rows_periodically(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "first.log"), executing(settings) as execute:
        conclude(execute, "drops", "ancient", "2020-01-01")
        conclude(execute, "drops", "recent", NEW_DAY)
    settings = settings.model_copy(update={"ttl_days": 30})
    with running_store(settings, tmp_path / "second.log") as child, executing(settings) as execute:
        wait_until(
            lambda: "ancient" not in execute("SELECT RolloutId FROM spangrad_internal.drops"), 60, "expiry", [child], poll_seconds=0.05
        )
        assert execute("SELECT RolloutId FROM spangrad_internal.drops") == "recent\n"


def test_cutoff_keeps_whole_days(laid_out: tuple[Execute, Layout]) -> None:
    execute, _ = laid_out
    now = int(execute("SELECT toUnixTimestamp(now())"))
    age = now - cutoff(execute, 30)
    assert 30 * 86400 - 3700 <= age < 31 * 86400 + 3700


def test_embedded_store_trace_lookup_plans_no_part_that_index_excludes(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log"), executing(settings) as execute:
        for day in (1, 2, 3):
            span(execute, f"t{day}", "chat", f"2080-01-0{day}")
        planned = "SELECT sum(value) FROM system.events WHERE event = 'SelectedParts'"
        before = int(execute(planned))
        assert execute("SELECT SpanId FROM otel.otel_traces WHERE TraceId = 't2'") == "chat\n"
        assert int(execute(planned)) - before == 1


@pytest.mark.parametrize("table", ["otel_traces", "otel_logs"])
def test_embedded_store_closed_day_becomes_one_part(tmp_path: Path, table: str) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log") as child, executing(settings) as execute:
        for trace in ("t1", "t2", "t3"):
            span(execute, trace, "chat", OLD_DAY)
            log(execute, trace, OLD_DAY)
        parts = f"SELECT count(), sum(rows) FROM system.parts WHERE active AND table = '{table}'"
        assert execute(parts) == "3\t3\n"
        # A day, in a second.
        day = "min_age_to_force_merge_seconds = "
        assert f"{day}86400," in execute(f"SELECT engine_full FROM system.tables WHERE name = '{table}'")
        execute(f"ALTER TABLE {stored(table)} MODIFY SETTING {day}1")
        wait_until(lambda: execute(parts) == "1\t3\n", 120, "a merged day", [child], poll_seconds=0.1)
