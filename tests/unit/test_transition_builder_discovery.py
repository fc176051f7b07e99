"""Looks of the builder at a store whose statements are slow, or fail."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import polars as pl
import pytest

from spangrad.errors import StoreError
from spangrad.settings import Settings
from tests.support.spans import SpanFactory
from transition_builder import builder as builders
from transition_builder.builder import Builder
from transition_builder.frames import conform, empty
from transition_builder.schemas import ARRIVED, BUILT, OWNERS, ROOTLESS, ROOTS
from transition_builder.source import queries
from transition_builder.source.discovery import Discovery
from transition_builder.source.known_builds import KnownBuilds
from transition_builder.source.marks import Marks

TIME = SpanFactory.time


class FakeReader:
    """A store in which nothing was built. Its clock moves on while it reads spans; a statement sees what had arrived when it began."""

    url, spec, as_of = "http://store", "spec", None

    def __init__(self, *, seconds: float) -> None:
        self.clock = TIME(0)
        self.seconds = seconds
        """Time that a statement takes."""
        self.roots = empty(ROOTS)
        self.unnamed = empty(ARRIVED)
        """Rows that name no rollout."""
        self.failures = 0
        """Number of further statements for rows without a root that fail."""

    def now(self) -> datetime:
        return self.clock

    def arrived(self, _: str) -> str:
        return "true"

    def insert(self, table: str, rows: pl.DataFrame) -> None:
        pass

    def built(self, _: pl.Series) -> pl.DataFrame:
        return empty(BUILT)

    def frame(self, sql: str, parameters: Mapping[str, Any] | None = None, **_: bool) -> pl.DataFrame:
        if "AS others" in sql:
            return pl.DataFrame({"others": [0]})
        if "builder_marks" in sql or "trace_owners" in sql:
            return empty(OWNERS)
        assert parameters is not None
        now, since = self.clock, datetime.fromtimestamp(int(parameters["since"]) / 1e6, UTC)
        self.clock += timedelta(seconds=self.seconds)
        visible = pl.col("IngestedAt").is_between(since, now)
        if "AS GroupSize" in sql:
            return self.roots.filter(visible)
        if "AS HasRoot" in sql:
            named = self.roots.with_columns(RolloutKey="RolloutId", RolloutKeySource=pl.lit("rollout"), HasRoot=True)
            ever_built = "spangrad_internal.builds" in sql
            rows = pl.concat([self.unnamed, conform(named.clear() if ever_built else named, ARRIVED)])
            return rows.filter(visible).with_columns(Now=pl.lit(now))
        if self.failures:
            self.failures -= 1
            raise StoreError("memory is short")
        return empty(ROOTLESS)


def builder_of(reader: FakeReader, monkeypatch: pytest.MonkeyPatch) -> Builder:
    def connect(*_: object, **__: object) -> object:
        return object()

    def reader_of(*_: object) -> FakeReader:
        return reader

    monkeypatch.setattr(builders, "connect", connect)
    monkeypatch.setattr(builders, "StoreReader", reader_of)
    return Builder(Settings())


def unnamed_rows(*arrivals: float) -> pl.DataFrame:
    """Return ARRIVED of traces that name no rollout."""
    rows = [
        {name: "" for name, dtype in ARRIVED.items() if dtype == pl.String}
        | {"RolloutKey": f"t{at}", "RolloutKeySource": "trace", "TraceId": f"t{at}", "Attempt": 0, "IngestedAt": TIME(at), "HasRoot": False}
        for at in arrivals
    ]
    return pl.DataFrame(rows, schema=dict(ARRIVED))


def test_known_builds_of_many_rollouts_repeat_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest revisions of so many rollouts are read with those of all others."""
    build = {"RunId": "run", "Revision": 0, "Content": 1, "Watermark": TIME(0), "RowsRead": 1, "IngestedAt": TIME(0)}
    builds = pl.DataFrame([build | {"RolloutId": name} for name in ("a", "b")], schema=dict(BUILT))

    def query(*_: object, **__: object) -> pl.DataFrame:
        return builds

    monkeypatch.setattr(queries, "_QUERIES", 0)
    monkeypatch.setattr(queries, "query", query)
    known = KnownBuilds(queries.StoreReader(cast("Any", None), Settings()))
    assert [known.of(pl.Series([name]))["RolloutId"].to_list() for name in ("a", "b")] == [["a"], ["b"]]


@pytest.mark.parametrize(("mark", "expected"), [(-60, ["t-30"]), (600, ["t-90", "t-30"])])
def test_discovery_mark_in_the_future_is_not_used(mark: int, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is in the future if the store's clock was set back after it was written."""
    reader = FakeReader(seconds=0)
    reader.unnamed = unnamed_rows(-90, -30)
    marks = Marks(cast("queries.StoreReader", reader), "builder")
    monkeypatch.setattr(marks, "read", lambda: TIME(mark))
    discovery = Discovery(cast("queries.StoreReader", reader), None, marks)
    discovery.begin(TIME(0), sweeps=True)
    assert discovery.arrivals()["TraceId"].to_list() == expected


def test_builder_root_visible_during_slow_first_look_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, spans = FakeReader(seconds=600), SpanFactory()
    spans.root("late", Mode="production", IngestedAt=TIME(60))
    reader.roots = conform(pl.DataFrame(spans.roots), ROOTS)
    reader.unnamed = unnamed_rows(0)
    builder = builder_of(reader, monkeypatch)

    builder.build_ready(urgent=True)
    assert builder.build_ready(urgent=True).waiting == 1


def test_builder_sweep_that_fails_again_and_again_keeps_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FakeReader(seconds=0.1)
    reader.unnamed = unnamed_rows(-3, -2, -1)
    reader.failures = 3
    builder, heights = builder_of(reader, monkeypatch), list[int]()

    for _ in range(3):
        with pytest.raises(StoreError, match="memory is short"):
            builder.build_ready(urgent=True)
        heights.append(builder._behind.height)  # pyright: ignore[reportPrivateUsage]
    builder.build_ready(urgent=True)
    assert heights == [0, 0, 0]
