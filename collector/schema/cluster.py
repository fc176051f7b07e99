"""The schema on a cluster: the same statements, replicated, and sharded where asked.

In: statements of collector/schema, which are written for one server. Out: statements for the servers of a cluster.
Invariant: all rows of a trace are written on one shard, and all rows derived from a rollout on one shard, so that rows that replace
each other are on the same shard, and FINAL over the shards counts each once.

Sharded, a table NAME becomes NAME_local on every server, and NAME spans them all (Distributed): senders and readers use the
same names as on one server. Materialized views read and fill local tables, so that what is extracted from a span stays on its shard.
Views read the tables over all shards; their IN and JOIN become GLOBAL: evaluated once, not by every shard over every shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from spangrad.errors import SettingsError, StoreError
from spangrad.settings import StoreSettings
from spangrad.store.names import INTERNAL, STOCK

_TRACE = "cityHash64(TraceId)"
_ROLLOUT = "cityHash64(RolloutId)"
SHARD_BY = {
    "otel_traces": _TRACE,
    # Most records of plain services name no trace: one shard would get them all.
    "otel_logs": "cityHash64(if(TraceId = '', Body, TraceId))",
    "rollout_spans": _TRACE,
    "calls": _TRACE,
    "attempts": _TRACE,
    "trace_keys": _TRACE,
    "trace_rollouts": _TRACE,
    "dropped_attributes": _TRACE,
    "rewards": _ROLLOUT,
    "transitions": _ROLLOUT,
    "drops": _ROLLOUT,
    "tool_calls": _ROLLOUT,
    "builds": _ROLLOUT,
    "claims": _ROLLOUT,
    "batches": _ROLLOUT,
    "batch_calls": _ROLLOUT,
    "trained_calls": _ROLLOUT,
    "trained_tokens": _ROLLOUT,
    "datasets": "cityHash64(Name)",
    "builder_marks": "cityHash64(BuildSpec)",
    "batch_files": "cityHash64(Policy, Branch)",
    "policy_versions": "cityHash64(Policy, Branch)",
}
"""Sharding key of each table. A row that is written again must go to the same shard, or it counts twice."""
_EVERYWHERE = "schema_migrations"
"""Table that is replicated on all servers of all shards, so that each knows the applied migrations."""

CREATE = re.compile(r"CREATE (DATABASE|TABLE|MATERIALIZED VIEW|VIEW) IF NOT EXISTS (?:(\w+)\.)?(\w+)")
"""Beginning of every statement that creates: the kind of what it creates, its database, and its name."""
_INDEX = re.compile(r"ALTER TABLE (\w+)\.(\w+)(?= (?:ADD|MATERIALIZE) INDEX )")
"""Beginning of every other statement of the schema: the database and the name of a table that gets an index."""
_LITERAL = re.compile(r"'(?:[^'\\]|\\.|'')*'|`[^`]*`|\"[^\"]*\"", re.DOTALL)
_ENGINE = re.compile(r"\bENGINE = (\w*MergeTree)\b(?:\(((?:[^()]|\([^()]*\))*)\))?")
_TABLE = re.compile(rf"\b({STOCK}|{INTERNAL})\.(\w+)")
_IN = re.compile(r"\b((?:NOT )?IN)(?=\s*\(\s*(?:SELECT|WITH)\b)")
_JOIN = re.compile(r"(?<!ARRAY )\b(?:(?:INNER|LEFT|RIGHT|FULL|CROSS|OUTER|ANY|ALL|SEMI|ANTI|ASOF) )*JOIN\b")


@dataclass(frozen=True, slots=True)
class Layout:
    """Servers that hold the tables: one, or a cluster."""

    cluster: str | None = None
    """Name of the cluster in the servers' configuration. None: one server, such as the embedded store."""
    sharded: bool = False

    @classmethod
    def of(cls, store: StoreSettings) -> Layout:
        """Return the layout that the settings name.

        Raises:
            SettingsError: shards without a cluster.
        """
        if store.sharded and store.cluster is None:
            raise SettingsError("store.sharded = true, but store.cluster is not set. Name the cluster whose shards hold the tables.")
        return cls(store.cluster, store.sharded)

    def __str__(self) -> str:
        """Return the layout's name, as it is recorded in the store."""
        if self.cluster is None:
            return "one server"
        return f"cluster {self.cluster}, sharded" if self.sharded else f"cluster {self.cluster}"

    @property
    def on_cluster(self) -> str:
        """Return the clause that sends a statement to all servers; empty on one server."""
        return f" ON CLUSTER '{self.cluster}'" if self.cluster else ""

    def local(self, table: str) -> str:
        """Return the name of the table that holds a server's own rows."""
        return f"{table}_local" if self.sharded else table

    def reading(self, sql: str) -> str:
        """Return a query, or a condition, that is evaluated over all shards."""
        return _outside_literals(sql, _global) if self.sharded else sql

    def statements(self, statements: list[str]) -> list[str]:
        """Return the statements, without comments, that do in this layout what those for one server do.

        Raises:
            StoreError: a statement is of an unknown kind, or a table has no sharding key.
        """
        return statements if self.cluster is None else [own for statement in statements for own in self._statements(statement)]

    def _statements(self, sql: str) -> list[str]:
        if indexed := _INDEX.match(sql):
            database, name = indexed.groups()
            return [f"ALTER TABLE {database}.{self.local(name)}{self.on_cluster}{sql[indexed.end() :]}"]
        match = CREATE.match(sql)
        if not match:
            raise StoreError(f"no cluster's form of {first_line(sql)!r} is known. Teach it to collector/schema/cluster.py.")
        kind, database, name = match.groups()
        head, body = sql[: match.end()] + self.on_cluster, sql[match.end() :]
        match kind:
            case "TABLE":
                return self._table(database, name, body)
            case "MATERIALIZED VIEW" if self.sharded:
                return [head + _outside_literals(body, lambda text: _TABLE.sub(r"\1.\2_local", text))]
            case "VIEW":
                return [head + self.reading(body)]
            case _:
                return [head + body]

    def _table(self, database: str, name: str, body: str) -> list[str]:
        shared = name == _EVERYWHERE
        local = name if shared else self.local(name)
        # Names, not UUIDs: a server that joins later and runs the same statements finds its peers.
        replica_path = f"'/clickhouse/tables/{database}/{local}', '{{shard}}-{{replica}}'" if shared else (
            f"'/clickhouse/tables/{{shard}}/{database}/{local}', '{{replica}}'"
        )  # fmt: skip

        def replicated(text: str) -> str:
            return _ENGINE.sub(
                lambda engine: f"ENGINE = Replicated{engine[1]}({replica_path}{', ' + engine[2] if engine[2] else ''})", text
            )

        created = [f"CREATE TABLE IF NOT EXISTS {database}.{local}{self.on_cluster}{_outside_literals(body, replicated)}"]
        if self.sharded and not shared:
            if name not in SHARD_BY:
                raise StoreError(f"table {database}.{name} has no sharding key. Give it one in SHARD_BY of collector/schema/cluster.py.")
            created.append(
                f"CREATE TABLE IF NOT EXISTS {database}.{name}{self.on_cluster} AS {database}.{local}"
                f" ENGINE = Distributed('{self.cluster}', '{database}', '{local}', {SHARD_BY[name]})"
            )
        return created


def first_line(sql: str) -> str:
    """Return the first line of a statement, by which messages identify it."""
    return sql.strip().splitlines()[0]


def _global(text: str) -> str:
    return _JOIN.sub(r"GLOBAL \g<0>", _IN.sub(r"GLOBAL \1", text))


def _outside_literals(sql: str, change: Callable[[str], str]) -> str:
    """Change a statement except for quoted texts and names."""
    literals = _LITERAL.findall(sql)
    # Each is replaced by a character that no statement contains.
    pieces = change(_LITERAL.sub("\0", sql)).split("\0")
    return "".join(piece + literal for piece, literal in zip(pieces, [*literals, ""], strict=True))
