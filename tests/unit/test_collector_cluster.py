"""The schema on a cluster: which statements stand for those of one server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from collector.schema.cluster import SHARD_BY, Layout
from collector.schema.migrations import SCHEMA, preamble, read_migrations
from collector.server import serve
from spangrad.errors import SettingsError, StoreError
from spangrad.settings import StoreSettings

REPLICATED = Layout("prod")
SHARDED = Layout("prod", sharded=True)


def script(layout: Layout) -> list[str]:
    """All that is run on an empty store, but for the records of what was applied."""
    applied = [statement for migration in read_migrations(SCHEMA) for statement in migration.script(layout)]
    return [statement for statement in [*preamble(layout), *applied] if not statement.startswith("INSERT")]


def tables(statements: list[str]) -> list[str]:
    return [match[1] for statement in statements if (match := re.match(r"CREATE TABLE IF NOT EXISTS \w+\.(\w+)", statement))]


def test_layout_of_one_server_keeps_statements_unchanged() -> None:
    assert Layout().statements(["CREATE VIEW IF NOT EXISTS otel.v AS SELECT 1", "anything"]) == [
        "CREATE VIEW IF NOT EXISTS otel.v AS SELECT 1",
        "anything",
    ]


def test_layout_replicated_table_gets_replicated_engine() -> None:
    assert REPLICATED.statements(
        [
            "CREATE TABLE IF NOT EXISTS spangrad_internal.calls (a String COMMENT 'ENGINE = MergeTree')"
            " ENGINE = ReplacingMergeTree(f(a), b)\nORDER BY a"
        ]
    ) == [
        "CREATE TABLE IF NOT EXISTS spangrad_internal.calls ON CLUSTER 'prod' (a String COMMENT 'ENGINE = MergeTree')"
        " ENGINE = ReplicatedReplacingMergeTree('/clickhouse/tables/{shard}/spangrad_internal/calls', '{replica}', f(a), b)\nORDER BY a"
    ]


def test_layout_sharded_table_gets_distributed_table() -> None:
    assert SHARDED.statements(["CREATE TABLE IF NOT EXISTS spangrad_internal.calls (a String) ENGINE = MergeTree\nORDER BY a"]) == [
        "CREATE TABLE IF NOT EXISTS spangrad_internal.calls_local ON CLUSTER 'prod' (a String) ENGINE ="
        " ReplicatedMergeTree('/clickhouse/tables/{shard}/spangrad_internal/calls_local', '{replica}')\nORDER BY a",
        "CREATE TABLE IF NOT EXISTS spangrad_internal.calls ON CLUSTER 'prod' AS spangrad_internal.calls_local"
        " ENGINE = Distributed('prod', 'spangrad_internal', 'calls_local', cityHash64(TraceId))",
    ]


def test_layout_materialized_view_reads_and_writes_local_shard() -> None:
    view = (
        "CREATE MATERIALIZED VIEW IF NOT EXISTS otel.m TO spangrad_internal.calls AS"
        " SELECT 'otel.x', otel.spans.a FROM otel.spans WHERE a IN (SELECT 1)"
    )
    assert SHARDED.statements([view]) == [
        "CREATE MATERIALIZED VIEW IF NOT EXISTS otel.m ON CLUSTER 'prod' TO spangrad_internal.calls_local AS"
        " SELECT 'otel.x', otel.spans_local.a FROM otel.spans_local WHERE a IN (SELECT 1)"
    ]


def test_layout_sharded_index_is_added_to_local_table() -> None:
    index = "ALTER TABLE spangrad_internal.calls ADD INDEX IF NOT EXISTS i a TYPE minmax"
    assert SHARDED.statements([index]) == [
        "ALTER TABLE spangrad_internal.calls_local ON CLUSTER 'prod' ADD INDEX IF NOT EXISTS i a TYPE minmax"
    ]
    assert REPLICATED.statements([index]) == [
        "ALTER TABLE spangrad_internal.calls ON CLUSTER 'prod' ADD INDEX IF NOT EXISTS i a TYPE minmax"
    ]


def test_layout_sharded_view_joins_globally() -> None:
    view = (
        "CREATE VIEW IF NOT EXISTS otel.v AS SELECT ' IN (SELECT JOIN' FROM otel.a ARRAY JOIN b LEFT ARRAY JOIN c"
        " ANY LEFT JOIN otel.d USING e\nJOIN otel.f USING e WHERE x IN (1) AND x NOT IN (\n  SELECT 1)"
    )
    assert SHARDED.statements([view]) == [
        "CREATE VIEW IF NOT EXISTS otel.v ON CLUSTER 'prod' AS SELECT ' IN (SELECT JOIN' FROM otel.a ARRAY JOIN b LEFT ARRAY JOIN c"
        " GLOBAL ANY LEFT JOIN otel.d USING e\nGLOBAL JOIN otel.f USING e WHERE x IN (1) AND x GLOBAL NOT IN (\n  SELECT 1)"
    ]


@pytest.mark.parametrize("layout", [REPLICATED, SHARDED], ids=str)
def test_layout_schema_statements_run_on_cluster_and_are_replicated(layout: Layout) -> None:
    statements = script(layout)
    assert [one for one in statements if one.count(" ON CLUSTER 'prod'") != 1] == []
    assert [one for one in statements if re.search(r"ENGINE = (?!Replicated\w*MergeTree\('|Distributed\(|Null)", one)] == []


def test_layout_every_schema_table_has_distributed_table() -> None:
    single, sharded = tables(script(Layout())), tables(script(SHARDED))
    assert sorted(sharded) == sorted([*single, *(f"{name}_local" for name in single if name != "schema_migrations")])


def test_layout_materialized_views_use_local_tables_only() -> None:
    extracting = [one for one in script(SHARDED) if one.startswith("CREATE MATERIALIZED VIEW")]
    assert extracting
    referred = [re.findall(r"\b(?:otel|spangrad_internal)\.(\w+)", re.sub(r"'[^']*'", "", one))[1:] for one in extracting]
    assert [name for names in referred for name in names if not name.endswith("_local")] == []


def test_shard_by_columns_are_in_sorting_key_of_replacing_tables() -> None:
    """The columns of a table's sharding key are in its sorting key, or follow from it."""
    for statement in script(Layout()):
        match = re.match(
            r"CREATE TABLE IF NOT EXISTS \w+\.(\w+).*ENGINE = (?:Replacing|Aggregating)MergeTree.*ORDER BY \(([^)]*)\)", statement, re.S
        )
        if match:
            columns = set(re.findall(r"\b[A-Z]\w+", SHARD_BY[match[1]]))
            assert columns <= set(match[2].split(", ")), match[1]


