"""Costs of the page: rows that views read of much history are those that they show; who waits for an overview holds no thread."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from page import lanes, overview, server
from page.lanes import PARTS, lanes_view
from page.reading import PageStore
from page.rollouts.filters import RolloutFilter, RolloutOrder
from page.rollouts.listing import page_of
from page.views import PageViews
from spangrad.errors import StoreError
from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.pages import running_page

ROLLOUTS = 20_000
GRANULE = 1024
"""Rows that an index of the store tells apart from others."""
HISTORY = """
INSERT INTO spangrad_internal.builds (RunId, Mode, BuildSpec, GroupId, RolloutId, Failure, IngestedAt)
SELECT format('{}-{}', %(run)s, intDiv(number, 10000)), 'train', 's', leftPad(toString(intDiv(number, 8)), 8, '0'),
    leftPad(toString(number), 8, '0'), if(number %% 200 = 0, 'timeout', ''),
    now64(6) - toIntervalSecond(8640000 * (number < 15000) + (20000 - number) * 30)
FROM numbers(20000)
"""
"""Statement that adds a rollout each 30 seconds in two runs; before the last 5,000 of them there is a pause of 100 days."""
TRAINED = """
INSERT INTO spangrad_internal.batches (Policy, Branch, BatchId, Version, RunId, Mode, GroupId, RolloutId, BuildSpec)
SELECT 'policy', %(run)s, toString(intDiv(number, 100)), intDiv(number, 100), RunId, Mode, GroupId, RolloutId, BuildSpec
FROM (SELECT *, toUInt64(RolloutId) AS number FROM spangrad_internal.builds WHERE startsWith(RunId, %(run)s))
"""
"""Statement that trains each of them, 100 a version."""


ATTEMPTS = """
INSERT INTO spangrad_internal.attempts (RunId, RolloutId, Timestamp, IngestedAt, Duration, Final)
SELECT %(run)s, RolloutId, IngestedAt - toIntervalSecond(20), IngestedAt, 10000000000, true
FROM spangrad_internal.builds WHERE startsWith(RunId, %(run)s)
"""
"""Statement that adds an attempt of each, which ran for 10 seconds and ended 10 seconds before the build."""
CALLS = """
INSERT INTO spangrad_internal.calls (RolloutKey, Timestamp, Duration, SpanId)
SELECT RolloutId, Timestamp, Duration, 'call' FROM spangrad_internal.attempts WHERE RunId = %(run)s
"""
"""Statement that adds a call of each attempt."""
STEP = """
INSERT INTO otel.otel_traces (ServiceName, SpanName, TraceId, SpanId, SpanAttributes, Timestamp, Duration)
SELECT 'spangrad-trainer', 'train step', 't', 's', map('spangrad.policy.name', 'policy', 'spangrad.trainer.branch', %(run)s,
    'spangrad.trainer.version', '1'), max(Timestamp), 60000000000 FROM spangrad_internal.attempts WHERE RunId = %(run)s
