"""Calls whose rollout is known later than they are built, and rollouts that share a name: each call counts once, in one rollout."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import constant
from tests.support.built_rollouts import outcome, post, revisions, rows, settings_of
from tests.support.servers import client_of
from tests.support.spans import SpanFactory
from transition_builder.builder import Builder
from transition_builder.loop import build_all
from transition_builder.source.claims import Claims


def nameless(spans: SpanFactory, *but: str) -> SpanFactory:
    """The same spans, as agents send them that know nothing of ours, but for some."""
    for row in (*spans.spans, *spans.calls):
        if row["SpanId"] not in but:
            row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    return spans


def where(store: StoreSettings, settings: Settings, *traces: str) -> list[tuple[Any, ...]]:
    """Rollouts in which the calls of traces count: span, run, rollout and rewards, or the reason of a drop."""
    of = f"BuildSpec = '{settings.builder.spec}' AND TraceId IN {constant(traces)}"
    kept = rows(store, f"SELECT SpanId, RunId, RolloutId, toString(Rewards.Value) FROM spangrad.transitions WHERE {of} ORDER BY SpanId")
    return kept + rows(store, f"SELECT SpanId, RunId, RolloutId, Reason FROM spangrad.drops WHERE {of} AND CallId != '' ORDER BY SpanId")


class Chat:
    """Two traces of a session; in the first, only its outermost span says so."""

    def __init__(self, run: str) -> None:
        self.spans = SpanFactory(run=run)
        self.session = f"{run}-session"
        facts: dict[str, Any] = {"kind": "CHAIN", "Attributes": {"session.id": self.session}}
        self.top = self.spans.span("session", "", trace=f"{run} one", **facts)
        agent = self.spans.span("agent", self.top, kind="AGENT", trace=f"{run} one")
        self.spans.evaluation(agent, 1.0)
        self.call = self.spans.call(agent, trace=f"{run} one")
        self.inside = [agent, self.call]
        self.trace = self.spans.trace(f"{run} one")
        second = self.spans.span("session", "", trace=f"{run} two", **facts)
        self.other = self.spans.call(second, trace=f"{run} two")
        self.second = [second, self.other]
        self.traces = [self.trace, self.spans.trace(f"{run} two")]
        nameless(self.spans)


@pytest.mark.parametrize("restarted", [False, True])
def test_builder_trace_with_session_known_later_counts_in_session_only(store: StoreSettings, restarted: bool) -> None:
    run = f"moved-{restarted}"
    chat = Chat(run)
    settings = settings_of(store, run, quiet_seconds=0, incomplete_after_seconds=0)
    builder = Builder(settings)

    def build_ready() -> list[tuple[Any, ...]]:
        (Builder(settings) if restarted else builder).build_ready()
        return where(store, settings, chat.trace)

    post(store, chat.spans.otlp(*chat.inside))
    assert build_ready() == [(chat.call, "", chat.trace, "[1]")]
    post(store, chat.spans.otlp(chat.top))
    assert build_ready() == [(chat.call, "", chat.session, "[1]")]
    assert build_ready() == [(chat.call, "", chat.session, "[1]")]
    sums = "SELECT RolloutId, Revision, Calls, Transitions, Drops, Unaccounted, Missing FROM spangrad.reconcile"
    of_both = f"BuildSpec = '{settings.builder.spec}' AND RolloutId IN ('{chat.session}', '{chat.trace}')"
    assert sorted(rows(store, f"{sums} WHERE {of_both}")) == sorted([(chat.session, 0, 1, 1, 0, 0, 0), (chat.trace, 1, 0, 0, 0, 0, 0)])


def test_builder_killed_after_reassigning_trace_is_completed_by_next(store: StoreSettings) -> None:
    run = "moved-killed"
    chat = Chat(run)
    at_once: dict[str, Any] = {"quiet_seconds": 0, "incomplete_after_seconds": 0}
    settings = settings_of(store, run, **at_once)
    post(store, chat.spans.otlp(*chat.inside))
    Builder(settings).build_ready()
    post(store, chat.spans.otlp(chat.top))
    Builder(settings_of(store, run)).build_ready()  # it waits for the session, and looks no more
    assert where(store, settings, chat.trace) == []
    Builder(settings).build_ready()
    assert where(store, settings, chat.trace) == [(chat.call, "", chat.session, "[1]")]


def test_builder_trace_that_leaves_session_keeps_other_traces(store: StoreSettings) -> None:
    """A trace belongs to the rollout that its latest spans name; the other traces of its former session stay there."""
    run = "moved-left"
    chat = Chat(run)
    settings = settings_of(store, run, quiet_seconds=0, incomplete_after_seconds=0)
    builder = Builder(settings)
    post(store, chat.spans.otlp(chat.top, *chat.inside, *chat.second))
    builder.build_ready()
    assert {row[2] for row in where(store, settings, *chat.traces)} == {chat.session}
    root = chat.spans.root("named", calls=0, trace=f"{run} one")
    post(store, chat.spans.otlp(root))
    for _ in range(2):
        builder.build_ready()
        assert where(store, settings, *chat.traces) == [
            (chat.call, run, "named", "[1]"),
            (chat.other, "", chat.session, "no_reward"),
        ]


def test_build_all_trace_with_open_span_waits_for_named_rollout(store: StoreSettings) -> None:
    run = "moved-root"
    spans = SpanFactory(run=run)
    root = spans.root("named", calls=0, trace=f"{run}.r.0")
    spans.evaluation(root)
    call = spans.call(spans.span("agent", root, kind="AGENT"))
    nameless(spans, root)
    settings = settings_of(store, run)
    post(store, spans.otlp(*(str(row["SpanId"]) for row in spans.spans if row["SpanId"] != root)))
    build_all(settings)
    assert where(store, settings, spans.trace(f"{run}.r.0")) == []
    post(store, spans.otlp(root))
    build_all(settings)
    assert where(store, settings, spans.trace(f"{run}.r.0")) == [(call, run, "named", "[1]")]


def test_builder_rootless_rollout_beside_same_id_in_other_run_is_concluded(store: StoreSettings) -> None:
    whole, cut = SpanFactory(run="namesake-whole"), SpanFactory(run="namesake-cut")
    roots = []
    for spans in (whole, cut):
        roots.append(spans.root("namesake", calls=1))
        spans.evaluation(roots[-1])
        spans.call(roots[-1], rollout="namesake")
    (call,) = (str(row["SpanId"]) for row in cut.calls)
    post(store, whole.otlp())
    post(store, cut.otlp(call))
    builder = Builder(settings_of(store, "namesake", incomplete_after_seconds=0))
    for _ in range(2):
        builder.build_ready()
    build_all(settings_of(store, "namesake", incomplete_after_seconds=0))  # which finds the other one built
    assert [row[:3] for row in outcome(store, "namesake-whole")[0]] == [("namesake", 0, str(whole.calls[0]["SpanId"]))]
    assert outcome(store, "namesake-cut") == ([], [("namesake", 0, call, "incomplete", "no final root arrived")])


def test_builder_rollout_beside_built_one_in_its_trace_is_concluded(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rollouts in one trace, both without a root: other builders hold both, and have built the first."""
    first, second = "beside-built-1", "beside-built-2"
    spans, free = SpanFactory(run="beside-built"), set[str]()
    calls = {rollout: spans.call("", rollout=rollout, trace="beside-built") for rollout in (first, second)}
    post(store, spans.otlp())
    monkeypatch.setattr(Claims, "take", lambda _, rollouts, __: rollouts.filter(pl.col("RolloutId").is_in(free)))
    settings = settings_of(store, "beside-built", quiet_seconds=0, incomplete_after_seconds=0)
    builder, other = Builder(settings), Builder(settings)
    builder.build_ready()
    free.add(first)
    other.build_ready()
    free.clear()
    builder.build_ready()
    free.add(second)
    builder.build_ready()
    assert outcome(store, "beside-built") == (
        [],
        [(rollout, 0, calls[rollout], "incomplete", "no final root arrived") for rollout in (first, second)],
    )


