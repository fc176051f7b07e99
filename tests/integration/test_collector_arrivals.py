"""Waiting for arrivals: the store answers as soon as something arrived; a store that is not ours is polled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr

from collector.arrivals import ArrivalBoard
from spangrad.settings import StoreSettings
from spangrad.store import arrivals as arrivals_module
from spangrad.store.arrivals import Arrivals, Topic
from spangrad.store.clickhouse import connect
from tests.support.built_rollouts import post
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory

LONG, SOON = 60.0, 15.0
BUILD = "INSERT INTO spangrad_internal.builds (RunId, RolloutId) VALUES ('arrivals', 'r')"


def _ended(run: str) -> bytes:
    spans = SpanFactory(run=run)
    spans.evaluation(spans.root("r", calls=0), 1.0)
    return spans.otlp()


def _of_production() -> bytes:
    spans = SpanFactory(run="arrivals")
    spans.span("a span that ends no rollout", "")
    return spans.otlp()


def _woken_after(arrivals: Arrivals, arrive: Callable[[], object]) -> tuple[frozenset[Topic], float]:
    """Have something arrive while a thread waits; return the topics that it got, and the seconds from the arrival on."""
    got: list[tuple[frozenset[Topic], float]] = []
    thread = threading.Thread(target=lambda: got.append((arrivals.wait(LONG), time.monotonic())), daemon=True)
    thread.start()
    time.sleep(0.3)
    assert not got
    arrive()
    arrived = time.monotonic()
    thread.join(LONG)
    return got[0][0], got[0][1] - arrived


@pytest.fixture
def arrivals(store: StoreSettings) -> Arrivals:
    """One that has got all that was there before."""
    waiting = Arrivals(connect(store), store, Topic)
    assert waiting.wait(0) == frozenset(Topic)
    return waiting


def test_wait_without_arrivals_returns_nothing_after_its_time(arrivals: Arrivals) -> None:
    began = time.monotonic()
    assert arrivals.wait(0.4) == frozenset()
    assert 0.35 < time.monotonic() - began < SOON


def test_wait_returns_at_once_when_a_root_arrives(store: StoreSettings, arrivals: Arrivals) -> None:
    topics, seconds = _woken_after(arrivals, lambda: post(store, _ended("arrivals-root")))

    assert topics == {Topic.ROOTS, Topic.SPANS}
    assert seconds < SOON
    assert connect(store).query("SELECT count() FROM spangrad.attempts WHERE RunId = 'arrivals-root'").result_rows == [(1,)]


def test_wait_for_roots_ignores_other_spans_and_keeps_them_for_the_next_wait(store: StoreSettings, arrivals: Arrivals) -> None:
    post(store, _of_production())
    assert arrivals.wait(0.3, Topic.ROOTS) == frozenset()
    assert arrivals.wait(LONG) == {Topic.SPANS}


def test_wait_returns_at_once_when_rows_of_builds_are_inserted(store: StoreSettings, arrivals: Arrivals) -> None:
    topics, seconds = _woken_after(arrivals, lambda: connect(store).command(BUILD))
    assert (topics, seconds < SOON) == ({Topic.BUILDS}, True)


def test_wait_returns_arrivals_between_two_waits(store: StoreSettings, arrivals: Arrivals) -> None:
    connect(store).command(BUILD)
    post(store, _of_production())
    assert arrivals.wait(LONG) == {Topic.BUILDS, Topic.SPANS}
    assert arrivals.wait(0) == frozenset()


def test_lately_is_true_for_the_time_after_an_arrival(store: StoreSettings, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, now = 0.0, time.monotonic()
    monkeypatch.setattr(arrivals_module, "time", SimpleNamespace(monotonic=lambda: now + passed))
    assert arrivals.lately(10)
    passed = 11
    assert not arrivals.lately(10)
    connect(store).command(BUILD)
    assert not arrivals.lately(10), "the store was asked just before"
    passed = 12
    assert arrivals.lately(10)


def test_wait_returns_all_topics_after_the_store_was_restarted(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "store")
    with running_store(settings, tmp_path / "log"):
        waiting = Arrivals(connect(settings), settings, [Topic.BUILDS])
        assert waiting.wait(LONG) == {Topic.BUILDS}
        assert waiting.wait(0) == frozenset()
    assert waiting.wait(LONG) == {Topic.BUILDS}
    with running_store(settings, tmp_path / "log"):
        assert waiting.wait(LONG) == {Topic.BUILDS}
        assert waiting.wait(0) == frozenset()


def test_arrivals_asks_for_the_token(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "store", token="secret", read_token="reads")
    with running_store(settings, tmp_path / "log"):
        for token in ("secret", "reads"):
            bearer = settings.model_validate({**settings.model_dump(), "token": token, "read_token": None})
            waiting = Arrivals(connect(bearer), bearer, [Topic.BUILDS])
            assert waiting.wait(0) == {Topic.BUILDS}
            assert waiting.wait(0) == frozenset()
        of_url = bearer.model_copy(update={"url": bearer.url.replace("http://", "http://default:secret@"), "token": SecretStr("collector")})
        waiting = Arrivals(connect(of_url), of_url, [Topic.BUILDS])
        assert [waiting.wait(0) for _ in range(2)] == [{Topic.BUILDS}, frozenset()], (
            "the URL's password is the strongest, as for statements"
        )
        unknown = Arrivals(connect(settings), settings.model_copy(update={"token": None, "read_token": None}), [Topic.BUILDS])
        assert [unknown.wait(0) for _ in range(2)] == [{Topic.BUILDS}] * 2


@contextmanager
def _without_arrivals(store: StoreSettings) -> Generator[StoreSettings]:
    """The settings of a server that knows no arrivals, as ClickHouse."""

    class Unknown(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404, "There is no handle /arrivals")

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Unknown)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield store.model_copy(update={"url": f"http://127.0.0.1:{server.server_port}"})
    server.shutdown()


def test_wait_at_another_database_polls_by_statement(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    # The answer differs at the end of each interval, too.
    monkeypatch.setattr(arrivals_module, "_NEWEST", arrivals_module._NEWEST.replace("10 SECOND", "1 YEAR"))
    with _without_arrivals(store) as other:
        waiting = Arrivals(connect(store), other, [Topic.BUILDS], poll_seconds=0.05)
        assert waiting.wait(LONG) == {Topic.BUILDS}
        assert not waiting.by_events
        waiting.wait(0)
        topics, seconds = _woken_after(waiting, lambda: connect(store).command(BUILD))
        assert (topics, seconds < SOON) == ({Topic.BUILDS}, True)


@pytest.mark.parametrize(
    ("sql", "noted"),
    [
        ("INSERT INTO spangrad_internal.builds (RunId)", True),
        ("insert into `spangrad_internal`.`builds` FORMAT Arrow", True),
        ('INSERT INTO "spangrad_internal"."builds" (\n    RunId) FORMAT Native', True),
        ("INSERT INTO spangrad_internal.builds SELECT 1", True),
        ("INSERT INTO TABLE builds VALUES (1)", True),
        ("INSERT INTO spangrad_internal.builds_of_others (RunId)", False),
        ("SELECT * FROM spangrad_internal.builds", False),
        ("INSERT INTO spangrad_internal.transitions (RunId)", False),
    ],
)
async def test_board_notes_inserts_into_tables_of_topics(sql: str, noted: bool) -> None:
    board = ArrivalBoard()
    before = board.positions(Topic)
    board.note_insert(sql)
    after = board.positions(Topic)
    assert {topic for topic in Topic if before[topic] != after[topic]} == ({Topic.BUILDS} if noted else set())