"""
"""Statement that adds a step of a minute, which began with the last attempt."""


class CountingStore(PageStore):
    """A store that remembers its statements, and how many rows each reads by its plan."""

    def __init__(self, store: StoreSettings) -> None:
        super().__init__(store)
        self.statements: list[str] = []
        self.scanned: list[int] = []

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        self.statements.append(sql)
        self.scanned.append(sum(row["rows"] for row in super().rows(f"EXPLAIN ESTIMATE {sql}", parameters)))
        return super().rows(sql, parameters)


@pytest.fixture(scope="module")
def run(store: StoreSettings) -> str:
    """Return the beginning of the names of two runs with much history."""
    name = f"costs-{uuid.uuid4().hex[:8]}"
    with connect(store) as client:
        client.command(HISTORY, parameters={"run": name})
        for statement in (TRAINED, ATTEMPTS, CALLS, STEP):
            client.command(statement, parameters={"run": name})
        for table in ("builds", "batches", "attempts", "calls"):
            client.command(f"OPTIMIZE TABLE spangrad_internal.{table} FINAL")
        # Revisions of old rollouts, of one that is trained of late, and of one that two builders made at once.
        client.command(
            "INSERT INTO spangrad_internal.builds (RunId, Mode, BuildSpec, GroupId, RolloutId, Revision, Content, IngestedAt)"
            " SELECT RunId, Mode, BuildSpec, GroupId, RolloutId, n.1, n.2, now64(6) FROM spangrad_internal.builds"
            " ARRAY JOIN [(1, 1), (1, 2)] AS n WHERE startsWith(RunId, %(run)s) AND RolloutId IN ('00000007', '00019990')",
            parameters={"run": name},
        )
    return name


@pytest.fixture
def store_of_page(store: StoreSettings, run: str) -> CountingStore:
    return CountingStore(store)


@pytest.mark.parametrize("query", [{}, {"run": "-1"}, {"failed": "no"}])
def test_rollouts_list_reads_as_many_rows_as_its_pages_need(store_of_page: CountingStore, run: str, query: dict[str, str]) -> None:
    chosen = RolloutFilter.of({name: f"{run}{value}" if name == "run" else value for name, value in query.items()})
    order = RolloutOrder()
    for _ in range(3):
        store_of_page.scanned.clear()
        page = page_of(store_of_page, chosen, order)
        assert max(store_of_page.scanned) <= 4 * GRANULE
        order = order.following(page["after"])


def test_rollouts_list_of_rare_rows_reads_each_window_once(store_of_page: CountingStore, run: str) -> None:
    page = page_of(store_of_page, RolloutFilter(outcome="timeout"), RolloutOrder(), 100)
    assert [row["RolloutId"] for row in page["rows"]] == [f"{number * 200:08d}" for number in reversed(range(100))]
    assert page["after"] is None
    assert len(store_of_page.scanned) == 9, "the newest build, six windows, newest revisions and trained versions"
    assert sum(store_of_page.scanned[1:-2]) < 2 * ROLLOUTS, "each window is read once"


def test_rollouts_list_by_pages_has_all_rows_in_order(store_of_page: CountingStore, run: str) -> None:
    """Pages of 3,001 rows, whose bounds lie within windows and in the pause."""
    uncounted, rows, order = PageStore(store_of_page.settings), list[dict[str, Any]](), RolloutOrder()
    while True:
        page = page_of(uncounted, RolloutFilter(text=run), order, 3001)
        rows += page["rows"]
        if page["after"] is None:
            break
        order = order.following(page["after"])
    with connect(store_of_page.settings) as client:
        newest = "argMax((toUnixTimestamp64Micro(IngestedAt), RunId, RolloutId, BuildSpec), Precedence) AS Newest"
        of_runs = f"SELECT {newest} FROM spangrad_internal.builds WHERE startsWith(RunId, %(run)s) GROUP BY RunId, RolloutId"
        expected = client.query(f"SELECT Newest FROM ({of_runs}) ORDER BY Newest DESC", parameters={"run": run}).result_rows
    assert [(row["BuiltUs"], row["RunId"], row["RolloutId"], row["BuildSpec"]) for row in rows] == [tuple(row[0]) for row in expected]
    assert len({row["RolloutId"] for row in rows}) == len(rows) == ROLLOUTS
    assert rows[0]["Trained"] == [("policy", run, int(rows[0]["RolloutId"]) // 100)]


def test_lanes_read_attempts_and_calls_of_their_time_only(store_of_page: CountingStore, run: str) -> None:
    """A day before the steps begin is theirs as well: 2,880 attempts."""
    view = lanes_view(store_of_page, "policy", run, newest=1, most=8)
    assert view["rollouts"][: PARTS // 6] == [1.0] * (PARTS // 6)
    assert view["rollouts"][PARTS // 6 :] == [0.0] * (PARTS - PARTS // 6)
    begin = (
        f"SELECT toUnixTimestamp64Nano(max(Timestamp)) AS begin, begin + 60000000000 AS end FROM spangrad.attempts WHERE RunId = '{run}'"
    )
    window = lanes._WINDOW  # pyright: ignore[reportPrivateUsage]
    store_of_page.rows(f"SELECT RolloutKey FROM spangrad_internal.calls WHERE {window}", PageStore.rows(store_of_page, begin)[0])
    _, _, _, attempts, calls = store_of_page.scanned
    assert max(attempts, calls) <= 2880 + 2 * GRANULE


def test_overview_reads_rows_of_its_hours_only(store_of_page: CountingStore, run: str) -> None:
    """Two hours of builds are 240 rows, and an hour of attempts 120."""
    view = overview.OverviewReader(store_of_page, Settings(store=store_of_page.settings)).read()
    assert view["rollouts"]["Waiting"] == 0
    assert max(store_of_page.scanned) <= 3 * GRANULE


def test_overview_reads_steps_again_where_a_version_changed(
    store_of_page: CountingStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "FRESH_SECONDS", 0.0)
    reader = overview.OverviewReader(store_of_page, Settings(store=store_of_page.settings))
    reads = list[tuple[list[tuple[int, float]], int]]()
    with connect(store_of_page.settings) as client:
        for loss, status in ((0.5, "committed"), (None, ""), (0.25, "committed"), (None, ""), (0.25, "orphaned")):
            if status:
                row = [run, run, 1, "b", status, {"loss": loss}]
                names = ["Policy", "Branch", "Version", "BatchId", "Status", "Metrics"]
                client.insert("spangrad_internal.policy_versions", [row], column_names=names)
            store_of_page.statements.clear()
            steps = [(step["Version"], step["Metrics"]["loss"]) for step in reader.read()["steps"]]
            reads.append((steps, sum("spangrad.steps" in sql for sql in store_of_page.statements)))
    assert reads == [([(1, 0.5)], 1), ([(1, 0.5)], 0), ([(1, 0.25)], 1), ([(1, 0.25)], 0), ([], 0)]


def test_overview_streams_hold_no_thread_and_get_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    steps = [{"Version": 1, "Metrics": {}}]

    def read(reader: overview.OverviewReader) -> dict[str, Any]:
        assert answer.wait(60)
        return {"steps": list(steps)}

    monkeypatch.setattr(overview.OverviewReader, "read", read)
    monkeypatch.setattr(server, "FRESH_SECONDS", 0.01)
    with ExitStack() as stack:
        url = stack.enter_context(running_page(Settings()))
        stack.callback(answer.set)
        streams = [stack.enter_context(urllib.request.urlopen(f"{url}/events/overview")) for _ in range(server.THREADS + 2)]
        with urllib.request.urlopen(f"{url}/api/queue", timeout=20) as other:
            assert json.load(other)["rows"] == []
        answer.set()
        for stream in streams:
            assert json.loads(_data(stream)) == {"versions": [1], "steps": [{"Version": 1, "Metrics": {}}]}
        steps.append({"Version": 2, "Metrics": {}})
        events = [json.loads(_data(streams[0]))]
        while events[-1]["versions"] != [1, 2]:
            events.append(json.loads(_data(streams[0])))
        assert all(event == {"versions": [1], "steps": []} for event in events[:-1])
        assert events[-1]["steps"] == [{"Version": 2, "Metrics": {}}]
        with urllib.request.urlopen(f"{url}/api/overview") as whole:
            assert json.load(whole) == {"steps": steps}


@pytest.mark.parametrize("http", ["HTTP/1.0", "HTTP/1.1"])
def test_download_whose_store_fails_midway_breaks_off(monkeypatch: pytest.MonkeyPatch, http: str) -> None:
    failing = threading.Event()

    def parts() -> Iterator[bytes]:
        yield b"row\r\n"
        assert failing.wait(60)
        raise StoreError("the store is gone.")

    monkeypatch.setattr(PageViews, "downloads", lambda views: {"/rollouts.csv": lambda query: ("rollouts.csv", parts())})
    with running_page(Settings()) as url, _download(url, http) as answer:
        received = _read_until(answer, b"row\r\n")
        failing.set()
        with pytest.raises(ConnectionResetError):
            _read_until(answer, b"never")
    assert received.count(b"HTTP/") == 1


def test_download_that_a_browser_leaves_logs_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def parts() -> Iterator[bytes]:
        try:
            while True:
                yield b"row\r\n" * 10_000
        finally:
            ended.set()

    monkeypatch.setattr(PageViews, "downloads", lambda views: {"/rollouts.csv": lambda query: ("rollouts.csv", parts())})
    with running_page(Settings()) as url:
        with _download(url, "HTTP/1.1") as answer:
            _read_until(answer, b"row")
        assert ended.wait(60)
    assert caplog.messages == []


def _download(url: str, http: str) -> socket.socket:
    """Ask for a download; return the connection."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=60)
    connection.sendall(f"GET /rollouts.csv {http}\r\nHost: {address.netloc}\r\n\r\n".encode())
    return connection


def _read_until(connection: socket.socket, end: bytes) -> bytes:
    """Return what is received up to a text, or to the end of the connection."""
    received = b""
    while end not in received and (part := connection.recv(65536)):
        received += part
    return received


def _data(stream: Any) -> bytes:
    """Return the next event of a stream of server-sent events."""
    line = stream.readline().removeprefix(b"data: ")
    assert stream.readline() == b"\n"
    return line
