"""The public tables: what each says of a rollout that was built, and of a step that trained it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.datasets import builds_sql
from spangrad.store.names import PUBLIC
from spangrad.types import call_id
from tests.support.built_rollouts import post, rows, settings_of
from tests.support.spans import SpanFactory
from transition_builder.loop import build_once

RUN = "public"
VERSION = {"Policy": "public", "Branch": "main", "RunId": RUN, "BatchId": "public-1"}


@pytest.fixture(scope="module")
def tool(store: StoreSettings) -> str:
    """Build a rollout of two calls with a failed tool call between them, and record a step that trained it; return the tool's span."""
    spans = SpanFactory(run=RUN)
    root = spans.root("told", calls=2)
    spans.spans[-1]["Duration"] = 9 * 10**9
    for stage, seconds in (("init", 1), ("run", 6), ("evaluate", 2)):
        spans.span(stage, root, rollout="told", scope="spangrad.runner", Duration=seconds * 10**9)
    spans.evaluation(root, 1.0)
    call = spans.call(spans.client(root, rollout="told"), rollout="told", PromptIds=[1, 2, 3], ResponseIds=[4, 5])
    spans.evaluation(call, 0.25, "step")
    failed = {"input.value": '{"city": "rome"}', "output.value": "no such city", "tool.name": "weather"}
    tool = spans.span(
        "weather", root, rollout="told", kind="TOOL", status="Error", StatusMessage="unknown", Duration=250, Attributes=failed
    )
    spans.evaluation(tool, -0.5, "tool_error")
    spans.call(spans.client(root, rollout="told"), rollout="told", PromptIds=[1, 2, 3, 4, 5, 6], ResponseIds=[7])
    post(store, spans.otlp())
    settings = settings_of(store, RUN)
    build_once(settings)
    with connect(store) as client:
        batch = {**VERSION, "Version": 4, "GroupId": "g", "RolloutId": "told", "BuildSpec": settings.builder.spec}
        client.insert("spangrad_internal.batches", [list(batch.values())], column_names=list(batch))
        for version, advantage in ((3, 2.0), (4, -0.5)):
            trained = {**VERSION, "Version": version, "RolloutId": "told", "CallId": call_id(spans.trace(f"{RUN}.told.0"), call, 0)}
            row = {**trained, "Advantage": advantage, "IngestedAt": datetime(2026, 1, version, tzinfo=UTC)}
            client.insert("spangrad_internal.trained_calls", [list(row.values())], column_names=list(row))
        step = {**VERSION, "Version": 4, "Parent": 3, "Status": "committed", "Metrics": {"mean_return": 0.5, "seconds_train": 2.0}}
        client.insert("spangrad_internal.policy_versions", [list(step.values())], column_names=list(step))
    return tool


def test_rollouts_table_has_outcome_rewards_tokens_tools_time_and_training(store: StoreSettings, tool: str) -> None:
    query = (
        "SELECT Outcome, Return, Rewards, Calls, Transitions, Drops, InputTokens, OutputTokens, ToolCalls, FailedToolCalls, PolicyVersions,"
        f" Attempts, Seconds, StageSeconds, Trained FROM spangrad.rollouts WHERE RunId = '{RUN}'"
    )
    rewards, stages = {"reward": 1.0, "step": 0.25, "tool_error": -0.5}, {"evaluate": 2.0, "init": 1.0, "run": 6.0}
    assert rows(store, query) == [("succeeded", 0.75, rewards, 2, 2, 0, 9, 3, 1, 1, [3], 1, 9.0, stages, [("public", "main", 4)])]


def test_tool_calls_table_has_latency_error_reward_and_causing_call(store: StoreSettings, tool: str) -> None:
    query = (
        "SELECT ToolName, Arguments, Result, Failed, Error, Duration, Reward, SpanId, CallId IN"
        f" (SELECT CallId FROM spangrad.transitions WHERE RunId = '{RUN}' AND Turn = 0) FROM spangrad.tool_calls WHERE RunId = '{RUN}'"
    )
    assert rows(store, query) == [("weather", '{"city": "rome"}', "no such city", True, "unknown", 250, -0.5, tool, 1)]


def test_execution_table_has_calls_and_tool_calls_in_order_of_time(store: StoreSettings, tool: str) -> None:
    columns = "Kind, Name, Input, Output, length(InputIds), OutputIds, Reward"
    query = f"SELECT {columns} FROM spangrad.execution WHERE RunId = '{RUN}' ORDER BY Timestamp"
    assert rows(store, query) == [
        ("llm", "policy", "", "", 3, [4, 5], 0.25),
        ("tool", "weather", '{"city": "rome"}', "no such city", 0, [], -0.5),
        ("llm", "policy", "", "", 6, [7], None),
    ]


def test_transitions_have_the_advantage_that_the_newest_step_used(store: StoreSettings, tool: str) -> None:
    query = f"SELECT Turn, Advantage FROM spangrad.transitions WHERE RunId = '{RUN}' ORDER BY Turn"
    assert rows(store, query) == [(0, -0.5), (1, None)]


