"""The schema on a cluster: the same statements, replicated, and sharded where asked.

In: statements of collector/schema, which are written for one server. Out: statements for the servers of a cluster.
Invariant: all rows of a trace are written on one shard and all conclusions on a rollout on one shard, so that rows which replace
each other meet there, and FINAL over the shards counts a thing once.

Sharded, a table NAME becomes NAME_local on every server, and NAME stands over them all (Distributed): senders and readers use the
same names as on one server. Materialized views read and fill local tables, so that what is extracted from a span stays on its shard.
Views read the tables over all shards; their IN and JOIN become GLOBAL: asked once, not by every shard of every shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from spangrad.errors import SettingsError, StoreError
from spangrad.settings import StoreSettings

_TRACE = "cityHash64(TraceId)"
_ROLLOUT = "cityHash64(RolloutId)"
SHARD_BY = {
    "otel_traces": _TRACE,
    # Most records of plain services name no trace: one shard would get them all.
    "otel_logs": "cityHash64(if(TraceId = '', Body, TraceId))",
    "rollout_spans": _TRACE,
    "calls": _TRACE,
    "plain_answers": _TRACE,
    "trace_keys": _TRACE,
    "trace_rollouts": _TRACE,
    "dropped_attributes": _TRACE,
    "rewards": _ROLLOUT,
    "transitions": _ROLLOUT,
    "drops": _ROLLOUT,
    "builds": _ROLLOUT,
    "claims": _ROLLOUT,
    "batches": _ROLLOUT,
    "datasets": "cityHash64(Name)",
    "batch_files": "cityHash64(Policy, Branch)",
    "policy_versions": "cityHash64(Policy, Branch)",
}
"""Which shard a row goes to, by table. A row that is written again must go where it was, or it counts twice."""
_EVERYWHERE = "schema_migrations"
"""One table for all servers, whatever their shard: each knows what was applied."""

CREATE = re.compile(r"CREATE (DATABASE|TABLE|MATERIALIZED VIEW|VIEW) IF NOT EXISTS (?:otel\.)?(\w+)")
"""How every statement of the schema begins: what it makes, and that one's name."""
_LITERAL = re.compile(r"'(?:[^'\\]|\\.|'')*'|`[^`]*`|\"[^\"]*\"", re.DOTALL)
_ENGINE = re.compile(r"\bENGINE = (\w*MergeTree)\b(?:\(((?:[^()]|\([^()]*\))*)\))?")
_TABLE = re.compile(r"\botel\.(\w+)")
_IN = re.compile(r"\b((?:NOT )?IN)(?=\s*\(\s*(?:SELECT|WITH)\b)")
_JOIN = re.compile(r"(?<!ARRAY )\b(?:(?:INNER|LEFT|RIGHT|FULL|CROSS|OUTER|ANY|ALL|SEMI|ANTI|ASOF) )*JOIN\b")


@dataclass(frozen=True, slots=True)
class Layout:
    """Over which servers the tables lie."""

    cluster: str | None = None
    """Its name in the servers' configuration. None: one server, the embedded store say."""
    sharded: bool = False

    @classmethod
    def of(cls, store: StoreSettings) -> Layout:
        """The layout that the settings name.

        Raises:
            SettingsError: shards without a cluster.
        """
        if store.sharded and store.cluster is None:
            raise SettingsError("store.sharded = true, but store.cluster is not set. Name the cluster whose shards hold the tables.")
        return cls(store.cluster, store.sharded)

    def __str__(self) -> str:
        """As it is recorded in the store."""
        if self.cluster is None:
            return "one server"
        return f"cluster {self.cluster}, sharded" if self.sharded else f"cluster {self.cluster}"

    @property
    def on_cluster(self) -> str:
        """The clause that sends a statement to all servers; empty on one server."""
        return f" ON CLUSTER '{self.cluster}'" if self.cluster else ""

    def local(self, table: str) -> str:
        """The table that holds a server's own rows."""
        return f"{table}_local" if self.sharded else table

    def reading(self, sql: str) -> str:
        """A query, or a condition, over all shards."""
        return _outside_literals(sql, _global) if self.sharded else sql

    def statements(self, statements: list[str]) -> list[str]:
        """Statements that make this layout of what one server's statements say.

        Args:
            statements: without comments.

        Raises:
            StoreError: a statement is of a kind, or a table without a key, of which this module does not know what to make.
        """
        return statements if self.cluster is None else [made for one in statements for made in self._create(one)]

    def _create(self, sql: str) -> list[str]:
        found = CREATE.match(sql)
        if not found:
            raise StoreError(f"no cluster's form of {first_line(sql)!r} is known. Teach it to collector/schema/cluster.py.")
        kind, name = found.groups()
        head, body = sql[: found.end()] + self.on_cluster, sql[found.end() :]
        match kind:
            case "TABLE":
                return self._table(name, body)
            case "MATERIALIZED VIEW" if self.sharded:
                return [head + _outside_literals(body, lambda text: _TABLE.sub(r"otel.\1_local", text))]
            case "VIEW":
                return [head + self.reading(body)]
            case _:
                return [head + body]

    def _table(self, name: str, body: str) -> list[str]:
        shared = name == _EVERYWHERE
        local = name if shared else self.local(name)
        # Names, not UUIDs: a server that joins later and is given the same statements finds its peers.
        place = f"'/clickhouse/tables/otel/{local}', '{{shard}}-{{replica}}'" if shared else (
            f"'/clickhouse/tables/{{shard}}/otel/{local}', '{{replica}}'"
        )  # fmt: skip

        def replicated(text: str) -> str:
            return _ENGINE.sub(lambda found: f"ENGINE = Replicated{found[1]}({place}{', ' + found[2] if found[2] else ''})", text)

        made = [f"CREATE TABLE IF NOT EXISTS otel.{local}{self.on_cluster}{_outside_literals(body, replicated)}"]
        if self.sharded and not shared:
            if name not in SHARD_BY:
                raise StoreError(f"table otel.{name} has no sharding key. Give it one in SHARD_BY of collector/schema/cluster.py.")
            made.append(
                f"CREATE TABLE IF NOT EXISTS otel.{name}{self.on_cluster} AS otel.{local}"
                f" ENGINE = Distributed('{self.cluster}', 'otel', '{local}', {SHARD_BY[name]})"
            )
        return made


def first_line(sql: str) -> str:
    """Enough of a statement to find it by."""
    return sql.strip().splitlines()[0]


def _global(text: str) -> str:
    return _JOIN.sub(r"GLOBAL \g<0>", _IN.sub(r"GLOBAL \1", text))


def _outside_literals(sql: str, change: Callable[[str], str]) -> str:
    """Change a statement, and leave what its quotes enclose as it is."""
    literals = _LITERAL.findall(sql)
    # A character that no statement has stands for each.
    pieces = change(_LITERAL.sub("\0", sql)).split("\0")
    return "".join(piece + literal for piece, literal in zip(pieces, [*literals, ""], strict=True))