def test_builder_rollout_cancelled_after_lost_worker_is_built(store: StoreSettings) -> None:
    """The worker's root of the attempt, and the one that ends the rollout, are one span."""
    spans = SpanFactory(run="mourned")
    root = spans.root(calls=1, final=False, failure="exception")
    call = spans.call(root)
    post(store, spans.otlp())
    builder = Builder(settings_of(store, "mourned"))
    builder.build_ready()
    assert outcome(store, "mourned") == ([], [])
    facts = {"spangrad.rollout.final": "true", "spangrad.rollout.failure": "cancelled"}
    spans.spans[0] |= {"Attributes": {**spans.spans[0]["Attributes"], **facts}, "Timestamp": spans.time(60)}  # type: ignore[dict-item]
    post(store, spans.otlp(root))
    builder.build_ready()
    assert outcome(store, "mourned") == ([], [("r", 0, call, "attempt_failed", "cancelled")])
    assert revisions(store, "mourned") == [("r", 0, 1, 0, 1)]


def test_builder_removed_root_span_is_not_waited_for(store: StoreSettings) -> None:
    spans = SpanFactory(run="gone")
    root = spans.root(calls=2)
    spans.call(root)
    post(store, spans.otlp())
    builder = Builder(settings_of(store, "gone"))
    assert builder.build_ready().waiting > 0
    waited = builder.build_ready().waiting
    client_of(store).command("DELETE FROM spangrad_internal.rollout_spans WHERE RunId = 'gone' AND SpanName = 'rollout'")
    assert builder.build_ready().waiting < waited
