"""Time of panels' and users' queries on a million spans: a month of 50,000 rollouts and the 1,562 versions that they trained.

A figure is the least of three runs, each the smaller of the elapsed time and the server's CPU time: a busy machine lengthens the first.
What it lengthens the second, a calibration statement tells.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from dashboards.files import DASHBOARDS, render
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.grafana import ALL, Choice, Window, expand, panels
from tests.support.servers import running_store, store_settings

ROLLOUTS, SPANS, CALLS, BATCH = 50_000, 20, 4, 32
SECONDS = 0.2
"""Upper bound on a statement: readers of a dashboard wait for it."""
RUNS = 3
CALIBRATION, CALIBRATION_SECONDS = "SELECT sum(cityHash64(toString(number))) FROM numbers(20000000)", 0.085
"""Statement that only computes, and its CPU time on an idle machine of two cores."""

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
            'train' AS Mode, 'spec' AS BuildSpec, {_GROUP} AS GroupId, 'task' AS TaskId, {_ROLLOUT} AS RolloutId, n AS Turn,
            {_TRACE} AS TraceId, {_SPAN} AS SpanId, toString(number) AS TransitionId, toString(number) AS CallId, 'agent' AS AgentName,
            [intDiv(r, {BATCH})] AS SampledVersions, rand() % 2 AS Staleness, 500 AS InputTokens, 100 AS OutputTokens,
            rand() % 2 AS Reward, rand() % 2 AS Return, toFloat32(rand() % 3) - 1 AS Advantage, {_TIME} AS IngestedAt
        {_each(CALLS)}""",
    "drops": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, 'spec' AS BuildSpec, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 1 AS Content,
            toString(r) AS CallId, {_TIME} AS Timestamp, Timestamp AS IngestedAt, 'incomplete' AS Reason
        {_each(1)} WHERE r % 10 = 0""",
    "builds": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, 'spec' AS BuildSpec, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 1 AS Content,
            {_TIME} AS IngestedAt, {_TIME} AS StartedAt, {CALLS} AS Transitions, 2000 AS InputTokens, 400 AS OutputTokens,
            {CALLS} AS ToolCalls, 1 AS Attempts, rand() % 100 AS Seconds, ['reward'] AS `RewardTotals.Name`,
            [rand() % 2] AS `RewardTotals.Value`, ['init', 'run', 'evaluate'] AS `StageSeconds.Name`, [1, 8, 1] AS `StageSeconds.Value`,
            ['agent'] AS AgentNames, ['policy'] AS Models, [intDiv(r, {BATCH})] AS PolicyVersions
        {_each(1)}""",
    "rewards": f"""
        SELECT {_RUN} AS RunId, 'train' AS Mode, 'spec' AS BuildSpec, {_ROLLOUT} AS RolloutId, 1 AS Content,
            'reward' AS Name, rand() % 2 AS Value, 'runner' AS Source, {_TIME} AS IngestedAt
        {_each(1)}""",
    "batches": f"""
        SELECT 'policy' AS Policy, 'main' AS Branch, toString(Version) AS BatchId, intDiv(r, {BATCH}) + 1 AS Version, {_RUN} AS RunId,
            'train' AS Mode, {_GROUP} AS GroupId, {_ROLLOUT} AS RolloutId, 'spec' AS BuildSpec, {_TIME} AS IngestedAt
        {_each(1)}""",
    "policy_versions": f"""
        SELECT 'policy' AS Policy, 'main' AS Branch, intDiv(r, {BATCH}) + 1 AS Version, toString(Version) AS BatchId, 'committed' AS Status,
            map('mean_return', 0.5, 'logprob_gap_max', 1e-6) AS Metrics, {_TIME} AS IngestedAt
        {_each(1)} WHERE r % {BATCH} = 0""",
    "texts": f"""
        SELECT {_TIME} AS Timestamp, {_TRACE} AS TraceId, {_SPAN} AS SpanId, 'chat' AS SpanName, 'agent' AS ServiceName,
            if(n % 5 = 2, 'spangrad.gateway', 'x') AS ScopeName, if(n % 5 = 2,
                map('spangrad.request.json', repeat(toString(number), 200), 'spangrad.response.json', repeat('y', 300)),
                map('input.value', repeat('x', 400))) AS SpanAttributes
        {_each(SPANS)}""",
    "datasets": "SELECT 'default' AS Name, 1 AS Revision, 'spec' AS BuildSpec",
}


