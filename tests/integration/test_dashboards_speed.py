"""How long the dashboards' statements take on a million spans: a month of 50,000 rollouts and the 1,562 versions that they trained."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from dashboards.files import DASHBOARDS, render
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.servers import running_store, store_settings
from tests.support.sql_clients import ALL, Choice, Window, expand, panels

ROLLOUTS, SPANS, CALLS, BATCH = 50_000, 20, 4, 32
SECONDS = 5.0
"""More than any statement may take: readers of a dashboard wait for it."""

_TIME = f"fromUnixTimestamp64Nano(toUnixTimestamp64Nano(now64(9)) - toInt64(r / {ROLLOUTS} * 30 * 86400 * 1e9) + n * 1000000000)"
_ROLLOUT = "concat('rollout-', lower(hex(cityHash64(r))))"
_TRACE = "lower(hex(sipHash128(r)))"
_SPAN = "lower(hex(sipHash64(number)))"
_RUN = "concat('run-', toString(r % 5))"
_GROUP = "toString(intDiv(r, 8))"
_IDS = "range(500) AS PromptIds, range(100) AS ResponseIds, arrayMap(one -> toFloat32(-one / 100), range(100)) AS Logprobs"


def _each(count: int) -> str:
    """So many rows a rollout: r is the rollout, n the row's place in it."""
    return f"FROM (SELECT number, intDiv(number, {count}) AS r, number % {count} AS n FROM numbers({ROLLOUTS * count}))"


FILL = {
    "rollout_spans": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, {_ROLLOUT} AS RolloutKey, 'rollout' AS RolloutKeySource, {_TIME} AS Timestamp,
            {_TRACE} AS TraceId, {_SPAN} AS SpanId, 'span' AS RowKind, number AS Seq, rand() % 1000000000 AS Duration,
            multiIf(n = 0, 'rollout', n % 5 = 1, 'search', n % 5 = 2, 'chat', 'agent') AS SpanName, 'agent' AS ServiceName,
            if(n % 5 = 2, 'spangrad.gateway', 'x') AS ScopeName, if(rand() % 50 = 0, 'Error', 'Ok') AS StatusCode,
            multiIf(n = 0, map('spangrad.rollout.final', 'true', 'spangrad.task.id', 't', 'spangrad.group.id', {_GROUP}),
                n % 5 = 1, map('openinference.span.kind', 'TOOL', 'tool.name', 'search', 'input.value', repeat('x', 400)),
                map('input.value', repeat('y', 600))) AS Attributes
        {_each(SPANS)}""",
    "calls": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, {_ROLLOUT} AS RolloutKey, 'rollout' AS RolloutKeySource, {_TIME} AS Timestamp,
            {_TRACE} AS TraceId, {_SPAN} AS SpanId, rand() % 1000000000 AS Duration, 'policy' AS Policy, {_IDS}, 200 AS HttpStatus
        {_each(CALLS)}""",
    "transitions": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, 'spec' AS BuildSpec, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 1 AS Content, n AS Turn,
            toString(number) AS CallId, {_TRACE} AS TraceId, {_SPAN} AS SpanId, {_TIME} AS Timestamp, 'policy' AS Policy,
            intDiv(r, {BATCH}) AS Version, {_IDS}, ['reward'] AS `Rewards.Name`, [rand() % 2] AS `Rewards.Value`,
            ['runner'] AS `Rewards.Source`
        {_each(CALLS)}""",
    "tool_calls": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, 'spec' AS BuildSpec, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 1 AS Content,
            n AS Position, concat('tool ', toString(n)) AS ToolName, toString(r * {CALLS} + n) AS CallId, {_TIME} AS Timestamp,
            rand() % 1000000000 AS Duration, rand() % 50 = 0 AS Failed
        {_each(CALLS)}""",
    "trained_calls": f"""
        SELECT 'policy' AS Policy, 'main' AS Branch, toString(Version) AS BatchId, intDiv(r, {BATCH}) + 1 AS Version, {_RUN} AS RunId,
            'train' AS Mode, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, n AS Turn, toString(number) AS CallId,
            toFloat32(rand() % 3) - 1 AS Advantage, {_TIME} AS IngestedAt
        {_each(CALLS)}""",
    "drops": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, 'spec' AS BuildSpec, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 1 AS Content,
            toString(r) AS CallId, {_TIME} AS Timestamp, Timestamp AS IngestedAt, 'incomplete' AS Reason
        {_each(1)} WHERE r % 10 = 0""",
    "builds": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, 'spec' AS BuildSpec, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 1 AS Content,
            {_TIME} AS IngestedAt
        {_each(1)}""",
    "rewards": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, {_ROLLOUT} AS RolloutId, 'reward' AS Name, rand() % 2 AS Value, 'runner' AS Source,
            {_TIME} AS IngestedAt
        {_each(1)}""",
    "batches": f"""
        SELECT 'policy' AS Policy, 'main' AS Branch, toString(Version) AS BatchId, intDiv(r, {BATCH}) + 1 AS Version, {_RUN} AS RunId,
            'train' AS Mode, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 'spec' AS BuildSpec, {_TIME} AS IngestedAt
        {_each(1)}""",
    "policy_versions": f"""
        SELECT 'policy' AS Policy, 'main' AS Branch, intDiv(r, {BATCH}) + 1 AS Version, toString(Version) AS BatchId, 'committed' AS Status,
            map('mean_return', 0.5, 'logprob_gap_max', 1e-6) AS Metrics, {_TIME} AS IngestedAt
        {_each(1)} WHERE r % {BATCH} = 0""",
    "datasets": "SELECT 'default' AS Name, 1 AS Revision, 'spec' AS BuildSpec",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("speed")
    settings = store_settings(directory / "store")
    with running_store(settings, directory / "store.log"):
        client = connect(settings)
        for table, rows in FILL.items():
            names = ", ".join(f"`{name}`" for name in client.query(f"{rows} LIMIT 0").column_names)
            # Larger blocks, as the engine makes them by itself, need more memory than a statement gets.
            client.command(f"INSERT INTO {stored(table)} ({names}) {rows} SETTINGS min_insert_block_size_bytes = 67108864")
        yield client
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", DASHBOARDS)
def test_nobody_waits_for_a_panel(name: str, client: Client) -> None:
    model, now = json.loads(render(name)), datetime.now(UTC)
    window = Window(now - timedelta(days=7), now + timedelta(hours=1), 600)
    choices: dict[str, Choice] = {}
    took: dict[str, float] = {}

    def ask(title: str, sql: str) -> list[Any]:
        begun = time.monotonic()
        rows = list(client.query(expand(sql, choices, window)).result_rows)
        took[title] = time.monotonic() - begun
        return rows

    for variable in model["templating"]["list"]:
        current = variable.get("current", {}).get("value")
        if variable["type"] == "query":
            options = [str(row[0]) for row in ask(f"${variable['name']}", variable["query"])]
            choices[variable["name"]] = Choice(current if current == [ALL] else options[0], options)
        else:
            choices[variable["name"]] = Choice(current or "spangrad")
    rows = {panel.title: len(ask(panel.title, panel.sql)) for panel in panels(model)}
    for title, seconds in sorted(took.items(), key=lambda one: -one[1]):
        print(f"{name:9} {seconds:6.2f} s  {rows.get(title, '')!s:>5} rows  {title}")
    assert {title: seconds for title, seconds in took.items() if seconds > SECONDS} == {}
