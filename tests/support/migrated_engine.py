"""A real engine in this process, with the schema's tables: what tests of the collector's parts commit into."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from collector.database import EmbeddedDatabase
from collector.schema.cluster import Layout
from collector.schema.migrations import migrate


@contextmanager
def migrated_engine(path: Path) -> Generator[EmbeddedDatabase]:
    """Open a directory; the process may have no other engine meanwhile."""
    engine = EmbeddedDatabase(path)
    handle = engine.handle()
    migrate(lambda sql: handle.query(sql).body.decode(), Layout())
    handle.close()
    yield engine
    engine.close()