def test_call_texts_have_request_and_response_of_a_call_once(store: StoreSettings, tool: str) -> None:
    query = f"SELECT Input, Output FROM spangrad.call_texts WHERE SpanId = '{tool}' AND TraceId IN"
    of_rollout = f"{query} (SELECT TraceId FROM spangrad.rollout_traces WHERE RolloutId = 'told')"
    assert rows(store, of_rollout) == [('{"city": "rome"}', "no such city")]


def test_attempts_are_there_before_anything_is_built(store: StoreSettings) -> None:
    spans = SpanFactory(run="unbuilt")
    spans.root("waiting", calls=2, attempt=1)
    for _ in range(2):
        post(store, spans.otlp())
    query = "SELECT RolloutId, Attempt, Calls, Final, Failure, TaskId FROM spangrad.attempts WHERE RunId = 'unbuilt'"
    assert rows(store, query) == [("waiting", 1, 2, True, "", "t")]


def test_builds_newest_revision_counts_and_the_first_of_equals(store: StoreSettings) -> None:
    with connect(store) as client:
        for revision, content, minute in ((0, 9, 1), (2, 5, 3), (2, 4, 2), (1, 8, 4)):
            at = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
            row = {"RunId": "rev", "RolloutId": "r", "Revision": revision, "Content": content, "IngestedAt": at}
            client.insert("spangrad_internal.builds", [list(row.values())], column_names=list(row))
    assert rows(store, "SELECT Revision, Content FROM spangrad.builds WHERE RunId = 'rev'") == [(2, 4)]
    assert rows(store, f"SELECT Revision, Content FROM {builds_sql()} WHERE RunId = 'rev'") == [(2, 4)]


def test_steps_table_has_row_per_version_with_metrics(store: StoreSettings, tool: str) -> None:
    query = f"SELECT Version, Parent, Return, Seconds, Metrics FROM spangrad.steps WHERE RunId = '{RUN}'"
    metrics = {"mean_return": 0.5, "seconds_train": 2.0}
    assert rows(store, query) == [(4, 3, 0.5, {"seconds_train": 2.0}, metrics)]


def test_steps_table_has_null_where_a_step_has_no_such_metric(store: StoreSettings) -> None:
    step = {"Policy": "files", "Branch": "main", "RunId": "files", "BatchId": "files-1", "Version": 1, "Status": "committed"}
    with connect(store) as client:
        row = {**step, "Metrics": {"loss": 1.5, "tokens": 40.0}}
        client.insert("spangrad_internal.policy_versions", [list(row.values())], column_names=list(row))
    query = "SELECT Return, Success, Rollouts, Transitions, Tokens, Staleness, Loss, GradNorm FROM spangrad.steps WHERE RunId = 'files'"
    assert rows(store, query) == [(None, None, None, None, 40.0, None, 1.5, None)]


def test_public_tables_have_a_comment(store: StoreSettings) -> None:
    comments = dict(rows(store, f"SELECT name, comment FROM system.tables WHERE database = '{PUBLIC}'"))
    assert {"attempts", "calls", "drops", "execution", "lineage", "policy_versions", "rollouts", "steps", "tool_calls", "transitions"} <= {
        *comments
    }
    assert [name for name, comment in comments.items() if not comment.endswith(".")] == []


def test_rollouts_table_has_no_return_where_nothing_was_rewarded(store: StoreSettings) -> None:
    spans = SpanFactory(run="public_unrewarded")
    spans.root("crashed", calls=0, failure="crash")
    spans.call(spans.client(spans.root("dropped", calls=1), rollout="dropped"), rollout="dropped")
    spans.evaluation(spans.root("idle", calls=0), 0.0)
    post(store, spans.otlp())
    build_once(settings_of(store, "public_unrewarded", incomplete_after_seconds=0))
    query = "SELECT RolloutId, Return FROM spangrad.rollouts WHERE RunId = 'public_unrewarded' ORDER BY RolloutId"
    assert rows(store, query) == [("crashed", None), ("dropped", None), ("idle", 0.0)]


def test_rollouts_table_never_adds_up_the_rewards_of_several_roles(store: StoreSettings) -> None:
    spans = SpanFactory(run="public_roles")
    for rollout, rewards in (("game", [("white", 1.0), ("black", -1.0), ("", 0.5)]), ("lone", [("white", 1.0), ("", 0.5)])):
        root = spans.root(rollout, calls=1)
        for role, value in rewards:
            spans.evaluation(root, value, **({"role": role} if role else {}))
        spans.call(spans.client(root, rollout=rollout), rollout=rollout, PromptIds=[1], ResponseIds=[2])
    post(store, spans.otlp())
    build_once(settings_of(store, "public_roles"))
    query = "SELECT Return, ReturnsByRole, Rewards FROM spangrad.rollouts WHERE RunId = 'public_roles' ORDER BY RolloutId"
    assert rows(store, query) == [
        (None, {"black": -0.5, "white": 1.5}, {"reward": 0.5, "reward of black": -1.0, "reward of white": 1.0}),
        (1.5, {"white": 1.5}, {"reward": 0.5, "reward of white": 1.0}),
    ]