_ID = f"(SELECT RolloutId FROM spangrad.trained_calls WHERE Version = {ROLLOUTS // BATCH // 2} LIMIT 1)"
_DAY = "Timestamp > now() - INTERVAL 1 DAY"
_ADVANTAGE = "ToolName, AgentName, count(), avg(c.Advantage), avg(Failed), quantile(0.95)(Duration)"
QUESTIONS = {
    "newest 100 rollouts": "SELECT * FROM spangrad.rollouts ORDER BY StartedAt DESC LIMIT 100",
    "rollouts of a run": "SELECT * FROM spangrad.rollouts WHERE RunId = 'run-1'",
    "tasks of a run": "SELECT TaskId, count(), avg(Return) FROM spangrad.rollouts WHERE RunId = 'run-1' GROUP BY TaskId",
    "a rollout": f"SELECT * FROM spangrad.rollouts WHERE RolloutId = {_ID}",
    "attempts by outcome, a day": f"SELECT Failure, count() FROM spangrad.attempts WHERE {_DAY} GROUP BY Failure",
    "calls by model, a day": f"SELECT Model, quantile(0.95)(Duration) FROM spangrad.calls WHERE {_DAY} GROUP BY Model",
    "tool calls by tool, a day": f"SELECT ToolName, quantile(0.95)(Duration) FROM spangrad.tool_calls WHERE {_DAY} GROUP BY ToolName",
    "tool calls by tool, all": "SELECT ToolName, avg(Failed) FROM spangrad.tool_calls GROUP BY ToolName",
    "tool calls with advantages, all": f"""
        SELECT {_ADVANTAGE} FROM spangrad.tool_calls AS t INNER JOIN spangrad.trained_calls AS c ON c.CallId = t.CallId
        GROUP BY ToolName, t.AgentName AS AgentName""",
    "execution of a rollout": f"SELECT * FROM spangrad.execution WHERE RolloutId = {_ID} ORDER BY Timestamp",
    "texts of a rollout": f"""
        SELECT * FROM spangrad.call_texts WHERE TraceId IN (SELECT TraceId FROM spangrad.rollout_traces WHERE RolloutId = {_ID})""",
    "transitions of a rollout": f"SELECT * FROM spangrad.transitions WHERE RolloutId = {_ID}",
    "advantage by agent, a day": f"SELECT AgentName, avg(Advantage) FROM spangrad.transitions WHERE {_DAY} GROUP BY AgentName",
    "drops by reason, all": "SELECT Reason, count() FROM spangrad.drops GROUP BY Reason",
    "rewards of a run by name": "SELECT Name, avg(Value) FROM spangrad.rewards WHERE RunId = 'run-1' GROUP BY Name",
    "newest 100 steps": "SELECT * FROM spangrad.steps ORDER BY Version DESC LIMIT 100",
    "versions": "SELECT Version, Status, Checksum FROM spangrad.policy_versions",
    "batch of a version": "SELECT * FROM spangrad.batches WHERE Version = 100",
    "trained calls of a version": "SELECT * FROM spangrad.trained_calls WHERE Version = 100",
    "trained calls by agent, all": "SELECT AgentName, avg(Advantage) FROM spangrad.trained_calls GROUP BY AgentName",
    "lineage of a version": "SELECT * FROM spangrad.lineage WHERE Policy = 'policy' AND Branch = 'main' AND Version = 100",
    "spans of a rollout": f"""
        SELECT * FROM spangrad.rollout_spans
        WHERE RolloutId = {_ID} AND TraceId IN (SELECT TraceId FROM spangrad.rollout_traces WHERE RolloutId = {_ID})""",
}
"""Queries of users on the public tables."""


