"""`spangrad schema`: it brings a running store up to date, says what is missing, and two at once apply each migration once."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from collector.schema.cluster import Layout
from collector.schema.migrations import SCHEMA, Execute, read_migrations
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import DATABASES
from tests.support.processes import run_spangrad
from tests.support.servers import running_store, store_settings


@contextmanager
def executing(store: StoreSettings) -> Generator[Execute]:
    client = connect(store)
    yield lambda sql: client.raw_query(sql).decode()
    client.close()


def spangrad(store: StoreSettings, *arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of `spangrad schema`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPANGRAD_")}
    done = run_spangrad("schema", *arguments, directory=cwd, env={**clean, "SPANGRAD_STORE__URL": store.url})
    return done.returncode, done.stdout, done.stderr


def test_schema_commands_bring_store_up_to_date(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log"), executing(settings) as execute:
        code, stdout, _ = spangrad(settings, "status", cwd=tmp_path)
        assert (code, [line.split()[-1] for line in stdout.splitlines()[1:]]) == (0, ["applied"] * len(read_migrations(SCHEMA)))

        execute("ALTER TABLE spangrad_internal.schema_migrations DELETE WHERE Number = 4 SETTINGS mutations_sync = 2")
        execute("DROP VIEW spangrad.lineage")
        code, stdout, _ = spangrad(settings, "status", cwd=tmp_path)
        assert code == 3
        assert [line.split() for line in stdout.splitlines() if line.rstrip().endswith("new")] == [["0004", "0004_views.sql", "new"]]

        code, stdout, _ = spangrad(settings, "migrate", "--dry-run", cwd=tmp_path)
        assert code == 0
        assert stdout.startswith("-- 0004_views.sql\n\nCREATE VIEW IF NOT EXISTS spangrad_internal.trace_owners")
        assert execute("EXISTS VIEW spangrad.lineage") == "0\n"

        views = len(read_migrations(SCHEMA)[3].script(Layout())) - 1
        assert spangrad(settings, "migrate", cwd=tmp_path) == (0, f"applied 0004_views.sql ({views} statements)\n", "")
        assert execute("EXISTS VIEW spangrad.lineage") == "1\n"
        assert spangrad(settings, "migrate", cwd=tmp_path) == (0, "up to date\n", "")

        execute("ALTER TABLE spangrad_internal.schema_migrations UPDATE Sha256 = '' WHERE Number = 2 SETTINGS mutations_sync = 2")
        code, stdout, _ = spangrad(settings, "status", cwd=tmp_path)
        assert (code, stdout.splitlines()[2].split()[-1]) == (3, "changed")


def test_schema_apply_after_dropped_table_reports_and_recreates_it(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log"), executing(settings) as execute:
        execute("DROP TABLE spangrad_internal.calls SYNC")
        code, stdout, _ = spangrad(settings, "status", cwd=tmp_path)
        assert code == 3
        incomplete = [line.split("incomplete: ")[1].rstrip() for line in stdout.splitlines() if "incomplete" in line]
        assert incomplete == ["spangrad_internal.calls is missing", "spangrad_internal.calls.idx_began is missing"]
    with running_store(settings, tmp_path / "again.log"), executing(settings) as execute:
        assert "0002_rollouts.sql" in (again := (tmp_path / "again.log").read_text())
        assert "spangrad_internal.calls was missing, and is created again; rows of a dropped table are gone" in again
        assert execute("SELECT count() FROM spangrad_internal.calls") == "0\n"
        assert spangrad(settings, "status", cwd=tmp_path)[0] == 0


def test_schema_apply_twice_concurrently_applies_each_migration_once(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "store.log"), executing(settings) as execute:
        for database in DATABASES:
            execute(f"DROP DATABASE {database} SYNC")
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda _: spangrad(settings, "migrate", cwd=tmp_path), range(2)))
        assert [code for code, _, _ in both] == [0, 0]
        names = [migration.name for migration in read_migrations(SCHEMA)]
        assert execute("SELECT Name FROM spangrad_internal.schema_migrations FINAL ORDER BY Number").split() == names