@pytest.mark.parametrize(
    "statement", ["INSERT INTO spangrad_internal.calls SELECT 1", "ALTER TABLE spangrad_internal.calls ADD COLUMN a String"]
)
def test_layout_statement_of_unknown_kind_raises(statement: str) -> None:
    with pytest.raises(StoreError, match=r"no cluster's form of '(INSERT|ALTER) .* is known"):
        REPLICATED.statements([statement])


def test_layout_table_without_sharding_key_raises() -> None:
    with pytest.raises(StoreError, match=r"otel\.other has no sharding key"):
        SHARDED.statements(["CREATE TABLE IF NOT EXISTS otel.other (a String) ENGINE = MergeTree ORDER BY a"])


def test_layout_sharded_without_cluster_raises() -> None:
    with pytest.raises(SettingsError, match=r"store\.cluster is not set"):
        Layout.of(StoreSettings(sharded=True))
    assert Layout.of(StoreSettings(cluster="{cluster}", sharded=True)) == Layout("{cluster}", sharded=True)
    with pytest.raises(ValueError, match="cluster"):
        StoreSettings(cluster="x' AS")


def test_embedded_store_with_cluster_setting_raises(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"store\.cluster = 'prod', but the embedded store is one server"):
        serve(StoreSettings(path=tmp_path / "store", cluster="prod"))
    assert list(tmp_path.iterdir()) == []
