"""The builder against a real store: spans in by OTLP/HTTP, transitions and drops out by SQL."""

from __future__ import annotations

import json
import re
import signal
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from spangrad.errors import SettingsError, StoreError
from spangrad.processes import free_ports, wait_until
from spangrad.settings import AirRule, BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.datasets import builds_sql, rows_sql
from tests.support import fake_engine
from tests.support.built_rollouts import outcome, post, revisions, rows, settings_of
from tests.support.dialects import IDS_OF_ANSWERS
from tests.support.processes import ForkedChild
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory
from transition_builder import batch_sizes
from transition_builder.build import build
from transition_builder.builder import Builder
from transition_builder.frames import Built, Frames
from transition_builder.loop import build_all, build_once
from transition_builder.source import rollouts
from transition_builder.source.queries import StoreReader
from transition_builder.summary import Summary

SPANS = Path(__file__).parents[1] / "fixtures" / "spans"


def linked_call(spans: SpanFactory, parent: str, **facts: Any) -> tuple[str, str]:
    """An openai-level span with its HTTP span, and the gateway's span below them."""
    where = {name: facts[name] for name in ("rollout", "attempt", "trace") if name in facts}
    client = spans.client(parent, **where)
    http = spans.span("POST", client, **where)
    return client, spans.call(http, **facts)


def test_builder_builds_nothing_before_last_gateway_span(store: StoreSettings) -> None:
    spans = SpanFactory(run="pieces")
    root = spans.root(calls=2)
    spans.evaluation(root, 0.5)
    agent = spans.span("agent", root, kind="AGENT")
    first_client, first = linked_call(spans, agent)
    second_client, second = linked_call(spans, agent, choices=2)
    late = {first, second}
    builder = Builder(settings_of(store, "pieces"))

    post(store, spans.otlp(*(row["SpanId"] for row in spans.spans if row["SpanId"] not in late)))  # type: ignore[misc]
    builder.build_ready()
    assert outcome(store, "pieces") == ([], [])

    for _ in range(3):  # delivered again and again, the one that came is still one
        post(store, spans.otlp(second))
        builder.build_ready()
    assert outcome(store, "pieces") == ([], [])

    post(store, spans.otlp(first))
    post(store, spans.otlp())
    built_until(builder, store, "pieces")
    prompt, response = [1, 2, 3], [4, 5]
    expected = [
        ("r", 0, first, 0, prompt, response, 3, []),
        ("r", 0, second, 1, prompt, response, 3, []),
        ("r", 0, second, 1, prompt, response, 3, [0.5]),
    ]
    assert outcome(store, "pieces") == (expected, [])
    assert rows(store, "SELECT CallId, Name, Value, Source, SpanId FROM spangrad_internal.rewards FINAL WHERE RunId = 'pieces'") == [
        ("", "reward", 0.5, "runner", root)
    ]
    assert first_client != second_client


def built_until(builder: Builder, store: StoreSettings, run: str) -> None:
    def done() -> bool:
        builder.build_ready()
        return outcome(store, run) != ([], [])

    wait_until(done, 60, f"the build of run {run}", poll_seconds=0.02)


def test_builder_restarted_builds_nothing_twice(store: StoreSettings) -> None:
    spans = SpanFactory(run="restart")
    root = spans.root(calls=2)
    spans.evaluation(root)
    linked_call(spans, root)
    linked_call(spans, root, ErrorType="APIError", HttpStatus=500)
    post(store, spans.otlp())
    settings = settings_of(store, "restart")
    build_once(settings)
    before = outcome(store, "restart")
    assert [len(part) for part in before] == [1, 1]
    build_once(settings)
    Builder(settings).build_ready()
    assert outcome(store, "restart") == before
    counts = (
        "SELECT (SELECT count() FROM spangrad_internal.transitions WHERE RunId = 'restart'),"
        " (SELECT count() FROM spangrad_internal.drops WHERE RunId = 'restart')"
    )
    assert rows(store, counts) == [(1, 1)]


class Killed(BaseException):
    """Stand-in for SIGKILL: the builder does nothing after it."""


