"""Training before production: a backlog of traces delays no group, and the builder wakes when a rollout ends."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import polars as pl
import pytest

from spangrad.errors import StoreError
from spangrad.processes import free_ports, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.arrivals import Topic
from spangrad.store.clickhouse import connect
from spangrad.types import Mode
from tests.support.built_rollouts import outcome, post, rows, settings_of
from tests.support.processes import ForkedChild
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory
from transition_builder import builder as builders
from transition_builder.builder import Builder
from transition_builder.loop import build_all
from transition_builder.source import claims, discovery
from transition_builder.source.rollouts import RolloutReader
from transition_builder.waiting import BEHIND

BACKLOG = 800
SLICE = 200
"""Rollouts of a slice, at most, at the speed at which a slice is not made larger."""


def production(run: str, traces: int) -> bytes:
    """Traces of a call each, which no runner announced."""
    spans = SpanFactory(run=run)
    for number in range(traces):
        spans.call("", trace=f"{run}-{number}")
    for row in (*spans.spans, *spans.calls):
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    return spans.otlp()


def training(run: str, group: str, size: int = 4) -> bytes:
    """A group of ended rollouts."""
    spans = SpanFactory(run=run)
    for number in range(size):
        name = f"{group}-{number}"
        root = spans.root(name, calls=1, GroupId=group, GroupSize=size)
        spans.evaluation(root)
        spans.call(root, rollout=name)
    return spans.otlp()


class Builds:
    """Batches that `build` is given, by mode and size; `arrive` is called once, at the first batch of production."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arrive: Any = None) -> None:
        self.modes: list[str] = []
        self.sizes: list[int] = []
        original = builders.build

        def build(frames: Any, spec: Any) -> Any:
            nonlocal arrive
            self.modes.append("/".join(sorted(frames.rollouts["Mode"].unique())))
            self.sizes.append(frames.rollouts.height)
            if arrive and Mode.PRODUCTION in self.modes[-1]:
                arrive()
                arrive = None
            return original(frames, spec)

        monkeypatch.setattr(builders, "build", build)


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_builder_training_group_beside_backlog_of_production_is_built_first(
    tmp_path: Path, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_settings(tmp_path / "store")
    with running_store(store, tmp_path / "log"):
        post(store, production("backlog", BACKLOG))
        post(store, training("backlog", "there"))
        builds = Builds(monkeypatch, lambda: post(store, training("backlog", "meanwhile")))
        settings = settings_of(store, "backlog", quiet_seconds=0)

        summary = build_all(settings) if everything else Builder(settings).build_ready()

        # The group that is there comes first, and the one that ends during a slice right after that.
        assert builds.modes[:3] == ["train", "production", "train"]
        assert set(builds.modes[3:]) == {"production"}
        assert builds.sizes[0] == builds.sizes[2] == 4
        assert builds.sizes[1] <= SLICE
        assert (summary.rollouts, sum(builds.sizes)) == (BACKLOG + 8, BACKLOG + 8)
        counted = "SELECT count(), uniqExact(RolloutId) FROM spangrad.drops WHERE Mode = 'production'"
        assert rows(store, counted) == [(BACKLOG, BACKLOG)]
        assert len(outcome(store, "backlog")[0]) == 8


def test_builder_urgent_pass_leaves_production_to_a_later_one(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    post(store, production("later", 3))
    post(store, training("later", "group"))
    builds = Builds(monkeypatch)
    builder = Builder(settings_of(store, "later", quiet_seconds=0))
    builder.build_ready()
    post(store, production("later-still", 3))
    post(store, training("later", "another"))
    builds.modes.clear()
    builder.build_ready(urgent=True)
    assert builds.modes == ["train"]
    builder.build_ready()
    assert builds.modes == ["train", "production"]


def test_builder_amid_backlog_of_production_sweeps_when_due(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(settings_of(store, "amid", quiet_seconds=0))
    builder.build_ready()
    post(store, production("amid", SLICE + 50))
    swept: list[bool] = []
    original = discovery.Discovery.begin

    def begin(self: Any, now: datetime, *, sweeps: bool) -> None:
        swept.append(sweeps)
        original(self, now, sweeps=sweeps)

    monkeypatch.setattr(discovery.Discovery, "begin", begin)
    # The first slice takes until a sweep is due.
    builds = Builds(monkeypatch, lambda: monkeypatch.setattr(discovery, "BETWEEN_SWEEPS", timedelta(0)))
    summary = builder.build_ready()
    assert swept[:2] == [False, True]
    assert (summary.rollouts, sum(builds.sizes)) == (SLICE + 50, SLICE + 50)


def test_builder_sweep_over_built_rollouts_looks_for_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    read_ahead: list[str] = []
    original, begin = discovery.Discovery.rootless, RolloutReader.begin

    def rootless(self: Any) -> Any:
        asked.append(True)
        return original(self)

    def recorded_begin(self: RolloutReader, rollouts: pl.DataFrame) -> None:
        read_ahead.extend(rollouts["RolloutId"])
        begin(self, rollouts)

    store = store_settings(tmp_path / "store")
    with running_store(store, tmp_path / "log"):
        builder = Builder(settings_of(store, "swept"))
        builder.build_ready()
        post(store, training("swept", "group"))
        assert builder.build_ready().rollouts == 4
        monkeypatch.setattr(discovery.Discovery, "rootless", rootless)
        monkeypatch.setattr(RolloutReader, "begin", recorded_begin)
        monkeypatch.setattr(discovery, "BETWEEN_SWEEPS", timedelta(0))
        builder.build_ready()
        assert (asked, read_ahead) == ([], [])
        # A rollout that has not ended, and a trace that names none, may never have a root.
        for number, begun in enumerate([SpanFactory(run="swept"), SpanFactory(run="")], 1):
            begun.call("", rollout="begun" if number == 1 else "")
            post(store, begun.otlp())
            builder.build_ready()
            assert len(asked) == number


def test_builder_slice_after_one_that_failed_is_half_as_large(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(settings_of(store, "failing", quiet_seconds=0))
    builder.build_ready()
    post(store, production("failing", SLICE))
    failed: list[bool] = []

    def fail_once() -> None:
        if not failed:
            failed.append(True)
            raise StoreError("the span store refused")

    builds = Builds(monkeypatch, fail_once)
    with pytest.raises(StoreError):
        builder.build_ready()
    assert builder.build_ready().rollouts == SLICE
    assert builds.sizes[1] == builds.sizes[0] // 2


def test_builder_alone_claims_no_rollout(store: StoreSettings) -> None:
    post(store, training("alone", "group"))
    settings = settings_of(store, "alone")
    assert Builder(settings).build_ready().rollouts >= 4
    claimed = f"SELECT RolloutId FROM spangrad_internal.claims WHERE BuildSpec = '{settings.builder.spec}'"
    assert rows(store, claimed) == [("",)]


def test_builder_beside_one_that_began_since_its_last_look_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ALONE_SECONDS", 0)
    store = store_settings(tmp_path / "store")
    with running_store(store, tmp_path / "log"):
        settings = settings_of(store, "beside", quiet_seconds=0, incomplete_after_seconds=4)
        builder = Builder(settings)
        builder.build_ready()
        begun = SpanFactory(run="beside")
        begun.call("", rollout="begun")
        post(store, begun.otlp())
        with monkeypatch.context() as now:
            now.setattr(discovery, "BETWEEN_SWEEPS", timedelta(0))
            # It asks who else is at work, and has nothing to build yet.
            assert builder.build_ready().rollouts == 0
        Builder(settings)
        wait_until(lambda: builder.build_ready().rollouts == 1, 60, "the build")
        assert rows(store, "SELECT RolloutId FROM spangrad_internal.claims WHERE RolloutId != ''") == [("begun",)]


def test_builder_whose_sweeps_fail_builds_training(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(settings_of(store, "unswept"))
    builder.build_ready()
    original = discovery.Discovery.arrivals

    def nothing_arrives(*_: Any) -> frozenset[Topic]:
        return frozenset()

    def arrivals(self: Any) -> Any:
        if self.sweeps:
            raise StoreError("the span store refused")
        return original(self)

    monkeypatch.setattr(discovery.Discovery, "arrivals", arrivals)
    monkeypatch.setattr(discovery, "BETWEEN_SWEEPS", timedelta(0))
    with monkeypatch.context() as quiet:
        quiet.setattr(builders.Arrivals, "wait", nothing_arrives)
        builder.wait()
    with pytest.raises(StoreError):
        builder.build_ready()
    post(store, training("unswept", "group"))
    with pytest.raises(StoreError):
        builder.build_ready()
    assert len(outcome(store, "unswept")[0]) == 4


def test_builder_lags_give_age_and_number_by_mode(store: StoreSettings) -> None:
    spans = SpanFactory(run="lags")
    for name in ("a", "b"):
        spans.evaluation(spans.root(name, calls=1))
    post(store, spans.otlp())
    builder = Builder(settings_of(store, "lags", quiet_seconds=0))
    builder.build_ready()
    time.sleep(0.3)
    lags = builder.lags()
    assert set(lags) == set(Mode) >= BEHIND
    age, waiting = lags["train"]
    assert (0.3 < age < 20, waiting) == (True, 2)
    assert lags["validate"] == (0.0, 0)


def test_build_follow_wakes_when_a_root_arrives_and_serves_metrics(store: StoreSettings, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    builder = {"selection.agents": ".*|woken", "poll_seconds": 60, "metrics_address": f"127.0.0.1:{port}"}
    chosen = [f"--set=builder.{name}={value}" for name, value in builder.items()]
    follower = ForkedChild("follower", ["-m", "spangrad", "build", "--follow", f"--set=store.url={store.url}", *chosen], tmp_path / "log")
    try:

        def scrape() -> str:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                return answer.read().decode()

        def is_up() -> bool:
            try:
                return bool(scrape())
            except OSError:
                return False

        wait_until(is_up, 120, "the builder", [follower])
        time.sleep(1.5)
        post(store, training("woken", "group"))
        # It looks once a minute by itself.
        wait_until(lambda: len(outcome(store, "woken")[0]) == 4, 45, "the build", [follower])
        assert 'spangrad_builder_lag_seconds{mode="validate"} 0.0' in scrape()
        assert 'spangrad_builder_waiting_rollouts{mode="production"}' in scrape()
    finally:
        follower.stop(1)


def test_settled_client_reads_tables_as_they_are(tmp_path: Path) -> None:
    store = store_settings(tmp_path / "store", settle_seconds=600)
    with running_store(store, tmp_path / "log"):
        counted = "SELECT count() FROM spangrad_internal.attempts"
        clients = [connect(store, settled=settled) for settled in (True, False, True)]
        post(store, training("settled", "group"))
        assert [client.query(counted).result_rows for client in clients] == [[(0,)], [(4,)], [(4,)]]
