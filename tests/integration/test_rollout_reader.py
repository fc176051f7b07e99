"""Costs of reading one rollout or version: statements read its own rows, not those of the whole run or policy."""

from __future__ import annotations

import uuid
from typing import Any

from spangrad.settings import StoreSettings
from spangrad.store.lineage import of_version
from spangrad.store.rollout.reader import read, similar_ids
from tests.support.built_rollouts import post
from tests.support.servers import client_of
from tests.support.spans import SpanFactory

ROLLOUTS = 20_000
BUILDS = """
INSERT INTO spangrad_internal.builds (RunId, Mode, BuildSpec, RolloutId)
SELECT %(run)s, 'production', 's', concat(%(run)s, '-', toString(number)) FROM numbers(20000)
"""
SPAN = """
INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, SpanAttributes)
SELECT now64(9), %(run)s, 'a', 'chat', map('spangrad.rollout.id', concat(%(run)s, '-7'), 'spangrad.run.id', %(run)s)
"""


TRACES = """
INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, SpanAttributes)
SELECT now64(9), lower(hex(sipHash128(number))), lower(hex(sipHash64(number))), 'chat', map('key', 'value') FROM numbers(20000)
"""
"""Statement that adds a span of a service in each of many traces."""


VERSIONS = """
INSERT INTO spangrad_internal.policy_versions (Policy, Branch, Version, Parent, ParentBranch, BatchId, Status)
SELECT %(policy)s, 'main', number, number - 1, 'main', toString(number), 'committed' FROM numbers(1, 200)
"""
BATCHES = """
INSERT INTO spangrad_internal.batches (Policy, Branch, Version, BatchId, RunId, Mode, GroupId, RolloutId)
SELECT %(policy)s, 'main', intDiv(number, 100) + 1 AS version, toString(version), 'run', 'train', toString(intDiv(number, 10)),
    toString(number)
FROM numbers(20000)
"""
"""Statement that adds 100 rollouts in the batch of each version."""


class CountingClient:
    """A client that remembers how many rows each statement reads by its plan."""

    def __init__(self, store: StoreSettings) -> None:
        self._client = client_of(store)
        self.rows_read: list[tuple[str, int]] = []

    def query(self, sql: str, **arguments: Any) -> Any:
        plan = self._client.query(f"EXPLAIN ESTIMATE {sql}", **arguments)
        self.rows_read.append((sql, sum(row["rows"] for row in plan.named_results())))
        return self._client.query(sql, **arguments)


def test_read_rollout_without_group_reads_no_builds_of_others(store: StoreSettings) -> None:
    run, client = f"ungrouped-{uuid.uuid4().hex[:8]}", CountingClient(store)
    for statement in (BUILDS, SPAN):
        client_of(store).command(statement, parameters={"run": run})

    record: Any = read(client, f"{run}-7", lambda rows: [("llm", "", "") for _ in rows])  # type: ignore[arg-type]

    assert [(build.run, build.group, build.group_size) for build in record.builds] == [(run, "", 0)]
    assert max(rows for _, rows in client.rows_read) < ROLLOUTS / 4


def test_similar_ids_of_unknown_rollout_reads_no_spans_of_others(store: StoreSettings) -> None:
    client, spans = CountingClient(store), SpanFactory(run="similar")
    spans.root("similar-1")
    post(store, spans.otlp())
    client_of(store).command(TRACES)

    sentences = [similar_ids(client, id_, None) for id_ in ("similar-2", "unknown")]  # type: ignore[arg-type]

    assert sentences == ["Did you mean similar-1?", "The newest rollouts are similar-1."]
    assert max(rows for _, rows in client.rows_read) < ROLLOUTS / 4


def test_lineage_of_version_reads_rollouts_of_its_batch_only(store: StoreSettings) -> None:
    policy, client = f"policy-{uuid.uuid4().hex[:8]}", CountingClient(store)
    for statement in (VERSIONS, BATCHES):
        client_of(store).command(statement, parameters={"policy": policy})

    lineage = of_version(client, policy, 120, None, depth=1)  # type: ignore[arg-type]

    assert [len(version.batch_rollouts or ()) for version in lineage.ancestors] == [100] + [0] * 119
    assert [version.rollouts for version in lineage.ancestors] == [100] * 120
    of_batches = [rows for sql, rows in client.rows_read if "FROM spangrad.batches" in sql]
    assert [rows >= ROLLOUTS / 4 for rows in of_batches] == [True, False], "the sizes of all batches, and the rollouts of one"
