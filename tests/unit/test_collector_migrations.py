"""Migrations: in order, each once, and never a changed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from collector.schema.cluster import Layout
from collector.schema.columns import comment_columns, meanings
from collector.schema.migrations import SCHEMA, Entry, MigrationState, migrate, pending, read_migrations, statements, status
from spangrad.errors import StoreError


class RecordedStore:
    """Keeps statements, and the table of migrations."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.applied: list[tuple[str, ...]] = []
        self.exists = self.older = False
        self.tables: list[str] = []
        self.refuses = ""

    def __call__(self, sql: str) -> str:
        if self.refuses and sql.startswith(self.refuses):
            raise StoreError("Code: 241. no memory")
        if sql == "EXISTS TABLE otel.schema_migrations":
            return f"{int(self.older)}\n"
        if sql.startswith("EXISTS"):
            return f"{int(self.exists)}\n"
        if "system.columns" in sql:
            return ""
        if "system.tables" in sql:
            return "".join(f"{name}\n" for name in self.tables)
        if sql.startswith("SELECT"):
            return "".join("\t".join((*row, "2026-01-02 03:04:05")) + "\n" for row in self.applied)
        if inserted := re.search(r"VALUES \((\d+), '(.*)', '(.*)', '(.*)'\)", sql):
            self.applied.append(inserted.groups())
        elif "schema_migrations" in sql:
            self.exists = True
        elif "CREATE DATABASE" not in sql:
            self.ran.append(sql)
            self.tables += re.findall(r"EXISTS (\w+\.\w+)", sql)
            self.tables += map(".".join, re.findall(r"ALTER TABLE (\w+\.\w+) ADD INDEX IF NOT EXISTS (\w+)", sql))
        return ""


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    (tmp_path / "0001_first.sql").write_text("-- a; comment\nCREATE TABLE a (x String DEFAULT ';');\nCREATE TABLE b (x String);\n")
    (tmp_path / "0002_second.sql").write_text("CREATE TABLE c (x String)")
    return tmp_path


def test_migrate_applies_each_file_once_in_order(schema: Path) -> None:
    store = RecordedStore()

    assert [migration.name for migration in migrate(store, Layout(), schema)] == ["0001_first.sql", "0002_second.sql"]
    assert store.ran == ["CREATE TABLE a (x String DEFAULT ';')", "CREATE TABLE b (x String)", "CREATE TABLE c (x String)"]
    (schema / "0003_third.sql").write_text("CREATE TABLE d (x String);")
    assert [migration.name for migration in migrate(store, Layout(), schema)] == ["0003_third.sql"]
    assert [row[:2] for row in store.applied] == [("1", "0001_first.sql"), ("2", "0002_second.sql"), ("3", "0003_third.sql")]


def test_migrate_changed_file_raises(schema: Path) -> None:
    store = RecordedStore()
    migrate(store, Layout(), schema)
    (schema / "0001_first.sql").write_text("CREATE TABLE other (x String)")

    with pytest.raises(StoreError, match=r"0001_first\.sql was changed after it was applied"):
        migrate(store, Layout(), schema)


def test_migrate_store_of_later_version_raises(schema: Path) -> None:
    store = RecordedStore()
    migrate(store, Layout(), schema)
    (schema / "0002_second.sql").unlink()

    with pytest.raises(StoreError, match=r"migrated by 0002_second\.sql, which .* does not have"):
        migrate(store, Layout(), schema)


def test_migrate_refuses_a_store_with_all_tables_in_otel(schema: Path) -> None:
    store = RecordedStore()
    store.older = True
    with pytest.raises(StoreError, match=r"made by an earlier spangrad, .* is not converted\. Begin a new one"):
        migrate(store, Layout(), schema)
    assert store.ran == []


def test_migration_status_lists_missing_migrations_and_changes_nothing(schema: Path) -> None:
    store = RecordedStore()

    assert status(store, Layout(), schema) == [
        Entry(1, "0001_first.sql", MigrationState.NEW, ""),
        Entry(2, "0002_second.sql", MigrationState.NEW, ""),
    ]
    assert [migration.number for migration in pending(store, Layout(), schema)] == [1, 2]
    assert (store.ran, store.exists) == ([], False)
    migrate(store, Layout(), schema)
    (schema / "0001_first.sql").write_text("CREATE TABLE other (x String)")
    (schema / "0002_second.sql").unlink()
    assert status(store, Layout(), schema) == [
        Entry(1, "0001_first.sql", MigrationState.CHANGED, "2026-01-02 03:04:05"),
        Entry(2, "0002_second.sql", MigrationState.UNKNOWN, "2026-01-02 03:04:05"),
    ]


