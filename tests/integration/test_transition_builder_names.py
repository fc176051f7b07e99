"""Names of sessions, rollouts, groups and spans: whatever they hold, their rollouts are built and loaded, and delay no others."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from spangrad.settings import AirRule, Settings, StoreSettings
from spangrad.store.clickhouse import constant
from tests.support.built_rollouts import outcome, post, rows, settings_of
from tests.support.policies import trainer_settings
from tests.support.servers import client_of
from tests.support.spans import SpanFactory
from trainer.data.source import Group, GroupReader
from transition_builder.loop import build_once
from transition_builder.source import queries

LONG = 3000


def session(run: str, name: str) -> SpanFactory:
    """A trace of a session, as an agent sends it that knows nothing of ours."""
    spans = SpanFactory(run=run)
    agent = spans.span("agent", "", kind="AGENT", trace=f"{run}.{name}", Attributes={"session.id": name})
    spans.evaluation(agent)
    spans.call(agent, trace=f"{run}.{name}")
    for row in (*spans.spans, *spans.calls):
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    return spans


@pytest.mark.parametrize(
    "names",
    [
        ["read file(1)", "see s3(bucket)", "INTO OUTFILE", "engine = File", "o'clock \\ --", "url (http://x)", "ü\x01,"],
        [f"{number:03}" + "s" * LONG for number in range(100)],
        ["s" * 200_000],
    ],
    ids=["refused words", "many long ones", "a huge one"],
)
def test_build_once_session_of_any_name_is_built(store: StoreSettings, names: list[str], request: pytest.FixtureRequest) -> None:
    run = f"names-{request.node.callspec.id}"
    for name in names:
        post(store, session(run, name).otlp())
    ours = SpanFactory(run=run)
    root = ours.root("ours", calls=1)
    ours.evaluation(root)
    call = ours.call(root, rollout="ours")
    post(store, ours.otlp())
    settings = settings_of(store, run, quiet_seconds=0)
    build_once(settings)
    build_once(settings)  # what is built is asked for by its name as well
    assert outcome(store, run)[0] == [("ours", 0, call, 0, [1, 2, 3], [4, 5], 3, [1.0])]
    kept = (
        f"SELECT RolloutId, count() FROM spangrad.transitions WHERE BuildSpec = '{settings.builder.spec}' "
        "AND RolloutId IN {names:Array(String)} GROUP BY ALL"
    )
    stored = client_of(store).query(kept.replace("{names:Array(String)}", constant(names)), settings={"max_query_size": 2**24}).result_rows
    assert sorted(tuple(row) for row in stored) == sorted((name, 1) for name in names)


def test_build_once_session_of_invalid_utf8_is_built(store: StoreSettings) -> None:
    """A session whose id is no valid UTF-8, as other writers may fill the table."""
    trace = SpanFactory.trace("names-bytes")
    client_of(store).command(
        "INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, ServiceName, ScopeName, SpanAttributes, Duration, StatusCode) "
        f"SELECT now64(9), '{trace}', '00000000000000aa', 'chat', 'svc', 'x', map('gen_ai.operation.name', 'chat', "
        "'gen_ai.request.model', 'm', 'session.id', unhex('61ff62')), 5, 'Ok'"
    )
    settings = settings_of(store, "names-bytes", quiet_seconds=0)
    build_once(settings)
    build_once(settings)
    where = f"BuildSpec = '{settings.builder.spec}' AND TraceId = '{trace}'"
    assert rows(store, f"SELECT hex(RolloutId), Revision, SpanId, Reason FROM spangrad.drops WHERE {where}") == [
        ("61FF62", 0, "00000000000000aa", "no_token_ids")
    ]


def test_build_once_answers_of_spans_of_any_name_are_read(store: StoreSettings) -> None:
    run = "names-spans"
    spans = SpanFactory(run=run)
    root = spans.root("r")
    spans.evaluation(root)
    choice = '{"index": 0, "finish_reason": "stop", "token_ids": [4], "message": {"content": "no"}}'
    answer = f'{{"id": "a", "choices": [{choice}], "prompt_token_ids": [1]}}'
    span: dict[str, Any] = {"scope": "openinference.instrumentation.openai", "service": "url(x)", "Attributes": {"output.value": answer}}
    call = spans.span("read file(1)", root, kind="LLM", **span)
    post(store, spans.otlp())
    rule = AirRule(name="form", kind="unparsable_output", reward=-1.0, form="yes")
    build_once(settings_of(store, run, quiet_seconds=0, rules=(rule,)))
    assert outcome(store, run) == ([], [("r", 0, call, "no_logprobs", "0 logprobs for 1 tokens")])
    assert rows(store, f"SELECT Name, Value FROM spangrad.rewards WHERE RunId = '{run}' ORDER BY Name") == [("form", -1.0), ("reward", 1.0)]


def test_group_reader_groups_of_any_name_are_loaded(store: StoreSettings) -> None:
    run, names = "names-groups", ["file(1)", "s3(x)"]
    built_by = settings_of(store, run, quiet_seconds=0)
    settings = Settings(store=store, builder=built_by.builder, trainer=trainer_settings(run_id=run))
    spans = SpanFactory(run=run)
    for name, failure in zip(names, ("exception", "cancelled"), strict=True):
        spans.root(f"{name} of url()", calls=0, failure=failure, GroupId=name, GroupSize=1)
    post(store, spans.otlp())
    build_once(built_by)
    source = GroupReader(client_of(store), settings)
    groups = source.ready()
    assert sorted(groups, key=str) == [Group(run, "train", settings.builder.spec, name) for name in names]
    loaded = source.load(groups)
    assert sorted((rollout.group.group_id, rollout.rollout_id) for rollout in loaded.rollouts) == [
        (name, f"{name} of url()") for name in names
    ]
    assert loaded.cancelled == {"s3(x)"}


@pytest.mark.parametrize("copied_bytes", [0, queries._COPIED_BYTES], ids=["in the URL", "in the body"])
def test_store_reader_insert_statement_in_url_or_body_writes_same_rows(
    store: StoreSettings, copied_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_COPIED_BYTES", copied_bytes)
    names = ["see s3(bucket)", "FORMAT Values\n('a')", "o'clock \\ --", "ü\x01,", ""]
    claims = pl.DataFrame({"BuildSpec": f"spec {copied_bytes}", "RunId": names, "RolloutId": names, "Builder": "me"})
    queries.StoreReader(client_of(store), Settings(store=store)).insert("claims", claims)
    stored = rows(store, f"SELECT RunId, RolloutId, Builder FROM spangrad_internal.claims WHERE BuildSpec = 'spec {copied_bytes}'")
    assert sorted(stored) == sorted((name, name, "me") for name in names)