@pytest.mark.parametrize("table", ["claims", "rewards", "transitions", "drops", "builds"])
def test_builder_killed_before_any_insert_leaves_no_partial_build(
    store: StoreSettings, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"killed-{table}"
    spans = SpanFactory(run=run)
    root = spans.root(calls=2)
    spans.evaluation(root)
    _, kept = linked_call(spans, root)
    _, dropped = linked_call(spans, root, Logprobs=[-0.5])
    post(store, spans.otlp())
    settings = settings_of(store, run, lease_seconds=0)

    def insert(reader: StoreReader, into: str, frame: Any) -> None:
        if into == table:
            raise Killed
        original(reader, into, frame)

    original = StoreReader.insert
    with monkeypatch.context() as patched:
        patched.setattr(StoreReader, "insert", insert)
        with pytest.raises(Killed):
            build_once(settings)
    assert outcome(store, run) == ([], [])
    assert revisions(store, run) == []

    build_once(settings)
    whole = (
        [("r", 0, kept, 0, [1, 2, 3], [4, 5], 3, [1.0])],
        [("r", 0, dropped, "no_logprobs", "1 logprobs for 2 tokens")],
    )
    assert outcome(store, run) == whole
    build_once(settings)
    assert outcome(store, run) == whole
    assert revisions(store, run) == [("r", 0, 2, 1, 1)]


def test_builder_rows_of_killed_build_do_not_mix_with_other_content(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    run = "left"
    spans = SpanFactory(run=run)
    root = spans.root(calls=1)
    spans.evaluation(root)
    counted, uncounted = spans.call(root), spans.call(root)
    post(store, spans.otlp(*(row["SpanId"] for row in spans.spans if row["SpanId"] != uncounted)))  # type: ignore[misc]
    settings = settings_of(store, run, lease_seconds=0)

    def insert(reader: StoreReader, into: str, frame: Any) -> None:
        if into == "builds":
            raise Killed
        original(reader, into, frame)

    original = StoreReader.insert
    with monkeypatch.context() as patched:
        patched.setattr(StoreReader, "insert", insert)
        with pytest.raises(Killed):
            build_once(settings)
    post(store, spans.otlp(uncounted))
    build_once(settings)
    expected = [("r", 0, counted, 0, [1, 2, 3], [4, 5], 3, []), ("r", 0, uncounted, 1, [1, 2, 3], [4, 5], 3, [1.0])]
    assert outcome(store, run) == (expected, [])
    assert revisions(store, run) == [("r", 0, 2, 2, 0)]
    assert rows(store, f"SELECT count() FROM spangrad_internal.transitions FINAL WHERE RunId = '{run}'") == [(3,)]


def test_builder_missing_calls_and_rewards_drop_after_wait(store: StoreSettings) -> None:
    spans = SpanFactory(run="late")
    root = spans.root("short", calls=2)
    spans.evaluation(root)
    _, call = linked_call(spans, root, rollout="short")
    empty = spans.root("empty", calls=3)
    spans.evaluation(empty)
    root = spans.root("mute", calls=1)
    _, mute = linked_call(spans, root, rollout="mute")
    post(store, spans.otlp())
    assert outcome(store, "late") == ([], [])
    build_once(settings_of(store, "late"))
    assert outcome(store, "late") == ([], [])
    build_once(settings_of(store, "late", incomplete_after_seconds=0))
    assert outcome(store, "late") == (
        [],
        [
            ("empty", 0, empty, "incomplete", "0 of 3 calls arrived within 0 s"),
            ("mute", 0, mute, "no_reward", "no evaluation result with a score arrived"),
            ("short", 0, call, "incomplete", "1 of 2 calls arrived within 0 s"),
        ],
    )


def test_builder_calls_of_earlier_attempts_drop_as_superseded_attempt(store: StoreSettings) -> None:
    spans = SpanFactory(run="attempts")
    failed = spans.root(attempt=0, calls=1, final=False, failure="crash")
    _, old = linked_call(spans, failed, attempt=0)
    root = spans.root(attempt=1, calls=1)
    spans.evaluation(root)
    _, new = linked_call(spans, root, attempt=1)
    post(store, spans.otlp(*(row["SpanId"] for row in spans.spans if row["SpanId"] != old)))  # type: ignore[misc]
    builder = Builder(settings_of(store, "attempts"))
    builder.build_ready()
    assert outcome(store, "attempts") == ([], [])
    post(store, spans.otlp(old))
    built_until(builder, store, "attempts")
    assert outcome(store, "attempts") == (
        [("r", 1, new, 0, [1, 2, 3], [4, 5], 3, [1.0])],
        [("r", 0, old, "superseded_attempt", "attempt 1 counts")],
    )


def test_builder_with_air_rewards_only_builds_without_evaluation(store: StoreSettings) -> None:
    """Two rollouts without an evaluation, in one of which a tool fails, are built end to end."""
    spans = SpanFactory(run="by-rules")
    kept = dict[str, str]()
    for rollout, status in (("bad", "Error"), ("good", "Ok")):
        root = spans.root(rollout, calls=1)
        _, kept[rollout] = linked_call(spans, root, rollout=rollout)
        spans.span("search", root, rollout=rollout, kind="TOOL", status=status)
    post(store, spans.otlp())
    rule = AirRule(name="broken", kind="tool_error", reward=-0.5, tools=("*",))
    build_once(settings_of(store, "by-rules", rules=(rule,)))
    assert outcome(store, "by-rules") == ([], []), "it waits for a reward"
    build_once(settings_of(store, "by-rules", rules=(rule,), rewards_from="rules"))
    ids = ([1, 2, 3], [4, 5], 3)
    assert outcome(store, "by-rules") == ([("bad", 0, kept["bad"], 0, *ids, [-0.5]), ("good", 0, kept["good"], 0, *ids, [])], [])
    rewards = "SELECT RolloutId, Name, Value, Source FROM spangrad.rewards WHERE RunId = 'by-rules'"
    assert rows(store, rewards) == [("bad", "broken", -0.5, "air")]


def test_builder_calls_of_reshaped_distribution_are_kept_with_reshaping(store: StoreSettings) -> None:
    spans = SpanFactory(run="reshaped")
    root = spans.root(calls=3)
    spans.evaluation(root)
    plain, cut = spans.call(root), spans.call(root, TopP=0.9, TopK=20)
    masked = spans.call(root, Constrained=True)
    post(store, spans.otlp())
    build_once(settings_of(store, "reshaped"))
    assert [(row[2], row[3], row[4]) for row in outcome(store, "reshaped")[1]] == [
        (cut, "other_distribution", "sampled with top_p=0.9, top_k=20"),
        (masked, "other_distribution", "sampled with masked tokens"),
    ]
    build_once(settings_of(store, "reshaped", reshaped="keep"))
    asked = "SELECT SpanId, Reshaping FROM spangrad_internal.transitions FINAL WHERE RunId = 'reshaped' ORDER BY Turn"
    assert rows(store, asked) == [(plain, ""), (plain, ""), (cut, "top_p=0.9, top_k=20"), (masked, "masked tokens")]


def test_builder_direct_mode_rollout_is_built_from_spans_of_agent(store: StoreSettings) -> None:
    """The captured LangGraph run with its failing tool, between a root of ours and without a gateway."""
    body = json.loads((SPANS / "langgraph_tool_error.jsonl").read_text())
    field = {"policy": "policy", "versions": [[[0, 7]]], "tokenizer_hash": "tok", "sampling": fake_engine.SAMPLING}
    spans = SpanFactory(run="plain")
    root = spans.root("plain-1", trace="plain")
    spans.evaluation(root, 1.0)
    for resource in body["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                span["traceId"] = SpanFactory.trace("plain")
                span["parentSpanId"] = root if span["name"] == "react_ag" else span["parentSpanId"]
                span["attributes"] = [attribute for attribute in span["attributes"] if attribute["key"] != "spangrad.rollout.id"]
                span["attributes"].append({"key": "spangrad.process.id", "value": {"stringValue": "agent"}})
                for attribute in span["attributes"]:
                    if attribute["key"] == "output.value" and '"choices"' in attribute["value"]["stringValue"]:
                        attribute["value"]["stringValue"] = json.dumps(json.loads(attribute["value"]["stringValue"]) | {"spangrad": field})
    post(store, json.dumps(body).encode())
    post(store, spans.otlp())

    patient = settings_of(store, "plain", rules=(AirRule(name="tool_error", kind="tool_error", reward=-0.1, tools=("*",)),))
    build_once(patient)
    assert outcome(store, "plain") == ([], [])  # not quiet for 30 s
    build_once(
        settings_of(store, "plain", rules=(AirRule(name="tool_error", kind="tool_error", reward=-0.1, tools=("*",)),), quiet_seconds=0)
    )

    transitions, drops = outcome(store, "plain")
    assert drops == []
    built = rows(store, "SELECT PromptIds, ResponseIds FROM spangrad.transitions WHERE RunId = 'plain' ORDER BY length(PromptIds)")
    assert rows(store, IDS_OF_ANSWERS.format(f"'{spans.trace('plain')}'")) == built
    first, second = rows(
        store,
        "SELECT AgentName, Policy, TokenizerHash, FinishReason, Logprobs, Rewards.Name, Rewards.Value, Rewards.Source "
        "FROM spangrad.transitions WHERE RunId = 'plain' ORDER BY Turn",
    )
    assert first == ("agent", "policy", "tok", "tool_calls", first[4], ["tool_error"], [-0.1], ["air"])
    assert second == ("agent", "policy", "tok", "stop", [0.0, -0.125, -0.25, -0.375, -0.5], ["reward"], [1.0], ["runner"])
    assert [(row[3], len(row[4]), len(row[5]), row[6]) for row in transitions] == [(0, 2, 12, 7), (1, 11, 5, 7)]


def test_builder_late_direct_mode_call_makes_new_revision(store: StoreSettings) -> None:
    """A rollout whose calls no gateway counted is complete before its late call arrives."""
    spans = SpanFactory(run="tardy")
    root = spans.root("tardy-1")
    spans.evaluation(root)
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [4], "logprobs": {"content": [{"logprob": -0.5}]}}
    field = {"policy": "policy", "versions": [[[0, 7]]], "tokenizer_hash": "tok", "sampling": fake_engine.SAMPLING}
    answer = {"model": "policy", "prompt_token_ids": [1, 2], "choices": [choice], "spangrad": field}
    in_time, late = (
        spans.client(root, rollout="tardy-1", Attributes={"output.value": json.dumps({"id": name} | answer)}) for name in ("a", "b")
    )
    post(store, spans.otlp(root, in_time))
    builder = Builder(settings_of(store, "tardy", quiet_seconds=0))
    builder.build_ready()
    kept = [("tardy-1", 0, in_time, 0, [1, 2], [4], 7, [1.0])]
    assert outcome(store, "tardy") == (kept, [])

    post(store, spans.otlp(late))
    builder.build_ready()
    builder.build_ready()
    both = [("tardy-1", 0, in_time, 0, [1, 2], [4], 7, []), ("tardy-1", 0, late, 1, [1, 2], [4], 7, [1.0])]
    assert outcome(store, "tardy") == (both, [])
    assert revisions(store, "tardy") == [("tardy-1", 0, 1, 1, 0), ("tardy-1", 1, 2, 2, 0)]


def test_builder_answer_of_invalid_json_drops_as_no_token_ids(store: StoreSettings) -> None:
    spans = SpanFactory(run="garbled")
    root = spans.root("garbled-1")
    spans.evaluation(root)
    garbled = spans.client(root, rollout="garbled-1", Attributes={"output.value": '{"choices": [{"token_ids": [1, 2'})
    text = spans.client(root, rollout="garbled-1", Attributes={"output.value": "hello"})
    post(store, spans.otlp())
    build_once(settings_of(store, "garbled", quiet_seconds=0))
    assert outcome(store, "garbled") == ([], [("garbled-1", 0, garbled, "no_token_ids", ""), ("garbled-1", 0, text, "no_token_ids", "")])


def test_builder_calls_without_rollout_id_are_assigned_by_trace(store: StoreSettings) -> None:
    """The gateway counts calls without a rollout id for no rollout."""
    spans = SpanFactory(run="foreign")
    root = spans.root("foreign-1", calls=0)
    spans.evaluation(root)
    foreign = {"RunId": "", "Mode": "", "RolloutKeySource": "trace"}
    trace = spans.spans[0]["TraceId"]
    call = spans.call(root, rollout="foreign-1")
    for row in (spans.spans[-1], spans.calls[-1]):
        row.update(foreign | {"RolloutKey": trace})
    post(store, spans.otlp())
    builder = Builder(settings_of(store, "foreign"))
    built_until(builder, store, "foreign")
    assert outcome(store, "foreign") == ([("foreign-1", 0, call, 0, [1, 2, 3], [4, 5], 3, [1.0])], [])


def test_builder_rollout_of_killed_runner_drops_after_silence(store: StoreSettings) -> None:
    spans = SpanFactory(run="sigkill")
    root = spans.root("rootless", calls=1)
    _, orphan = linked_call(spans, root, rollout="rootless")
    between = spans.root("between", calls=1, final=False, failure="exception")
    _, half = linked_call(spans, between, rollout="between")
    post(store, spans.otlp(*(row["SpanId"] for row in spans.spans if row["SpanId"] != root)))  # type: ignore[misc]
    Builder(settings_of(store, "sigkill", quiet_seconds=0)).build_ready()
    assert outcome(store, "sigkill") == ([], [])

    settings = settings_of(store, "sigkill", incomplete_after_seconds=0)
    build_once(settings)
    why = ("incomplete", "no final root arrived")
    dropped = [("between", 0, half, *why), ("rootless", 0, orphan, *why)]
    assert outcome(store, "sigkill") == ([], dropped)
    groups = "SELECT RolloutId, Mode, GroupId, GroupSize, TaskId FROM spangrad_internal.drops WHERE RunId = 'sigkill' ORDER BY RolloutId"
    assert rows(store, groups) == [("between", "train", "g", 2, "t"), ("rootless", "train", "", 0, "")]

    post(store, spans.otlp(root))  # a root that comes after all says more
    build_once(settings)
    fault = ("no_reward", "no evaluation result with a score arrived")
    assert outcome(store, "sigkill") == ([], [dropped[0], ("rootless", 0, orphan, *fault)])
    assert revisions(store, "sigkill") == [("between", 0, 1, 0, 1), ("rootless", 0, 1, 0, 1), ("rootless", 1, 1, 0, 1)]


def foreign(spans: SpanFactory) -> SpanFactory:
    """The same spans as an agent sends them that knows nothing of ours."""
    for row in (*spans.spans, *spans.calls):
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    return spans


def of_rollout(store: StoreSettings, rollout: str) -> list[tuple[Any, ...]]:
    """Return the outcomes of a rollout's calls: run, mode, group size, span, turn and rewards, or the drop's reason."""
    same, where = "SELECT RunId, Mode, GroupSize, SpanId", f"WHERE RolloutId = '{rollout}'"
    kept = rows(store, f"{same}, toString(Turn), Rewards.Value FROM spangrad.transitions {where} ORDER BY Turn")
    return kept + rows(store, f"{same}, Reason, [] FROM spangrad.drops {where} ORDER BY SpanId")


def test_builder_rootless_trace_is_built_when_quiet(store: StoreSettings) -> None:
    spans = SpanFactory(run="self")
    trace, mute = spans.trace("self"), spans.trace("mute")
    agent = spans.span("agent", "", kind="AGENT", trace="self")
    spans.evaluation(agent, 0.5)
    calls = [linked_call(spans, agent, trace="self")[1] for _ in range(2)]
    alone = spans.call("", trace="mute")
    post(store, foreign(spans).otlp())
    build_once(settings_of(store, "self"))
    assert of_rollout(store, trace) + of_rollout(store, mute) == []

    builder = Builder(settings_of(store, "self", quiet_seconds=0))
    builder.build_ready()
    kept = [("", "production", 0, calls[0], "0", []), ("", "production", 0, calls[1], "1", [0.5])]
    assert of_rollout(store, trace) == kept
    assert of_rollout(store, mute) == [("", "production", 0, alone, "no_reward", [])]
    builder.build_ready()
    build_once(settings_of(store, "self", quiet_seconds=0))
    assert of_rollout(store, trace) == kept


def test_builder_waiting_rollout_is_built_by_reward_that_does_not_name_it(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward names neither rollout nor session, in another trace than the root's; another span of that trace names the rollout."""

    def due_tomorrow(rows: pl.DataFrame, checked: pl.DataFrame, key: list[str], now: datetime) -> pl.DataFrame:
        return rows.with_columns(DueAt=pl.col("DueAt") + pl.duration(days=1))

    monkeypatch.setattr("transition_builder.waiting.checked", due_tomorrow)
    spans = SpanFactory(run="apart")
    root = spans.root("apart-1", calls=1)
    call = spans.call(root, rollout="apart-1")
    spans.span("step", root, rollout="apart-1", trace="apart")
    post(store, spans.otlp())
    builder = Builder(settings_of(store, "apart"))
    builder.build_ready()
    assert outcome(store, "apart") == ([], [])
    judge = spans.span("judge", "", trace="apart")
    spans.evaluation(judge, 0.5)
    for row in spans.spans[-2:]:
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    post(store, spans.otlp(judge))
    builder.build_ready()
    builder.build_ready()
    assert outcome(store, "apart") == ([("apart-1", 0, call, 0, [1, 2, 3], [4, 5], 3, [0.5])], [])


def test_builder_trace_without_gateway_is_found_by_model_spans(store: StoreSettings) -> None:
    """A trace that was not announced, and whose calls no gateway recorded, is found by an OpenInference span alone."""
    spans = SpanFactory(run="stranger")
    agent = spans.span("agent", "", kind="AGENT", trace="stranger")
    call = spans.client(agent, trace="stranger")
    spans.evaluation(agent, 1.0)
    trace = spans.trace("stranger")
    post(store, foreign(spans).otlp())
    builder = Builder(settings_of(store, "stranger", quiet_seconds=0))
    builder.build_ready()
    assert of_rollout(store, trace) == [("", "production", 0, call, "no_token_ids", [])]
    builder.build_ready()
    assert rows(store, f"SELECT Revision, Calls, Drops FROM spangrad.builds WHERE RolloutId = '{trace}'") == [(0, 1, 1)]


def test_builder_session_is_one_rollout_and_waits_for_open_spans(store: StoreSettings) -> None:
    spans = SpanFactory(run="chat")
    facts: dict[str, Any] = {"Attributes": {"session.id": "chat-session"}}
    first = spans.span("agent", "", kind="AGENT", trace="chat one", **facts)
    first_call = spans.call(first, trace="chat one")
    second = spans.span("agent", "", kind="AGENT", trace="chat two", **facts)
    spans.evaluation(second, 1.0)
    second_call = spans.call(second, trace="chat two")
    foreign(spans)
    builder = Builder(settings_of(store, "chat", quiet_seconds=0))
    post(store, spans.otlp(second_call))
    builder.build_ready()
    assert of_rollout(store, spans.trace("chat two")) == []
    post(store, spans.otlp())
    wait_until(lambda: builder.build_ready().transitions > 0, 60, "the session's build", poll_seconds=0.02)
    assert of_rollout(store, "chat-session") == [("", "production", 0, first_call, "0", []), ("", "production", 0, second_call, "1", [1.0])]


def test_builder_call_of_shared_trace_counts_once_across_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sizes, "ROWS_A_BUILD", 1)
    store = store_settings(tmp_path / "data")
    spans = SpanFactory(run="one-trace")
    own = list[str]()
    for rollout in ("shared-a", "shared-b", "shared-c"):
        root = spans.root(rollout, trace="shared-trace", calls=1)
        spans.evaluation(root)
        own.append(spans.call(root, rollout=rollout, trace="shared-trace"))
    nobodys = spans.call("", trace="shared-trace")
    for row in (spans.spans[-1], spans.calls[-1]):
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    # A store of its own: in the shared one this would build every other test's rollouts that name no run, one by one.
    with running_store(store, tmp_path / "store.log"):
        post(store, spans.otlp())
        build_once(settings_of(store, "one-trace"))
        transitions, drops = outcome(store, "one-trace")
    assert [row[2] for row in transitions] == own
    assert [row[:4] for row in drops] == [("shared-a", 0, nobodys, "shared_trace")]


@pytest.mark.parametrize("has_root", [True, False])
def test_builder_reads_and_builds_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_root: bool) -> None:
    """Rollouts of 12 rows each, whatever calls their roots count; a portion exceeds the bound by its last rollout at most."""
    monkeypatch.setattr(batch_sizes, "ROWS_A_BUILD", 24)
    monkeypatch.setattr(rollouts, "_FEW", 0)
    read, built = list[int](), list[int]()
    arrivals = rollouts.RolloutReader.arrivals

    def recorded_arrivals(reader: rollouts.RolloutReader, due: pl.DataFrame) -> pl.DataFrame:
        rows = arrivals(reader, due)
        read.append(rows.height)
        return rows

    def recorded_build(frames: Frames, spec: BuilderSettings) -> Built:
        built.append(frames.spans.height)
        return build(frames, spec)

    monkeypatch.setattr(rollouts.RolloutReader, "arrivals", recorded_arrivals)
    monkeypatch.setattr("transition_builder.builder.build", recorded_build)
    store = store_settings(tmp_path / "data")
    spans = SpanFactory(run="large")
    for number in range(6):
        root = spans.root(f"r{number}", calls=1)
        spans.evaluation(root)
        spans.call(root, rollout=f"r{number}")
        for _ in range(9):
            spans.span("step", root, rollout=f"r{number}")
    with running_store(store, tmp_path / "store.log"):
        post(store, (spans if has_root else foreign(spans)).otlp())
        build_once(settings_of(store, "large", quiet_seconds=0))
        assert rows(store, "SELECT count(), sum(Calls), sum(RowsRead) FROM spangrad.builds") == [(6, 6, 72)]
    assert (max(built) <= 36, len(built) >= 2, sum(built)) == (True, True, 72)
    assert (max(read, default=0) <= 36, sum(read)) == (True, 72 if has_root else 0)


def test_builder_rewards_of_earlier_revision_do_not_count(store: StoreSettings) -> None:
    spans = SpanFactory(run="judged")
    root = spans.root(calls=1)
    spans.evaluation(root)
    spans.call(root)
    spans.evaluation(spans.span("judge", root), 0.25, "quality")
    given = "SELECT Revision, Source, Value FROM {} WHERE RunId = 'judged' AND Name = 'quality' ORDER BY Revision"
    builder = Builder(settings_of(store, "judged"))
    post(store, spans.otlp())
    built_until(builder, store, "judged")
    assert rows(store, given.format("spangrad.rewards")) == [(0, "evaluation_event", 0.25)]

    spans.evaluation(root, 0.75, "quality")  # the runner is believed before everybody else
    post(store, spans.otlp())
    builder.build_ready()
    assert rows(store, given.format("spangrad.rewards")) == [(1, "runner", 0.75)]
    assert rows(store, given.format("spangrad_internal.rewards FINAL")) == [(0, "evaluation_event", 0.25), (1, "runner", 0.75)], (
        "what was is still there"
    )


def test_builder_call_after_build_makes_new_revision(store: StoreSettings) -> None:
    spans = SpanFactory(run="straggler")
    root = spans.root(calls=1)
    spans.evaluation(root)
    counted, late = spans.call(root), spans.call(root)
    builder = Builder(settings_of(store, "straggler"))
    post(store, spans.otlp(*(row["SpanId"] for row in spans.spans if row["SpanId"] != late)))  # type: ignore[misc]
    built_until(builder, store, "straggler")
    kept = [("r", 0, counted, 0, [1, 2, 3], [4, 5], 3, [1.0])]
    assert outcome(store, "straggler") == (kept, [])

    then = as_it_is(store)
    post(store, spans.otlp(counted))  # delivered again: no news
    builder.build_ready()
    assert revisions(store, "straggler") == [("r", 0, 1, 1, 0)]

    post(store, spans.otlp(late))
    builder.build_ready()
    both = [("r", 0, counted, 0, [1, 2, 3], [4, 5], 3, []), ("r", 0, late, 1, [1, 2, 3], [4, 5], 3, [1.0])]
    assert outcome(store, "straggler") == (both, [])
    builder.build_ready()
    build_once(settings_of(store, "straggler"))
    assert outcome(store, "straggler") == (both, [])
    assert revisions(store, "straggler") == [("r", 0, 1, 1, 0), ("r", 1, 2, 2, 0)]
    old = rows(store, f"SELECT SpanId, Turn, Rewards.Value FROM {rows_sql('transitions', then, where_run('straggler'))} AS t")
    assert old == [(counted, 0, [1.0])]
    states = [rows(store, f"SELECT Revision, Calls FROM {builds_sql(at, where_run('straggler'))} AS b") for at in (then, None)]
    assert states == [[(0, 1)], [(1, 2)]]


def as_it_is(store: StoreSettings) -> datetime:
    """The store's clock."""
    return datetime.fromtimestamp(rows(store, "SELECT toUnixTimestamp64Micro(now64(6)) / 1e6")[0][0], UTC)


def where_run(run: str) -> str:
    return f"RunId = '{run}'"


def test_builder_late_reward_makes_new_revision(store: StoreSettings) -> None:
    spans = SpanFactory(run="graded")
    root = spans.root(calls=1, trace="graded")
    call = spans.call(root, trace="graded")
    post(store, spans.otlp())
    settings = settings_of(store, "graded", incomplete_after_seconds=0)
    build_once(settings)
    assert outcome(store, "graded") == ([], [("r", 0, call, "no_reward", "no evaluation result with a score arrived")])
    judge = SpanFactory(run="graded")
    judge.evaluation(judge.span("judge", "", trace="graded"), 0.25)
    post(store, judge.otlp())
    build_once(settings)
    assert [row[-1] for row in outcome(store, "graded")[0]] == [[0.25]]
    assert revisions(store, "graded") == [("r", 0, 1, 0, 1), ("r", 1, 1, 1, 0)]


def test_build_as_of_time_sees_earlier_arrivals_only(store: StoreSettings) -> None:
    spans = SpanFactory(run="past")
    root = spans.root(calls=1)
    spans.evaluation(root)
    early, late = spans.call(root), spans.call(root)
    post(store, spans.otlp(*(row["SpanId"] for row in spans.spans if row["SpanId"] != late)))  # type: ignore[misc]
    then = as_it_is(store)
    post(store, spans.otlp(late))
    build_once(settings_of(store, "past"))
    past = settings_of(store, "past", as_of=then)
    build_once(past)
    by_spec = "SELECT SpanId FROM spangrad.transitions WHERE RunId = 'past' AND BuildSpec = '{}' ORDER BY Turn"
    assert rows(store, by_spec.format(past.builder.spec)) == [(early,)]
    assert rows(store, by_spec.format(settings_of(store, "past").builder.spec)) == [(early,), (late,)]


def test_build_all_concludes_ended_rollouts_and_leaves_running_rollouts(store: StoreSettings) -> None:
    spans = SpanFactory(run="all")
    root = spans.root("short", calls=2)
    spans.evaluation(root)
    _, short = linked_call(spans, root, rollout="short")
    running = spans.span("agent", "", rollout="running")
    linked_call(spans, running, rollout="running")
    post(store, spans.otlp())
    build_all(settings_of(store, "all"))
    assert outcome(store, "all") == ([], [("short", 0, short, "incomplete", "1 of 2 calls arrived within 0 s")])


def test_builders_run_concurrently_build_each_rollout_once(store: StoreSettings) -> None:
    names = [f"shared-{number:02}" for number in range(60)]
    spans = SpanFactory(run="shared")
    for name in names:
        root = spans.root(name, calls=1)
        spans.evaluation(root)
        spans.call(root, rollout=name)
    post(store, spans.otlp())
    builders = [Builder(settings_of(store, "shared")) for _ in range(2)]
    start = threading.Barrier(2)
    summaries = list[Summary]()

    def work(builder: Builder) -> None:
        start.wait()
        summaries.append(builder.build_ready())

    threads = [threading.Thread(target=work, args=(builder,)) for builder in builders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spec = settings_of(store, "shared").builder.spec  # of which the rollouts of other tests are built as well
    assert rows(store, f"SELECT uniqExact(RunId, RolloutId), count() FROM spangrad_internal.builds WHERE BuildSpec = '{spec}'") == [
        (sum(summary.rollouts for summary in summaries),) * 2
    ]
    once = [(name, 0, 1, 1, 0) for name in names]
    written = (
        "SELECT count() FROM spangrad_internal.builds WHERE RunId = 'shared'"
        " UNION ALL SELECT count() FROM spangrad_internal.transitions WHERE RunId = 'shared'"
    )
    assert (revisions(store, "shared"), rows(store, written)) == (once, [(60,), (60,)])  # nobody wrote what another did
    for builder in builders:
        builder.build_ready()  # rollouts of other tests may have ended meanwhile
    assert (revisions(store, "shared"), rows(store, written)) == (once, [(60,), (60,)])


def test_build_follow_survives_store_outage_and_stops_at_once(tmp_path: Path) -> None:
    store = store_settings(tmp_path / "data")
    log = tmp_path / "follow.log"
    spans = SpanFactory(run="follow")
    root = spans.root("one", calls=1)
    spans.evaluation(root)
    linked_call(spans, root, rollout="one")
    after = SpanFactory(run="follow")
    root = after.root("two", calls=1)
    after.evaluation(root)
    linked_call(after, root, rollout="two")
    chosen = [f"--set=store.url={store.url}", "--set=builder.selection.agents=.*|follow"]
    with running_store(store, tmp_path / "store.log"):
        follower = ForkedChild("follower", ["-m", "spangrad", "build", "--follow", *chosen], log)
        post(store, spans.otlp())
        wait_until(lambda: len(outcome(store, "follow")[0]) == 1, 120, "the first build", [follower])
    try:
        wait_until(lambda: "Trying again" in log.read_text(), 60, "the complaint")
        with running_store(store, tmp_path / "store.log"):
            post(store, after.otlp())
            wait_until(lambda: len(outcome(store, "follow")[0]) == 2, 120, "the second build")
            follower.process.send_signal(signal.SIGTERM)
            assert follower.process.wait(60) == 0
            assert [row[0] for row in outcome(store, "follow")[0]] == ["one", "two"]
    finally:
        follower.stop(0)
    assert "1 rollouts: 1 transitions, 0 drops, 1 rewards" in log.read_text()


@pytest.mark.parametrize("pattern", ["(", "(?x)a # b"])  # the latter is one alone, and none where it must match in full
def test_build_once_with_invalid_selection_pattern_raises(pattern: str) -> None:
    expected = rf"selection\.agents = '{re.escape(pattern)}' is no regular expression \(unclosed group\)"
    with pytest.raises(SettingsError, match=expected):
        build_once(Settings(builder=BuilderSettings(selection=Selection(agents=pattern))))


def test_build_once_without_store_raises_with_remedy() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StoreError, match=rf"the span store at http://127.0.0.1:{port} does not answer.*`spangrad store`"):
        build_once(Settings(store=StoreSettings(url=f"http://127.0.0.1:{port}")))