def test_migrate_reapplies_file_whose_table_is_gone(schema: Path) -> None:
    (schema / "0002_second.sql").write_text(
        "CREATE TABLE IF NOT EXISTS otel.c (x String);\nCREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.c_mv TO otel.c AS"
        " SELECT 1 AS x"
    )
    store = RecordedStore()
    migrate(store, Layout(), schema)
    store.tables.remove("otel.c")

    incomplete = Entry(2, "0002_second.sql", MigrationState.INCOMPLETE, "2026-01-02 03:04:05", ("otel.c",))
    assert status(store, Layout(), schema) == [Entry(1, "0001_first.sql", MigrationState.APPLIED, "2026-01-02 03:04:05"), incomplete]
    assert [migration.number for migration in pending(store, Layout(), schema)] == [2]
    assert pending(store, Layout(), schema, incomplete=False) == []
    lines: list[str] = []
    assert [migration.number for migration in migrate(store, Layout(), schema, report=lines.append)] == [2]
    assert lines == ["applied 0002_second.sql (2 statements): otel.c was missing, and is created again; rows of a dropped table are gone"]


def test_migrate_reapplies_later_indexes_of_dropped_table() -> None:
    store = RecordedStore()
    migrate(store, Layout())
    store.tables = [name for name in store.tables if not f"{name}.".startswith("spangrad_internal.builds.")]

    lacking = {entry.number: entry.lacks for entry in status(store, Layout()) if entry.state is MigrationState.INCOMPLETE}
    assert lacking == {3: ("spangrad_internal.builds",), 9: ("spangrad_internal.builds.idx_rollout_bounds",)}
    assert [migration.number for migration in migrate(store, Layout())] == [3, 9]
    assert pending(store, Layout()) == []


def test_migration_makes_local_and_distributed_table_in_sharded_layout() -> None:
    calls = [name for name in read_migrations(SCHEMA)[1].makes(Layout("prod", sharded=True)) if ".calls" in name]
    assert calls == [f"spangrad_internal.{name}" for name in ("calls_local", "calls", "calls_mv")]


def test_migrate_refused_statement_raises_and_is_not_recorded(schema: Path) -> None:
    store = RecordedStore()
    store.refuses = "CREATE TABLE b"
    (schema / "0001_first.sql").write_text("CREATE TABLE a (x String);\nCREATE TABLE b (\n  x String);")

    with pytest.raises(StoreError) as caught:
        migrate(store, Layout(), schema)
    assert str(caught.value) == "0001_first.sql stopped at 'CREATE TABLE b (': Code: 241. no memory"
    assert store.applied == []
    store.refuses = ""
    assert [migration.number for migration in migrate(store, Layout(), schema)] == [1, 2]


def test_migrate_store_of_other_layout_raises(schema: Path) -> None:
    store = RecordedStore()
    migrate(store, Layout(), schema)

    with pytest.raises(StoreError, match=r"made for one server, and the settings name cluster prod, sharded\."):
        migrate(store, Layout("prod", sharded=True), schema)


def test_migrate_reports_a_line_per_file(schema: Path) -> None:
    lines: list[str] = []
    migrate(RecordedStore(), Layout(), schema, report=lines.append)
    assert lines == ["applied 0001_first.sql (2 statements)", "applied 0002_second.sql (1 statements)"]


def test_read_migrations_with_gap_in_numbers_raises(schema: Path) -> None:
    (schema / "0004_fourth.sql").write_text("SELECT 1")

    with pytest.raises(StoreError, match=r"0004_fourth\.sql should be number 0003"):
        read_migrations(schema)


def test_read_migrations_finds_installed_schema() -> None:
    assert [migration.name for migration in read_migrations(SCHEMA)][:2] == ["0001_otel.sql", "0002_rollouts.sql"]


def test_statements_split_at_semicolons_between_statements_only() -> None:
    sql = "SELECT ';', `a;b`, \"c;d\", 'it''s; \\'x;' -- no; one\n; /* not; here */ SELECT 5 - 2 / 1;\n\n"

    assert statements(sql) == ["SELECT ';', `a;b`, \"c;d\", 'it''s; \\'x;'", "SELECT 5 - 2 / 1"]


def test_comment_columns_beside_comment_with_line_separator_writes_meaning() -> None:
    ran: list[str] = []

    def execute(sql: str) -> str:
        if sql.startswith("SELECT"):
            # TabSeparated escapes a line feed, and none of Unicode's other ends of lines.
            return "own\tPrice\tnet\u2028or gross\nsteps\tLoss\t\n"
        ran.append(sql)
        return ""

    comment_columns(execute, Layout(), {"steps"})

    assert ran == [f"ALTER TABLE spangrad.steps COMMENT COLUMN `Loss` '{meanings()['every']['Loss']}'"]
