"""Comments of the public tables' columns: what `DESCRIBE`, Grafana and docs/reference/tables.md say of them.

In: columns.toml, and a function that runs a statement. Out: the comments in the store. Invariant: each column of a public table has the
meaning of its table's section, else the one that it has in every table.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path

from collector.schema.cluster import Layout

_FILE = Path(__file__).with_name("columns.toml")
_COMMENTS = "SELECT table, name, comment FROM system.columns WHERE database = 'spangrad' ORDER BY table, position"


@functools.cache
def meanings() -> dict[str, dict[str, str]]:
    """Return the meanings by table, or `every`, and column."""
    return tomllib.loads(_FILE.read_text())


def comment_columns(execute: Callable[[str], str], layout: Layout, tables: Collection[str]) -> None:
    """Write the comments of these public tables that are not those of the store yet, a statement a table.

    `execute` runs a statement and returns its rows as TabSeparated text. A user's own tables in the same database keep their comments.

    Raises:
        StoreError: the store refused a statement.
    """
    changes: dict[str, list[str]] = {}
    # Not splitlines(): a user's comment may hold other ends of lines than the one that separates rows.
    for line in filter(None, execute(_COMMENTS).split("\n")):
        table, column, comment = line.split("\t")
        if table not in tables:
            continue
        meaning = meanings().get(table, {}).get(column) or meanings()["every"].get(column, comment)
        if meaning != comment:
            changes.setdefault(table, []).append(f"COMMENT COLUMN `{column}` '{meaning}'")
    for table, comments in changes.items():
        execute(f"ALTER TABLE spangrad.{table}{layout.on_cluster} {', '.join(comments)}")
