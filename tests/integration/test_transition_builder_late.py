"""Rows that were dated before a rollout was built, and seen after: what a slow insert does, against a real store."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.built_rollouts import outcome, post, revisions, rows, settings_of
from tests.support.servers import client_of, running_store, store_settings
from tests.support.spans import SpanFactory
from transition_builder import builder as builders
from transition_builder.builder import Builder
from transition_builder.loop import build_once
from transition_builder.source import discovery
from transition_builder.source.queries import StoreReader


class Slow:
    """A span that was sent in time, and whose insert ends when `lands` is called: its rows are dated by its beginning."""

    def __init__(self, store: StoreSettings, run: str, *, call: bool) -> None:
        self._store = store
        self._run = f"{run}-inserting"
        self._began = rows(store, "SELECT toUnixTimestamp64Micro(now64(6))")[0][0]
        # The rows as the store makes them, of a rollout that never ends.
        spans = SpanFactory(run=self._run)
        for _ in range(5 if call else 6):
            self.span = spans.call("", rollout=self._run) if call else spans.span("note", "", rollout=self._run)
        post(store, spans.otlp(self.span))

    def lands(self, run: str, key: str, source: str, trace: str, parent: str) -> None:
        """Its rows can be seen."""
        facts = {"RunId": run, "Mode": "train" if run else "", "RolloutKey": key, "RolloutKeySource": source, "TraceId": trace}
        columns = [f"'{value}' AS {name}" for name, value in (facts | {"ParentSpanId": parent}).items()]
        columns += [f"fromUnixTimestamp64Micro({self._began}) AS IngestedAt", f"{2**64 - 1 - self._began} AS DedupRank"]
        for table in ("calls", "rollout_spans"):
            client_of(self._store).command(
                f"INSERT INTO {stored(table)} SELECT * REPLACE ({', '.join(columns)}) FROM "
                f"(SELECT * FROM {stored(table)} WHERE RolloutKey = '{self._run}' AND SpanId = '{self.span}')"
            )


@pytest.fixture
def sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look is a sweep."""
    monkeypatch.setattr(discovery, "BETWEEN_SWEEPS", timedelta(0))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs of the rollouts that `build` was given."""
    given = list[str]()
    original = builders.build

    def build(frames: Any, spec: Any) -> Any:
        given.extend(frames.rollouts["RunId"])
        return original(frames, spec)

    monkeypatch.setattr(builders, "build", build)
    return given


@pytest.mark.usefixtures("sweeping")
@pytest.mark.parametrize("restarted", [False, True])
def test_builder_call_visible_late_makes_new_revision(store: StoreSettings, restarted: bool, built: list[str]) -> None:
    run = f"slow-{restarted}"
    slow, note = Slow(store, run, call=True), Slow(store, f"{run}-note", call=False)
    spans = SpanFactory(run=run)
    root = spans.root(calls=1)
    spans.evaluation(root)
    counted = spans.call(root)
    trace = str(spans.spans[0]["TraceId"])
    post(store, spans.otlp())
    settings = settings_of(store, run)
    builder = Builder(settings)

    def build_ready() -> tuple[list[tuple[Any, ...]], int]:
        """A look of the builder; the revisions, and how often the rollout was built by now."""
        build_once(settings) if restarted else builder.build_ready()
        return revisions(store, run), built.count(run)

    first, second = ("r", 0, 1, 1, 0), ("r", 1, 2, 2, 0)
    assert build_ready() == ([first], 1)
    assert build_ready() == ([first], 1)  # nothing has come

    slow.lands(run, "r", "rollout", trace, root)
    assert build_ready() == ([first, second], 2)
    both = [("r", 0, counted, 0, [1, 2, 3], [4, 5], 3, []), ("r", 0, slow.span, 1, [1, 2, 3], [4, 5], 3, [1.0])]
    assert sorted(row[2] for row in outcome(store, run)[0]) == sorted(row[2] for row in both)
    assert rows(store, f"SELECT Revision, RowsRead FROM spangrad_internal.builds FINAL WHERE RunId = '{run}' ORDER BY Revision") == [
        (0, 3),
        (1, 4),
    ]

    # A span from which nothing follows is read once, and makes no revision. Another builder's claim on it lasts a while.
    note.lands(run, trace, "trace", trace, root)
    assert build_ready() == ([first, second], 3)
    assert build_ready() == ([first, second], 3)


@pytest.mark.usefixtures("sweeping")
def test_builder_call_of_rootless_trace_visible_late_makes_new_revision(store: StoreSettings) -> None:
    run = "slow-production"
    slow = Slow(store, run, call=True)
    spans = SpanFactory()
    spans.call("", trace=run)
    trace = spans.trace(run)
    for row in (*spans.spans, *spans.calls):
        row |= {"RunId": "", "Mode": "", "RolloutKey": trace, "RolloutKeySource": "trace"}
    post(store, spans.otlp())
    settings = settings_of(store, run, quiet_seconds=0)
    builder = Builder(settings)
    of_trace = (
        "SELECT Revision, Calls, RowsRead FROM spangrad_internal.builds FINAL"
        f" WHERE RolloutId = '{trace}' AND BuildSpec = '{settings.builder.spec}'"
    )
    builder.build_ready()
    assert rows(store, of_trace) == [(0, 1, 1)]
    slow.lands("", trace, "trace", trace, "")
    builder.build_ready()
    builder.build_ready()
    assert rows(store, f"{of_trace} ORDER BY Revision") == [(0, 1, 1), (1, 2, 2)]


def test_builder_rollout_after_clock_was_set_back_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at an empty store whose clock was ten minutes ahead; a rollout with a root, and one without, arrive after that."""
    store, run, ahead = store_settings(tmp_path / "data"), "set-back", timedelta(minutes=10)
    spans = SpanFactory(run=run)
    root = spans.root(calls=1)
    spans.evaluation(root)
    calls = [spans.call(root), spans.call("", rollout="rootless")]
    settings, now = settings_of(store, run, incomplete_after_seconds=0), StoreReader.now

    def later(reader: StoreReader) -> datetime:
        return now(reader) + ahead

    with running_store(store, tmp_path / "store.log"):
        with monkeypatch.context() as patched:
            patched.setattr(StoreReader, "now", later)
            builder = Builder(settings)
            builder.build_ready()
        post(store, spans.otlp())
        builder.build_ready()
        builder.build_ready()
        transitions, drops = outcome(store, run)
    assert [row[2] for row in (*transitions, *drops)] == calls


