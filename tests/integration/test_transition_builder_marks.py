"""Builders that are started again: they read from a mark on, and leave nothing behind."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pytest

from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import constant
from tests.support.built_rollouts import post, rows, settings_of
from tests.support.spans import SpanFactory
from transition_builder.builder import Builder
from transition_builder.loop import build_all
from transition_builder.source import discovery, marks
from transition_builder.source.queries import StoreReader

AT_ONCE: dict[str, Any] = {"quiet_seconds": 0, "incomplete_after_seconds": 0, "lease_seconds": 0}
"""Settings of builders that wait for nothing, and for no claim of one that was killed."""


@pytest.fixture(autouse=True)
def mark_at_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mark reach to the pass that writes it: here no row becomes visible later than it is dated."""
    monkeypatch.setattr(marks, "BETWEEN_MARKS", timedelta(0))
    monkeypatch.setattr(discovery, "OVERLAP", timedelta(0))


def marked(settings: Settings) -> datetime:
    ((newest,),) = rows(
        settings.store, f"SELECT max(Since) FROM spangrad_internal.builder_marks WHERE BuildSpec = '{settings.builder.spec}'"
    )
    return newest


def arrive(store: StoreSettings, spans: SpanFactory, *ids: str) -> None:
    """Send spans; they are in all tables when this returns, which the store promises after a moment only."""
    post(store, spans.otlp(*ids))
    rows(store, "SELECT 1")


def mixed_spans(run: str) -> SpanFactory:
    """Two announced rollouts, one of them with a failed attempt, one whose root never comes, and a chat of two traces without our names."""
    spans = SpanFactory(run=run)
    for rollout in ("whole", "again"):
        if rollout == "again":
            spans.call(spans.root(rollout, final=False, failure="crash", calls=1), rollout=rollout)
        root = spans.root(rollout, attempt=int(rollout == "again"), calls=2)
        agent = spans.span("agent", root, rollout=rollout, attempt=int(rollout == "again"), kind="AGENT")
        spans.evaluation(root, 0.5)
        for _ in range(2):
            spans.call(agent, rollout=rollout, attempt=int(rollout == "again"))
    spans.call(spans.span("agent", "", rollout="rootless", kind="AGENT"), rollout="rootless")
    for trace in (f"{run} one", f"{run} two"):
        top = spans.span("session", "", trace=trace, kind="CHAIN", Attributes={"session.id": f"{run}-session"})
        spans.call(spans.span("agent", top, trace=trace, kind="AGENT"), trace=trace)
        for row in (*spans.spans, *spans.calls):
            if row["TraceId"] == spans.trace(trace):
                row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    return spans


def concluded(settings: Settings, spans: SpanFactory) -> list[tuple[Any, ...]]:
    """Return what became of each call: its rollout, turn and rewards, or the reason of its drop."""
    of = f"BuildSpec = '{settings.builder.spec}' AND TraceId IN {constant({row['TraceId'] for row in spans.spans})}"
    kept = rows(settings.store, f"SELECT SpanId, RolloutId, toString(Turn), toString(Rewards.Value) FROM spangrad.transitions WHERE {of}")
    return sorted(kept + rows(settings.store, f"SELECT SpanId, RolloutId, Reason, '' FROM spangrad.drops WHERE {of} AND CallId != ''"))


@pytest.mark.parametrize(("seed", "from_marks"), [(0, True), (2, True), (1, False)])
def test_builders_restarted_at_each_arrival_build_the_same_rows_as_one(
    store: StoreSettings, monkeypatch: pytest.MonkeyPatch, seed: int, from_marks: bool
) -> None:
    if not from_marks:
        monkeypatch.setattr(marks.Marks, "read", lambda _: None)
    chance, run = random.Random(seed), f"marks-{seed}"
    spans = mixed_spans(run)
    settings, at_end = settings_of(store, run, **AT_ONCE), settings_of(store, f"{run}-at-end", **AT_ONCE)
    ids = sorted({row["SpanId"] for row in spans.spans})
    chance.shuffle(ids)
    cuts = sorted(chance.sample(range(1, len(ids)), 5))
    newest = None
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        arrive(store, spans, *ids[begin:end])
        Builder(settings).build_ready()
        assert newest is None or marked(settings) >= newest
        newest = marked(settings)
    build_all(at_end)
    assert len(concluded(at_end, spans)) == 8
    assert concluded(settings, spans) == concluded(at_end, spans)


def test_builder_mark_is_older_than_all_that_waits(store: StoreSettings) -> None:
    """A root that announces two calls of which one has come, and a call without a root: later builders find both."""
    spans = SpanFactory(run="marks-wait")
    root = spans.root(calls=2)
    spans.evaluation(root, 0.5)
    late = spans.call(root)
    spans.call(root)
    spans.call(spans.span("agent", "", rollout="rootless", kind="AGENT"), rollout="rootless")
    settings = settings_of(store, "marks-wait")
    arrive(store, spans, *{row["SpanId"] for row in spans.spans} - {late})
    arrived = "SELECT min(IngestedAt) FROM spangrad.rollout_spans WHERE RunId = 'marks-wait'"
    for _ in range(3):
        Builder(settings).build_ready()
        assert marked(settings) <= rows(store, arrived)[0][0]
    arrive(store, spans, late)
    Builder(settings).build_ready()
    assert [(rollout, turn) for _, rollout, turn, _ in concluded(settings, spans)] == [("r", "0"), ("r", "1")]


def test_builder_reads_from_its_mark_and_build_all_reads_all(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = SpanFactory(run="marks-read")
    spans.call(spans.root(calls=1))
    arrive(store, spans)
    settings, read = settings_of(store, "marks-read"), list[int]()
    frame = StoreReader.frame

    def recorded(reader: StoreReader, sql: str, parameters: dict[str, Any] | None = None, **options: Any) -> pl.DataFrame:
        read.extend([parameters["since"]] if parameters and "since" in parameters else [])
        return frame(reader, sql, parameters, **options)

    monkeypatch.setattr(StoreReader, "frame", recorded)
    Builder(settings).build_ready()
    assert min(read) == 0
    first = read.count(0)
    read.clear()
    since = marked(settings).timestamp() * 1e6
    Builder(settings).build_ready()
    assert min(read) == pytest.approx(since, abs=1)
    read.clear()
    newest = marked(settings)
    build_all(settings)
    Builder(settings, run="marks-read").build_ready()
    assert read.count(0) == 2 * first, "both begin with history"
    assert marked(settings) == newest, "a builder of one run, or of everything, leaves no mark"