class Asking:
    """A client of a store that measures."""

    def __init__(self, client: Client, server: int) -> None:
        """Ask with `client`; `server` is the process id of the store."""
        self._client = client
        self._server = server
        self.took: dict[str, float] = {}

    def __call__(self, title: str, sql: str) -> list[Any]:
        """The rows of a statement, whose figure is kept."""
        rows: list[Any] = []
        for _ in range(RUNS):
            begun, used = time.monotonic(), self.cpu_seconds
            rows = list(self._client.query(sql).result_rows)
            seconds = min(time.monotonic() - begun, self.cpu_seconds - used)
            self.took[title] = min(seconds, self.took.get(title, seconds))
        return rows

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the server's threads so far."""
        total = 0
        for task in Path(f"/proc/{self._server}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread has ended
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def slow(self) -> dict[str, float]:
        """The figures beyond the bound, of all, which are printed; the bound is higher on a machine that computes more slowly now."""
        self("calibration", CALIBRATION)
        slower = max(1.0, self.took.pop("calibration") / CALIBRATION_SECONDS)
        for title, seconds in sorted(self.took.items(), key=lambda figure: -figure[1]):
            print(f"{1000 * seconds / slower:6.0f} ms  {title}")
        print(f"the machine computes {slower:.2f} times as long as an idle one")
        return {title: seconds for title, seconds in self.took.items() if seconds > SECONDS * slower}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, int]]:
    directory = tmp_path_factory.mktemp("speed")
    settings = store_settings(directory / "store")
    with running_store(settings, directory / "store.log") as child:
        client = connect(settings)
        fill(client)
        yield client, child.process.pid
        client.close()


def fill(client: Client) -> None:
    """Put the rows into the tables, without those that spans make of themselves."""
    client.command("CREATE TABLE spangrad_internal.texts AS otel.otel_traces")
    for table, rows in FILL.items():
        names = ", ".join(f"`{name}`" for name in client.query(f"{rows} LIMIT 0").column_names)
        # Larger blocks, as the engine makes them by itself, need more memory than a statement gets.
        client.command(f"INSERT INTO {stored(table)} ({names}) {rows} SETTINGS min_insert_block_size_bytes = 67108864")
    client.command("ALTER TABLE otel.otel_traces ATTACH PARTITION ALL FROM spangrad_internal.texts")
    client.command("DROP TABLE spangrad_internal.texts")


@pytest.mark.slow
@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_panel_queries_on_a_million_spans_answer_within_bound(name: str, store: tuple[Client, int]) -> None:
    model, now, ask = json.loads(render(name)), datetime.now(UTC), Asking(*store)
    window = Window(now - timedelta(days=7), now + timedelta(hours=1), 600)
    choices: dict[str, Choice] = {}
    for variable in model["templating"]["list"]:
        current = variable.get("current", {}).get("value")
        if variable["type"] == "query":
            options = [str(row[0]) for row in ask(f"${variable['name']}", expand(variable["query"], choices, window))]
            choices[variable["name"]] = Choice(current if current == [ALL] else options[0], options)
        else:
            choices[variable["name"]] = Choice(current or "spangrad")
    for panel in panels(model):
        ask(panel.title, expand(panel.sql, choices, window))
    assert ask.slow() == {}


@pytest.mark.slow
def test_public_tables_on_a_million_spans_answer_within_bound(store: tuple[Client, int]) -> None:
    ask = Asking(*store)
    without = [title for title, sql in QUESTIONS.items() if not ask(title, sql)]
    assert without == []
    assert ask.slow() == {}
