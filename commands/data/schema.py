"""`spangrad schema`: the span store's tables, in the embedded store or any other ClickHouse."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from collector.schema.cluster import Layout
from collector.schema.migrations import SCHEMA, MigrationState, migrate, pending, preamble, read_migrations, status
from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from spangrad.errors import SettingsError
from spangrad.store.clickhouse import executing

OUTDATED = 3
"""Exit code of `spangrad schema status` when the store's tables are not those of this installation."""

schema = App(name="schema", help="Migrate and show the span store's tables, expire old rows.")


@schema.command(name="status")
def _status(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print every migration with its state in the store at store.url. The exit code is 3 unless all are applied."""
    from commands.console import print_table

    store = resolve(config, set_).store
    log_to_stderr()
    with executing(store) as execute:
        entries = status(execute, Layout.of(store))
    states = [f"{entry.state}: {', '.join(entry.lacks)} is missing" if entry.lacks else entry.state for entry in entries]
    rows = ((f"{entry.number:04d}", entry.name, entry.applied_at, state) for entry, state in zip(entries, states, strict=True))
    print_table(("number", "name", "applied at (UTC)", "state"), rows)
    if any(entry.state is not MigrationState.APPLIED for entry in entries):
        sys.exit(OUTDATED)


@schema.command(name="migrate")
def _migrate(
    *,
    dry_run: Annotated[bool, Parameter(help="print the SQL statements without running them.", negative=())] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Apply the missing migrations to the store at store.url."""
    store = resolve(config, set_).store
    layout = Layout.of(store)
    log_to_stderr()
    with executing(store) as execute:
        if dry_run:
            for migration in pending(execute, layout):
                _print_script(migration.name, migration.script(layout))
        elif not migrate(execute, layout, report=print):
            print("up to date")


@schema.command(name="show")
def _show(*, cluster: str | None = None, sharded: bool | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print the SQL that creates the tables in an empty store. Connects to no store.

    Args:
        cluster: print it for replicated tables on the cluster of this name.
        sharded: distribute the tables over the cluster's shards.
    """
    layout = Layout.of(resolve(config, set_, {"store.cluster": cluster, "store.sharded": sharded}).store)
    _print_script(f"tables of {layout}", preamble(layout))
    for migration in read_migrations(SCHEMA):
        _print_script(migration.name, migration.script(layout))


@schema.command(name="expire")
def _expire(*, ttl_days: int | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Delete rows that are older than their time to live from the store at store.url. Rows that a committed batch used stay.

    The embedded store does so by itself if store.ttl_days is set; for any other store, run this command once a day.

    Args:
        ttl_days: age in days beyond which rows are deleted.
    """
    from collector.schema.retention import cutoff, expire

    store = resolve(config, set_, {"store.ttl_days": ttl_days}).store
    if store.ttl_days is None:
        raise SettingsError("store.ttl_days is not set: nothing expires. Set it, or pass --ttl-days.")
    log_to_stderr()
    with executing(store) as execute:
        deleted = expire(execute, cutoff(execute, store.ttl_days), Layout.of(store), report=print)
    if not deleted:
        print("nothing to expire")


def _print_script(title: str, statements: list[str]) -> None:
    print(f"-- {title}\n")
    for statement in statements:
        print(f"{statement};\n")