def test_discovery_tally_counts_recently_built_rollouts_only(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start over history counts the rows of those rollouts alone that were built last, and soon after they came."""
    run, asked = "slow-history", list[str]()
    settings = settings_of(store, run)
    original = discovery.Discovery.tally

    def tally(self: discovery.Discovery, rollouts: Any) -> Any:
        asked.extend(one for one in rollouts if one.startswith(run))
        return original(self, rollouts)

    monkeypatch.setattr(discovery.Discovery, "tally", tally)
    for number in range(3):
        spans = SpanFactory(run=run)
        spans.evaluation(spans.root(f"{run}-{number}", calls=0))
        post(store, spans.otlp())
    build_once(settings)
    assert asked == []
    build_once(settings)
    assert sorted(asked) == [f"{run}-0", f"{run}-1", f"{run}-2"]

    age(settings, f"{run}-0", "IngestedAt")  # built long before the others
    age(settings, f"{run}-1", "Watermark")  # built long after it came
    asked.clear()
    build_once(settings)
    assert asked == [f"{run}-2"]


def age(settings: Settings, rollout: str, column: str) -> None:
    """Put a time of a rollout's build an hour back, and leave the rest as it was."""
    client = connect(settings.store)
    where = f"WHERE BuildSpec = '{settings.builder.spec}' AND RolloutId = '{rollout}'"
    client.command(f"ALTER TABLE spangrad_internal.builds UPDATE {column} = {column} - INTERVAL 1 HOUR {where} SETTINGS mutations_sync = 1")
