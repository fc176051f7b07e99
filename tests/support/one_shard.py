"""The sharded layout on one machine: an engine that is the only shard of a cluster, without replicas.

In: a directory. Out: a function that runs statements of `SHARDED`. Tables over all shards, views over them and what is asked of them
are real; ON CLUSTER and replication, which need a keeper, are taken out of the statements.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from collector import database
from collector.schema.cluster import Layout
from collector.schema.migrations import Execute

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
